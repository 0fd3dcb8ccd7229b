"""Inputs of blocks that wait on the host: the same bits, every byte counted, few on the device, buffers used again."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx.autotune.activations import OffloadTiming, choose_activation_mode, measure_offload_timing
from phalanx.autotune.micro_batch import MicroBatchFit, _suggest_lighter_mode
from phalanx.config import load, resolve
from phalanx.config.load import update_config
from phalanx.config.model_spec import build_model_spec
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.llama import Llama
from phalanx.parallel import activations
from phalanx.parallel.offload import ActivationOffloader, HostBufferPool, offload
from phalanx.parallel.parallelize import change_blocks
from phalanx.system import memory as host_memory
from phalanx.workload.workload import make_workload
from tests.helpers import run_ranks

LAYERS, HIDDEN, LENGTH = 6, 64, 32
MODEL = {
    "hidden": HIDDEN, "layers": LAYERS, "heads": 4, "kv_heads": 2, "intermediate": 96, "vocab_size": 300,
    "dropout": 0.1,
}  # fmt: skip


def configured(mode: str, horizon: int = 2, **sections: Any) -> Config:
    memory = {"activations": mode, "offload_prefetch_blocks": horizon}
    tree = {"model": MODEL, "data": {"seq_len": LENGTH}, "train": {"dtype": "fp32"}, "memory": memory}
    config, _ = resolve.resolve_autos(load.build_config(tree | sections, "a recipe"), device="cpu", world=1)
    return config


def llama(config: Config, dtype: torch.dtype) -> tuple[Llama, ActivationOffloader | None]:
    torch.manual_seed(0)
    model = Llama(build_model_spec(config)).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model, change_blocks(model, config, torch.device("cpu"))


def walk(model: Llama, steps: int = 2, sizes: Sequence[int] = (4, 2)) -> list[Tensor]:
    """Losses and sums of gradients of some steps of several micro-batches."""
    losses = []
    for step in range(steps):
        for size in sizes:
            tokens = torch.randint(0, 300, (size, LENGTH), generator=torch.Generator().manual_seed(step))
            losses.append(model(tokens, labels=tokens, draws=CounterRNG(0, step, torch.arange(size))))
            losses[-1].backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [each.detach() for each in (*losses, *gradients)]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("dtype", "horizon"), [(torch.float32, 1), (torch.float32, 5), (torch.bfloat16, 2)])
def test_gradients_are_the_same_and_every_byte_is_counted(dtype: torch.dtype, horizon: int) -> None:
    found = {}
    for mode in ("none", "full", "offload"):
        model, mover = llama(configured(mode, horizon), dtype)
        found[mode] = walk(model)
    assert same(found["offload"], found["full"])
    assert same(found["offload"], found["none"])
    assert mover is not None
    one_input = LENGTH * HIDDEN * dtype.itemsize  # of one sequence
    assert mover.out_bytes == mover.back_bytes == 2 * (4 + 2) * (LAYERS - horizon) * one_input
    assert (mover.pool.allocations, mover.pool.bytes) == (LAYERS - horizon, (LAYERS - horizon) * 4 * one_input)


def test_buffers_are_made_once_and_grow_with_micro_batches() -> None:
    model, mover = llama(configured("offload"), torch.float32)
    assert mover is not None
    made = []
    for sizes in ((2, 2), (2, 1), (4,), (1, 4)):
        walk(model, 1, sizes)
        made.append((mover.pool.allocations, mover.pool.bytes))
    few = LAYERS - 2
    size = LENGTH * HIDDEN * 4
    assert made == [(few, 2 * few * size)] * 2 + [(2 * few, 4 * few * size)] * 2  # larger ones in place of the small


def test_the_host_says_when_it_has_no_more() -> None:
    pool = HostBufferPool()
    with pytest.raises(MemoryError, match=r"was to wait in host memory, of which [0-9,]+ MiB are left"):
        pool.take(1 << 60, pinned=True)
    assert pool.allocations == 0


def test_page_locked_buffers_are_as_large_as_what_torch_takes_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 150)
    pool = HostBufferPool()
    pool.make = lambda size, pinned: torch.empty(size, dtype=torch.uint8)
    pool.give(pool.take(100, pinned=True))
    assert pool.take(120, pinned=True).nbytes == pool.bytes == 128  # there is room in what was taken
    with pytest.raises(MemoryError, match="beside 0 MiB that wait already"):
        pool.take(129, pinned=True)
    assert pool.take(130, pinned=False).nbytes == 130


def test_evaluation_moves_nothing() -> None:
    model, mover = llama(configured("offload"), torch.float32)
    with torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.int64))
    assert mover is not None
    assert (mover.out_bytes, mover.pool.allocations) == (0, 0)


# ------------------------------------------------------------------------------------------------------- units by hand


class Unit(nn.Module):
    """tanh(x W) + x, and whatever else a test wants to be done with what it is given."""

    def __init__(self, extra: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
        self.extra = extra

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        added = self.extra(x, *args, **kwargs) if self.extra is not None else 0.0
        return torch.tanh(x @ self.weight) + x + added


X_BYTES = 32 * 16 * 4


def units(
    count: int, horizon: int = 1, extra: Callable[..., Any] | None = None
) -> tuple[list[Unit], ActivationOffloader]:
    made = [Unit(extra) for _ in range(count)]
    activations.recompute(made, selective=False)
    return made, offload(made, horizon)


def start() -> Tensor:
    """An activation: not a leaf."""
    return torch.linspace(-1, 1, 32 * 16, requires_grad=True).view(32, 16) * 1.5


def gradients_of(run: Callable[[Sequence[nn.Module], Tensor], Tensor], made: Sequence[nn.Module]) -> list[Tensor]:
    run(made, start()).sum().backward()
    return [parameter.grad for unit in made for parameter in unit.parameters() if parameter.grad is not None]


def in_turn(made: Sequence[nn.Module], x: Tensor) -> Tensor:
    for unit in made:
        x = unit(x)
    return x


def transposed(made: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Inputs whose elements do not lie in the order of their dims."""
    for unit in made:
        x = unit(x.view(16, 32).t())
    return x


