"""`phalanx.shard` in loops of a user's own: the curve of plain PyTorch, whatever the ranks; misuse, in sentences."""

import contextlib
import copy
import io
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.api.sharded_model import ShardedModel
from phalanx.core.errors import PhalanxError
from phalanx.core.placement import Placement
from tests.helpers import ROOT, free_port, process_group, run_ranks, some

STEPS, SAMPLES = 4, 13
LR, DECAY, CLIP = 1e-2, 0.1, 0.7


class Net(nn.Module):
    """Odd sizes, a parameter of its own, one that is used twice, one that is frozen and one that is never used."""

    def __init__(self, seed: int = 0, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks[1].weight.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden * self.scale + torch.tanh(block(hidden))
        return self.last(hidden * self.scale)[:, 0]


def data(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 3, generator=draws, dtype=torch.float64)
    return x.to(dtype), x.sum(1).sin().to(dtype)


def parts_of(step: int, rank: int, world: int) -> list[torch.Tensor]:
    """This rank's samples by micro-batch: of different numbers, and in every third step none for the last rank."""
    busy = world - 1 if step % 3 == 0 and world > 1 else world
    mine = torch.arange(SAMPLES)[rank::busy] if rank < busy else torch.arange(0)
    return list(mine.split(2 + rank)) if len(mine) else []


def loss_sum(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (net(x) - y).square().sum()


def trained(sharded: ShardedModel, net: nn.Module, until: int, dtype: torch.dtype = torch.float64) -> list[list[float]]:
    """[mean loss, norm, weight] of each step."""
    found = []
    while sharded.steps < until:
        number = sharded.steps + 1
        x, y = data(number, dtype)
        batches = parts_of(number, sharded.rank, sharded.world)
        with sharded.step(batches, weight=sum(map(len, batches))) as step:
            for batch in step:
                step.backward(loss_sum(net, x[batch], y[batch]))
        assert not step.skipped
        found.append([step.mean_loss(), step.norm, step.weight])
    return found


def whole(sharded: ShardedModel) -> list[float]:
    with sharded.full_parameters() as parameters:
        return torch.cat([tensor.flatten() for tensor in parameters.values()]).tolist()


def by_hand(seed: int = 0, clip: float | None = CLIP) -> tuple[list[list[float]], list[float]]:
    """The same with torch alone, in one process."""
    net = Net(seed).double()
    trained = [each for each in net.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for number in range(1, STEPS + 1):
        x, y = data(number)
        loss = loss_sum(net, x, y) / SAMPLES
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), norm.item(), SAMPLES])
    return found, torch.cat([each.detach().flatten() for each in net.parameters()]).tolist()


def loop(placement: Placement, **asked: Any) -> tuple[list[list[float]], list[float]]:
    with process_group(placement):
        net = Net(seed=placement.rank).double()  # the ranks begin with the values of rank 0
        kept = [id(each) for each in net.parameters()]
        with phalanx.shard(net, lr=LR, weight_decay=DECAY, clip_norm=CLIP, **asked) as sharded:
            assert kept == [id(each) for each in net.parameters()]
            found = trained(sharded, net, STEPS), whole(sharded)
        assert dist.is_initialized(), "what a user has set up stays"
    return found


@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        (1, {}),
        (3, {"zero": 1, "weights": [2, 1, 0], "slots": 2}),
        (4, {"zero": 2, "weights": [1, 2], "shard_degree": 2}),
        (3, {"zero": 3, "weights": [1, 2, 1], "units": ["blocks.0", "blocks.1", "blocks.2", "last"]}),
    ],
)
def test_the_curve_of_plain_adamw(ranks: int, asked: dict[str, Any]) -> None:
    curve, parameters = by_hand()
    for of_rank, theirs in run_ranks(loop, ranks, **asked):
        assert of_rank == [pytest.approx(step, rel=1e-9) for step in curve]
        assert theirs == pytest.approx(parameters, rel=1e-9, abs=1e-12)


# ------------------------------------------------------------------------------------------------- types, meta, devices


def narrow(placement: Placement, kind: str) -> tuple[list[float], list[str]]:
    dtype: torch.dtype = getattr(torch, kind)
    with process_group(placement):
        net = Net().to(dtype)
        with phalanx.shard(net, lr=0.05, rule="sgd", options={"momentum": 0.9}, zero=2) as sharded:
            trained(sharded, net, STEPS, dtype)
            return whole(sharded), sorted({str(each.dtype) for each in net.parameters()})