def gapped(made: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Inputs that are every other row of something, or the same row again and again."""
    x = made[0](x.repeat_interleave(2, 0)[::2])
    return made[1](x[:1].expand(32, 16))


def shared(made: Sequence[nn.Module], x: Tensor) -> Tensor:
    """One tensor that all units are given, beside their own, by place or by name."""
    beside, places, table = x * 2, torch.arange(512), torch.ones(32, 16)
    x = made[0](x, beside, places, table)
    x = made[1](x, beside=beside, places=places, table=table)
    return made[2](x, beside, table=table)


def use_shared(x: Tensor, beside: Tensor, places: Tensor | None = None, table: Tensor | None = None) -> Tensor:
    assert table is not None
    return beside * table + (0.0 if places is None else places[3])


def from_a_leaf(made: Sequence[nn.Module], x: Tensor) -> Tensor:
    return in_turn(made, x.detach().requires_grad_())


def from_data(made: Sequence[nn.Module], x: Tensor) -> Tensor:
    return in_turn(made, x.detach())


def tiny(made: Sequence[nn.Module], x: Tensor) -> Tensor:
    return in_turn(made, x[:8])


CASES = [
    ("in turn", in_turn, None, 4, 3),
    ("with other strides", transposed, None, 3, 2),
    ("views with gaps or overlaps stay", gapped, None, 2, 0),
    ("what several units share moves once", shared, use_shared, 3, 3),  # two inputs and what is shared
    ("a leaf stays", from_a_leaf, None, 3, 1),
    ("what needs no gradient stays", from_data, None, 3, 1),
    ("what is tiny stays", tiny, None, 3, 0),
]


@pytest.mark.parametrize(("run", "extra", "count", "moved"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_what_moves_and_what_stays(run: Any, extra: Any, count: int, moved: int) -> None:
    plain = gradients_of(run, [Unit(extra) for _ in range(count)])
    made, mover = units(count, extra=extra)
    assert same(gradients_of(run, made), plain)
    assert (mover.out_bytes, mover.back_bytes) == (moved * X_BYTES, moved * X_BYTES)
    assert len(mover.pool._free) == mover.pool.allocations  # each buffer is back


def test_few_inputs_are_on_the_device_at_a_time() -> None:
    # In a process of its own: one that has compiled anything keeps what it hands to a function a moment longer.
    # What else runs there can hold an input once; what keeps it by design does each time.
    walks = run_ranks(most_inputs, 1)[0]
    assert min(walk["forward"] for walk in walks) == 3, "the unit's own and the two before it"
    assert min(walk["backward"] for walk in walks) <= 3  # what is on its way back has not been seen yet
    assert min(walk["between"] for walk in walks) == 2, "between the passes those of the last units"


def most_inputs(placement: Placement) -> list[dict[str, int]]:
    return [_most_inputs() for _ in range(3)]


def _most_inputs() -> dict[str, int]:
    """How many inputs of nine units are there at one time."""
    seen: list[StorageWeakRef] = []
    most = {"forward": 0, "backward": 0, "between": 0}

    def note(x: Tensor) -> float:
        """Called in each forward pass of a unit, and when it is computed again."""
        seen.append(StorageWeakRef(x.untyped_storage()))
        alive = {each.cdata for each in seen if not each.expired()}
        now = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        most[now] = max(most[now], len(alive))
        return 0.0

    made, _ = units(9, horizon=2, extra=note)
    loss = in_turn(made, start()).sum()
    most["between"] = len({each.cdata for each in seen if not each.expired()})
    loss.backward()
    return most


def test_what_comes_back_is_asked_for_ahead() -> None:
    back: list[int] = []

    def note(x: Tensor) -> float:
        back.append(mover.back_bytes // X_BYTES)
        return 0.0

    made, mover = units(6, horizon=2, extra=note)
    loss = in_turn(made, start()).sum()
    back.clear()
    loss.backward()
    # Units 5 and 4 have stayed; when unit 5 is computed again the input of unit 3 is asked for, and so on to the first.
    assert back == [1, 2, 3, 4, 4, 4]


def test_a_graph_that_is_kept_is_walked_twice() -> None:
    made, mover = units(3)
    loss = in_turn(made, start()).sum()
    loss.backward(retain_graph=True)
    once = [unit.weight.grad.clone() for unit in made if unit.weight.grad is not None]
    loss.backward()
    assert same([unit.weight.grad for unit in made if unit.weight.grad is not None], [2 * each for each in once])
    assert (mover.out_bytes, mover.back_bytes) == (2 * X_BYTES, 4 * X_BYTES)
    del loss
    assert len(mover.pool._free) == mover.pool.allocations == 2


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_a_pass_that_breaks_off_leaves_nothing_behind(during: str) -> None:
    failing = False

    def fail(x: Tensor) -> float:
        in_backward = torch._C._current_graph_task_id() != -1
        if failing and in_backward == (during == "backward") and len(calls) == 5:
            raise ArithmeticError("broken off")
        calls.append(1)
        return 0.0

    calls: list[int] = []
    made, mover = units(4, extra=fail)
    plain = gradients_of(in_turn, made)
    for unit in made:
        unit.weight.grad = None
    failing, calls = True, [1, 1, 1] if during == "forward" else []
    with pytest.raises(ArithmeticError, match="broken off"):
        in_turn(made, start()).sum().backward()
    failing = False
    for unit in made:
        unit.weight.grad = None
    assert same(gradients_of(in_turn, made), plain)
    assert len(mover.pool._free) == mover.pool.allocations == 3


@pytest.mark.parametrize(("unit", "said"), [(0, "input of block 0 was changed"), (2, "backward pass of block 2 needs")])
def test_what_is_changed_in_place_is_noticed(unit: int, said: str) -> None:
    def change(made: Sequence[nn.Module], x: Tensor) -> Tensor:
        for number, each in enumerate(made):
            before, x = x, each(x)
            if number == unit:
                with torch.no_grad():
                    before.add_(1.0)
        return x

    made, _ = units(3)
    with pytest.raises(RuntimeError, match=said):
        gradients_of(change, made)


def test_micro_batches_may_all_go_forward_before_one_goes_back() -> None:
    plain = [gradients_of(in_turn, [Unit() for _ in range(4)]) for _ in range(2)]
    made, mover = units(4)
    losses = [in_turn(made, start()).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    found = [unit.weight.grad for unit in made if unit.weight.grad is not None]
    assert same(found, [one + other for one, other in zip(*plain, strict=True)])
    assert mover.pool.allocations == 2 * 3


# --------------------------------------------------------------------------------------------------------------- choice


def test_offload_that_would_move_nothing_is_refused() -> None:
    activations.check_horizon(3, 2)
    with pytest.raises(
        ConfigError, match=r"inputs of the last 2 blocks .* has 2; set .*=full, or memory.offload_prefetch_blocks=1 at"
    ):
        activations.check_horizon(2, 2)
    with pytest.raises(ConfigError, match=r"the model has 1; set memory.activations=full$"):
        activations.check_horizon(1, 1)


@pytest.mark.parametrize(
    ("fitting", "mode", "why"),
    [
        (("none", "selective", "full"), "none", "everything"),
        (("selective", "full"), "selective", "not everything"),
        (("full", "offload"), "full", "on a CPU offload has nothing to gain"),
    ],
)
def test_auto_takes_the_least_that_fits(fitting: Sequence[str], mode: str, why: str) -> None:
    config = configured("auto")
    tried = []

    def probe(asked: Config) -> list[MicroBatchFit]:
        tried.append(asked.memory.activations)
        if tried[-1] not in fitting:
            raise ConfigError("the model does not fit")
        return [MicroBatchFit(len(tried), 1, 1, 1)]

    found = choose_activation_mode(config, make_workload(config, build_model_spec(config)), ["cpu"], 1, probe)
    assert (found[0], found[2]) == (mode, [MicroBatchFit(len(tried), 1, 1, 1)])
    assert why in found[1]
    assert tried == [each for each in ("none", "selective", "full") if each not in fitting or each == mode]


@pytest.mark.parametrize("fits", [True, False])
def test_auto_computes_nothing_again_where_a_backward_pass_comes_in_halves(fits: bool) -> None:
    config = update_config(
        configured("auto"), {"parallel.engine": "sharded", "parallel.pipeline": 2, "parallel.schedule": "zero_bubble"}
    )

    def probe(asked: Config) -> list[MicroBatchFit]:
        assert asked.memory.activations == "none"
        if not fits:
            raise ConfigError(f"it does not fit; {_suggest_lighter_mode(asked, torch.device('cpu'))}")
        return []

    if fits:
        mode, why, _ = choose_activation_mode(
            config, make_workload(config, build_model_spec(config)), ["cpu"], 1, probe
        )
        assert mode == "none"
        assert "zero_bubble" in why
    else:
        with pytest.raises(ConfigError, match=r"set parallel.schedule=1f1b and memory.activations=full"):
            choose_activation_mode(config, make_workload(config, build_model_spec(config)), ["cpu"], 1, probe)


def test_auto_says_so_when_nothing_fits() -> None:
    config = configured("auto")

    def probe(asked: Config) -> list[MicroBatchFit]:
        raise ConfigError(f"not even {asked.memory.activations}")

    with pytest.raises(ConfigError, match="not even full"):
        choose_activation_mode(config, make_workload(config, build_model_spec(config)), ["cpu"], 1, probe)


def test_the_link_is_measured_against_a_block() -> None:
    config = configured("auto")
    found = measure_offload_timing(config, make_workload(config, build_model_spec(config)), "cpu")
    assert found.input_bytes == LENGTH * HIDDEN * 4
    assert found.bytes_per_s > 0
    assert found.forward_s > 0
    assert OffloadTiming(80, 100.0, 1.0).is_hidden
    assert not OffloadTiming(81, 100.0, 1.0).is_hidden
    assert (
        "0.0 MiB takes 810.00 ms to the host and the block's forward pass 1000.00 ms"
        in OffloadTiming(81, 100, 1).reason()
    )