@pytest.mark.parametrize(("kind", "apart"), some([("float32", 1e-6), ("bfloat16", 2e-2)], 1))
def test_other_types(kind: str, apart: float) -> None:
    """The model computes in its own type; the masters are in float32, so that small updates are not lost."""
    ((alone, types),) = run_ranks(narrow, 1, kind=kind)
    assert types == [f"torch.{kind}"]
    reference = Net()
    optimizer = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], 0.05, momentum=0.9)
    computing = Net().to(getattr(torch, kind))
    for number in range(1, STEPS + 1):
        x, y = data(number, getattr(torch, kind))
        (loss_sum(computing, x, y) / SAMPLES).backward()
        for master, narrow_one in zip(reference.parameters(), computing.parameters(), strict=True):
            master.grad = None if narrow_one.grad is None else narrow_one.grad.float()
        optimizer.step()
        computing.load_state_dict(reference.state_dict())
        computing.zero_grad()
    plain = torch.cat([each.detach().flatten().float() for each in computing.parameters()]).tolist()
    assert alone == pytest.approx(plain, abs=apart)
    for theirs, _ in run_ranks(narrow, 3, kind=kind):
        assert theirs == pytest.approx(alone, abs=apart)


def from_meta(placement: Placement) -> list[float]:
    with process_group(placement):
        values = dict(Net().double().named_parameters())
        with torch.device("meta"):
            net = Net().double()

        def fill(part: Any) -> None:
            part.tensor.copy_(values[part.name].detach().flatten()[part.start : part.stop])

        with phalanx.shard(net, lr=LR, weight_decay=DECAY, clip_norm=CLIP, zero=3, fill=fill) as sharded:
            trained(sharded, net, STEPS)
            return whole(sharded)


def test_a_model_on_meta_is_filled_by_parts() -> None:
    _, parameters = by_hand()
    for theirs in run_ranks(from_meta, 2):
        assert theirs == pytest.approx(parameters, rel=1e-9, abs=1e-12)


# ------------------------------------------------------------------------------------------------ several models, state


def two_models(placement: Placement) -> list[Any]:
    """Two that take turns, one of them through the other, as in a GAN; and collectives of the user's own between."""
    with process_group(placement):
        critic, maker = Net(1).double(), nn.Linear(3, 3).double()
        with torch.no_grad():
            maker.weight.copy_(torch.eye(3))
        rank, world = placement.rank, placement.world
        with (
            phalanx.shard(critic, lr=LR, zero=3, weights=range(1, world + 1)) as one,
            phalanx.shard(maker, lr=LR, zero=1) as other,
        ):
            found = []
            for number in range(1, STEPS + 1):
                x, y = data(number)
                mine = torch.arange(SAMPLES)[rank::world]
                with one.step([mine], weight=len(mine)) as step:
                    for batch in step:
                        step.backward(loss_sum(critic, x[batch], y[batch]))
                count = torch.tensor([len(mine)])
                dist.all_reduce(count)
                assert count.item() == SAMPLES
                critic.requires_grad_(False)
                with other.step([mine], weight=len(mine)) as step, one.full_parameters():
                    for batch in step:
                        step.backward(loss_sum(lambda x: critic(maker(x)), x[batch], y[batch]))
                critic.requires_grad_(True)
                critic.blocks[1].weight.requires_grad_(False)
                found.append(step.mean_loss())
            return [found, whole(one), whole(other)]


def test_two_models_do_not_disturb_each_other() -> None:
    (alone,) = run_ranks(two_models, 1)
    for theirs in run_ranks(two_models, 3):
        for found, expected in zip(theirs, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def saving(placement: Placement, folder: str, until: int, **asked: Any) -> Any:
    with process_group(placement):
        net = Net().double()
        with phalanx.shard(net, lr=LR, weight_decay=DECAY, clip_norm=CLIP, **asked) as sharded:
            extra = sharded.load(folder)
            trained(sharded, net, until)
            sharded.save(folder, extra={"seen": sharded.steps * SAMPLES})
            return extra, sharded.steps, whole(sharded)


def test_saved_on_uneven_ranks_and_gone_on_with_on_others(tmp_path: Path) -> None:
    _, parameters = by_hand()
    assert run_ranks(saving, 3, folder=tmp_path, until=1, zero=2, weights=[0, 2, 1])[0][:2] == [None, 1]
    assert run_ranks(saving, 1, folder=tmp_path, until=2)[0][:2] == [{"seen": SAMPLES}, 2]
    for extra, steps, theirs in run_ranks(saving, 2, folder=tmp_path, until=STEPS, zero=3):
        assert (extra, steps) == ({"seen": 2 * SAMPLES}, STEPS)
        assert theirs == pytest.approx(parameters, rel=1e-9, abs=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", f"step-{STEPS:08d}"]


def sharded_again(placement: Placement, zero: int) -> list[str]:
    """A model that is sharded twice, at once and one after the other; between the two it is a plain one."""
    with process_group(placement):
        net = Net().double()
        with phalanx.shard(net, lr=LR, zero=zero) as sharded:
            trained(sharded, net, 2)
            found = [sentence(lambda part=part: phalanx.shard(part, lr=LR)) for part in (net, net.blocks)]
        if zero == 3:
            return [*found, sentence(lambda: phalanx.shard(net, lr=LR))]
        x, y = data(3)
        plain = copy.deepcopy(net)
        for each in (net, plain):
            loss_sum(each, x, y).backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)
            one.grad = other.grad = None
        with phalanx.shard(net, lr=LR, zero=zero) as again, phalanx.shard(plain, lr=LR) as fresh:
            assert trained(again, net, 2) == [pytest.approx(step) for step in trained(fresh, plain, 2)]
        return found


@pytest.mark.parametrize("zero", some([1, 2, 3], 1, 2))
def test_a_model_is_on_one_engine_at_a_time(zero: int) -> None:
    for whole, part, *closed in run_ranks(sharded_again, 2, zero=zero):
        assert "is already sharded; close() it first" in whole
        assert part == whole
        assert ["was sharded with zero=3 and closed" in each for each in closed] == [True] * (zero == 3)


# ----------------------------------------------------------------------------------------------------------- evaluation


def evaluated(placement: Placement, zero: int) -> list[float]:
    with process_group(placement):
        net = Net().double()
        x, y = data(99)
        found = []
        with phalanx.shard(net, lr=LR, zero=zero) as sharded, torch.no_grad():
            for until in (0, 2):
                with torch.enable_grad():
                    trained(sharded, net, until)
                found += [float(loss_sum(net, x, y)), float(loss_sum(net, x, y))]
                with sharded.full_parameters() as parameters:
                    assert sharded.sum(1.0) == [sharded.world]
                    found.append(float(loss_sum(net, x, y)))
                    again = Net().double()
                    again.load_state_dict(net.state_dict())
                    assert all(torch.equal(parameters[name], each) for name, each in again.named_parameters())
                    found.append(float(loss_sum(again, x, y)))
                mine = slice(sharded.rank, None, sharded.world)
                found.append(sharded.sum(float(loss_sum(net, x[mine], y[mine])))[0])
        return found


@pytest.mark.parametrize("zero", [2, 3])
def test_evaluation_between_steps_and_with_whole_parameters(zero: int) -> None:
    ((*before, middle, a, b, c, d),) = run_ranks(evaluated, 1, zero=zero)
    assert len({a, b, c}) == 1
    assert before[0] != middle
    for found in run_ranks(evaluated, 2, zero=zero):
        assert found == pytest.approx([*before, middle, a, b, c, d], rel=1e-9)


# --------------------------------------------------------------------------------------------------------------- misuse


def sentence(act: Callable[[], Any]) -> str:
    try:
        act()
    except (PhalanxError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextlib.contextmanager
def fresh(**asked: Any) -> Iterator[tuple[Net, ShardedModel]]:
    net = Net().double()
    with phalanx.shard(net, lr=LR, **asked) as sharded:
        yield net, sharded


def misused(placement: Placement) -> dict[str, str]:
    found = {}
    x, y = data(1)
    with process_group(placement):
        for name, change in CHANGES.items():
            with fresh() as (net, sharded):
                trained(sharded, net, 1)
                change(net)
                found[name] = sentence(lambda sharded=sharded, net=net: trained(sharded, net, 2))
        for name, steps in STEPPING.items():
            with contextlib.suppress(PhalanxError), fresh() as (net, sharded):
                found[name] = sentence(lambda sharded=sharded, net=net, steps=steps: steps(sharded, net, x, y))
        with fresh() as (net, sharded):
            pass
        found["closed"] = sentence(lambda: trained(sharded, net, 1))
        sharded.close()  # again, which does nothing
    return found


def one_step(
    sharded: ShardedModel, weight: Any, act: Callable[[Any], Any], batches: Any = (1, 2), lr: float | None = None
) -> Any:
    with sharded.step(batches, weight=weight, lr=lr) as step:
        act(step)
    return step


def every(step: Any, act: Callable[[], Any]) -> None:
    for _ in step:
        act()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "shape": lambda net: setattr(net.last.weight, "data", torch.zeros(2, 7).double()),
    "replaced": lambda net: setattr(net, "last", nn.Linear(7, 1).double()),
    "moved": lambda net: net.float(),
    "added": lambda net: setattr(net, "more", nn.Parameter(torch.zeros(2))),
    "written": lambda net: net.load_state_dict(Net(1).double().state_dict()),
    "unfrozen": lambda net: net.blocks[1].weight.requires_grad_(True),
}
STEPPING: dict[str, Callable[[ShardedModel, Net, Any, Any], Any]] = {
    "outside": lambda s, net, x, y: one_step(s, 1, lambda step: step.backward(loss_sum(net, x, y))),
    "plain backward outside": lambda s, net, x, y: loss_sum(net, x, y).backward(),
    "twice": lambda s, net, x, y: one_step(
        s, 1, lambda step: every(step, lambda: [step.backward(loss_sum(net, x, y)) for _ in range(2)])
    ),
    "no sum": lambda s, net, x, y: one_step(s, 1, lambda step: every(step, lambda: step.backward(net(x)))),
    "left early": lambda s, net, x, y: one_step(s, 1, lambda step: next(iter(step))),
    "gone through twice": lambda s, net, x, y: one_step(
        s, 1, lambda step: [every(step, lambda: step.backward(loss_sum(net, x, y))) for _ in range(2)]
    ),
    "no backward": lambda s, net, x, y: one_step(s, 3, lambda step: every(step, lambda: None)),
    "mean weight": lambda s, net, x, y: one_step(s, 0.5, lambda step: None),
    "asked within": lambda s, net, x, y: one_step(s, 1, lambda step: s.save("nowhere")),
    "norm within": lambda s, net, x, y: one_step(s, 1, lambda step: step.norm),
    "not called": lambda s, net, x, y: one_step(
        s, 1, lambda step: every(step, lambda: step.backward((x @ net.first.weight.T).sum()))
    ),
    "after a failure": lambda s, net, x, y: [
        sentence(lambda: one_step(s, 1, lambda step: step.no_such_thing)),
        s.save("nowhere"),
    ],
    "no JSON": lambda s, net, x, y: s.save("nowhere", extra={"x": x}),
    "nothing kept": lambda s, net, x, y: s.save("nowhere", keep=0),
}
EXPECTED = {
    "shape": "parameter last.weight has the shape (2, 7), and had (1, 7) when it was sharded, so this would be lost",
    "replaced": "parameter last.weight was replaced or moved to other memory after the model was sharded",
    "moved": "was replaced or moved to other memory",
    "added": "parameter more was added after the model was sharded",
    "written": "parameter scale was written to after the model was sharded, but its values are stored elsewhere",
    "unfrozen": "parameter blocks.1.weight needs gradients now, but was frozen when the model was sharded",
    "outside": "step.backward() was called outside of `for batch in step`",
    "plain backward outside": "a backward pass has run outside",
    "twice": "step.backward() was called twice for a micro-batch; sum its losses",
    "no sum": "step.backward() got a tensor of shape (13,), which must be a scalar",
    "left early": "a step ended after 0 of 2 micro-batches; iterate over all",
    "gone through twice": "the micro-batches of a step can be iterated only once",
    "no backward": "a step of weight 3 had no step.backward()",
    "mean weight": "a step has weight=0.5, which is not a count",
    "asked within": "this was called within a step or full_parameters()",
    "norm within": "results of a step are available after its `with` block",
    "not called": "parameter first.weight was used though first was not called in this micro-batch",
    "after a failure": "a step of this model failed half-way",
    "no JSON": "extra cannot be saved as JSON",
    "nothing kept": "keep is 0, which would leave no checkpoint",
    "closed": "this model was closed",
}


def test_misuse_is_refused_in_sentences() -> None:
    (found,) = run_ranks(misused, 1)
    assert found.keys() == EXPECTED.keys()
    assert {name: said for name, said in found.items() if EXPECTED[name] not in said} == {}


def unlike(placement: Placement) -> list[str]:
    rank = placement.rank
    found = []
    with process_group(placement):
        model = Net().double()
        for asked in (
            {"zero": 1 + rank},
            {"shard_degree": 3},
            {"weights": [1, 1, 1]},
            {"weights": [0, 0]},
            {"weights": [-1, 1]},
        ):
            found.append(sentence(lambda asked=asked: phalanx.shard(model, lr=LR, **asked)))
        found.append(sentence(lambda: phalanx.shard(Net(width=7 + rank).double(), lr=LR)))
        with contextlib.suppress(PhalanxError), fresh() as (_, sharded):
            lr = LR * (1 + rank)
            found.append(sentence(lambda: one_step(sharded, 0, lambda step: every(step, str), batches=[], lr=lr)))
    return found


def test_ranks_that_ask_for_unlike_things() -> None:
    for found in run_ranks(unlike, 2):
        zero, degree, length, nothing, negative, shape, rates = found
        assert "rank 1 calls phalanx.shard with zero=2, but rank 0 with zero=1" in zero
        assert "a copy of the state cannot be sharded over 3 ranks each, since there are 2" in degree
        assert "weights has 3 numbers, but a copy of the state is sharded over 2 ranks" in length
        assert "weights 0, 0 make no shares of the state" in nothing
        assert "weights -1, 1 make no shares of the state" in negative
        assert "rank 1 has a different model than rank 0 (they differ in scale)" in shape
        assert "learning rates of step 1 are from 0.01 to 0.02; use the same on all ranks" in rates


def absent(placement: Placement) -> str:
    with process_group(placement), fresh(timeout_s=3.0, zero=3) as (net, sharded):
        if placement.rank == 1:
            time.sleep(4.5)
            sharded.__exit__(None, KeyboardInterrupt(), None)  # it does not wait for others now
            return "was late"
        return sentence(lambda: trained(sharded, net, 1))


def test_a_rank_that_is_late_is_named() -> None:
    said = run_ranks(absent, 2)[0]
    assert "rank 1 of 2 did not respond after" in said
    assert "raise timeout_s" in said


# -------------------------------------------------------------------------------------------------------------- example

EXAMPLE = ROOT / "examples" / "sharded_loop.py"


def script(placement: Placement, port: int, folder: str | None = None) -> str:
    """What the example prints as torchrun would start it."""
    os.environ |= {"RANK": str(placement.rank), "WORLD_SIZE": str(placement.world), "LOCAL_RANK": str(placement.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if folder is not None:
        found = runpy.run_path(str(EXAMPLE))["train"](zero=2, folder=Path(folder))
        return f"{len(found)} losses, the last {found[-1]:.6f}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def test_the_example_ends_alike_on_one_rank_and_on_three(tmp_path: Path) -> None:
    (alone,) = run_ranks(script, 1, port=free_port())
    first, last = (float(word) for word in alone.split() if word.startswith(("0.", "1.")))
    assert last < 0.5 * first, "it does learn"
    assert run_ranks(script, 3, port=free_port()) == [alone, "", ""]
    said = {line for _ in range(2) for line in run_ranks(script, 1, port=free_port(), folder=tmp_path)}
    assert said == {f"41 losses, the last {last:.6f}", f"1 losses, the last {last:.6f}"}, (
        "it goes on from what was saved"
    )


def test_the_example_needs_about_eight_lines() -> None:
    marked = [line for line in EXAMPLE.read_text().splitlines() if "  # [" in line]
    assert [line.rpartition("# ")[2] for line in marked] == [f"[{number}]" for number in range(1, 9)]


ENDS = """
import os
import torch, phalanx
net = torch.nn.Linear(8, 8)
with phalanx.shard(net, lr=1e-3, zero={zero}) as sharded:
    with sharded.step([torch.ones(1, 8)], weight=1) as step:
        for batch in step:
            step.backward(net(batch).sum())
    step.norm
print(sorted({{open(f"/proc/self/task/{{task}}/comm").read().strip() for task in os.listdir("/proc/self/task")}}))
"""


@pytest.mark.parametrize("zero", some([1, 3], 1))
def test_nothing_of_the_groups_outlives_the_model(zero: int) -> None:
    """Threads of a group that is still held when the interpreter ends abort the process, now and then."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ENDS.format(zero=zero)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout and "lane" not in done.stdout
