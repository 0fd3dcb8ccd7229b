"""Expert parallelism: the exchange has the results, gradients and bytes that theory says; a run's state is kept in
memory and read by any number of ranks; and ranks hold what the model of bytes says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.autotune.rank_bytes import count_sharded_items, find_state_layout, state_bytes, state_items
from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.engine.sharded import ShardedEngine
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import MoESpec
from phalanx.models.moe import Experts
from phalanx.parallel.experts import ExpertParallel, apply_expert_parallel
from phalanx.planner.layer_exchanges import expert_bytes
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork, find_ffn_widths
from phalanx.workload.build import build_components
from tests.dist.test_in_memory_checkpoints import MOMENTS, killed, resumed, shared
from tests.helpers import run_ranks, some
from tests.numerics.runs import Outcome, distance, farthest, job, on_one_thread, walk
from tests.numerics.test_moe import BASE, EXPERTS, keys_of, loads
from tests.unit.test_moe import SPEC

__all__ = ["shared"]
ROWS = (6, 0, 9)  # of each rank
DIVISIONS = [[2, 2, 1], [3, 0, 2], [0, 5, 0]]  # experts of each rank
RUN = BASE | {"train__steps": 4, "optim__decay_steps": 6, "model__moe": EXPERTS | {"balance": "step_before"}}


def make_layer(rank: int | None, dtype: torch.dtype) -> tuple[Experts, Callable[[Tensor], Tensor]]:
    """All experts, and what picks a rank's rows of tensors of all (None: all rows)."""
    torch.manual_seed(2)
    experts = Experts(SPEC)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mine = slice(None) if rank is None else slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))
    return experts.to(dtype), lambda whole: whole[mine].clone()


def make_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all ranks: rows, choices in which one expert is never taken, their weights, and the gradient of the result."""
    torch.manual_seed(3)
    chosen = torch.rand(sum(ROWS), 5).masked_fill(torch.arange(5) == 3, -1).topk(2).indices
    x, weights, grad = torch.randn(sum(ROWS), 32), torch.rand(sum(ROWS), 2), torch.randn(sum(ROWS), 32)
    return x.to(dtype), chosen, weights.to(dtype), grad.to(dtype)


def run_layer(experts: Experts, pick: Callable[[Tensor], Tensor], device: Any = "cpu") -> list[Tensor]:
    """The result for the rows that are picked, and the gradients of these and of the stacks that are here."""
    x, chosen, weights, grad = (pick(each).to(device) for each in make_rows(experts.down.dtype))
    x.requires_grad_()
    out = experts(x, chosen, weights)
    return [out.detach(), *torch.autograd.grad((out * grad).sum(), [x, experts.gate_up, experts.down])]


def run_divided(placement: Placement, dtype: str) -> list[dict[str, Any]]:
    """For each division of the experts: the tensors of `run_layer`, and the bytes sent in either pass."""
    found = []
    with join(placement, 60, axes=MeshAxes(expert=placement.world)) as mesh:
        assert mesh.expert is not None
        for counts in DIVISIONS:
            experts, pick = make_layer(placement.rank, getattr(torch, dtype))
            model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts.to(mesh.device)})})
            whole = torch.nn.ModuleDict({"layers": model})
            apply_expert_parallel(whole, ExpertParallel(mesh.expert, mesh.traffic, counts))
            mesh.traffic.take()
            for _ in range(2):  # memory that the first pass has let go is used again
                tensors = run_layer(experts, pick, mesh.device)
            found.append({"tensors": [each.tolist() for each in tensors], "bytes": mesh.traffic.take().payload_bytes})
    return found


def expect(rank: int, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    """The same from one process."""
    out, x, gate_up, down = run_layer(*make_layer(None, dtype))
    first = sum(counts[:rank])
    _, pick = make_layer(rank, dtype)
    held = slice(first, first + counts[rank])
    return [pick(out), pick(x), gate_up[held], down[held]]


def assert_divided(everyones: list[list[dict[str, Any]]], dtype: torch.dtype, tolerance: float) -> None:
    """That what `run_divided` found on all ranks is what one process has."""
    for rank, found in enumerate(everyones):
        for counts, got in zip(DIVISIONS, found, strict=True):
            for tensor, wanted in zip(got["tensors"], expect(rank, counts, dtype), strict=True):
                mine = torch.tensor(tensor, dtype=dtype).view(wanted.shape)
                assert torch.allclose(mine, wanted, rtol=tolerance, atol=tolerance), (rank, counts)


def test_divided_experts_give_what_one_process_gives() -> None:
    everyones = run_ranks(run_divided, 3, 60, dtype="float64")
    assert_divided(everyones, torch.float64, 1e-12)
    chosen = make_rows(torch.float64)[1]
    for number, counts in enumerate(DIVISIONS):
        owner = torch.arange(3).repeat_interleave(torch.tensor(counts))
        sender = torch.arange(3).repeat_interleave(torch.tensor(ROWS))[:, None]
        away = int((owner[chosen] != sender).sum())  # choices whose expert is elsewhere
        told = sum(5 - count for count in counts)
        # Two passes, each of which sends a row and gets one back, as its gradient does, after the counts.
        assert sum(found[number]["bytes"] for found in everyones) == 2 * (4 * away * 32 * 8 + told * 8)


def count_balanced(placement: Placement) -> list[int]:
    """Bytes that a rank sends in a layer's forward and backward pass, of tokens that choose 4 experts thrice each."""
    spec = replace(SPEC, moe=MoESpec(experts=4, experts_per_token=2, intermediate=24))
    with join(placement, 60, axes=MeshAxes(expert=placement.world)) as mesh:
        assert mesh.expert is not None
        experts = Experts(spec)
        model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
        whole = torch.nn.ModuleDict({"layers": model})
        apply_expert_parallel(whole, ExpertParallel(mesh.expert, mesh.traffic, (2, 2)))
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        chosen = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]])
        mesh.traffic.take()
        out = experts(torch.randn(6, 32, requires_grad=True), chosen, torch.rand(6, 2))
        forward = mesh.traffic.take().payload_bytes
        out.sum().backward()
        return [forward, mesh.traffic.take().payload_bytes]


def test_a_plan_has_the_bytes_that_balanced_experts_send() -> None:
    moe = MoESpec(experts=4, experts_per_token=2, intermediate=24)
    work = StepWork(
        layers=1, hidden=32, heads=4, kv_heads=2, vocabulary=31, seq_len=3, global_batch=2, precision="fp32",
        gather_bytes=4, **find_ffn_widths(1, 24, moe),
    )  # fmt: skip
    for sent in run_ranks(count_balanced, 2, 60):
        assert tuple(sent) == expert_bytes(work, LayoutChoice(expert=2), rows=2)


# ------------------------------------------------------------------------------------------------------- a run's state


@pytest.fixture(scope="module")
def quiet(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One process."""
    return walk(1, tmp_path_factory.mktemp("quiet"), tokens, **RUN)


def assert_close(found: Outcome, quiet: Outcome) -> None:
    assert farthest(found.losses, quiet.losses) < 1e-9
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        assert distance(found.state, quiet.state, kind) < 1e-9


@pytest.mark.parametrize(
    ("ranks", "more"),
    some([
        (2, {"parallel.expert": 2, "balance.experts": [3, 2]}),
        (2, {"parallel.tensor": 2, "balance.experts": [1, 4]}),
        (4, {"parallel.expert": 2, "parallel.tensor": 2, "parallel.zero": 3}),
    ], 0),
)  # fmt: skip
def test_a_killed_run_goes_on_from_memory(
    ranks: int, more: dict[str, Any], tokens: Path, tmp_path: Path, shared: Path
) -> None:
    """Corrections are state as weights are."""
    keys = keys_of("bias") | {"train__steps": 4, "optim__decay_steps": 6}
    quiet = walk(1, tmp_path / "quiet", tokens, **keys)
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    changes = dotted | more | {"train.eval_sequences": 11}
    found = killed(ranks, tmp_path / "run", tokens, shared, [(MOMENTS[2], 2, 1), (MOMENTS[3], 3, 0)], **changes)
    assert_close(found, quiet)
    assert loads(tmp_path / "run") == loads(tmp_path / "quiet") is not None
    assert all(memory for _, memory in resumed(tmp_path / "run")), resumed(tmp_path / "run")


def test_any_ranks_read_what_others_have_saved(quiet: Outcome, tokens: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for steps, ranks, more in (
        (1, 4, {"parallel__expert": 2, "parallel__tensor": 2, "balance__experts": [2, 0, 1, 2]}),
        (2, 3, {"parallel__expert": 3, "balance__experts": [0, 2, 3], "parallel__zero": 3}),
        (4, 1, {}),
    ):
        found = walk(ranks, run, tokens, **RUN | more | {"train__steps": steps})
    assert_close(found, quiet)


# -------------------------------------------------------------------------------------------------------------- bytes


def count_bytes(placement: Placement, data: str, run: str, more: dict[str, Any]) -> list[Any]:
    """By item what a rank's engine holds, what was said before there was one, and the elements of its experts."""
    changes = {key.replace("__", "."): value for key, value in RUN.items()} | more
    described = job(run, data, changes, placement.world)
    config = described.config
    with join(on_one_thread(placement), 60, axes=config.parallel.axes) as mesh:
        copy_ = mesh.data.rank
        parts = build_components(config, described.spec, mesh, described.train_tokens, {})
        assert isinstance(parts.engine, ShardedEngine)
        layout = find_state_layout(config, mesh.device, mesh.world)
        held = count_sharded_items(parts.engine.buckets, parts.engine._places, layout, accumulates=True)
        said = state_items(parts.model, None, layout, copy_)
        whole = state_bytes(config, parts.workload, mesh.device, mesh.world, rank=mesh.rank)
        stack = parts.model.get_parameter("layers.0.mlp.experts.down").numel()
        with_head = state_items(parts.model, described.spec, layout, copy_)
        parts.close()
        return [held, {name: said[name] for name in held}, whole - sum(with_head.values()), stack]


@pytest.mark.parametrize(
    ("more", "experts"),
    [
        ({"balance.experts": [4, 1], "balance.optimizer_state": [0, 3, 1, 1]}, [4, 1, 4, 1]),
        ({"balance.experts": [2, 0, 1, 2], "balance.optimizer_state": [1, 3], "parallel.tensor": 2}, [2, 0, 1, 2]),
    ],
)
def test_ranks_hold_what_the_model_of_bytes_says(
    more: dict[str, Any], experts: list[int], tokens: Path, tmp_path: Path
) -> None:
    more |= {"parallel.expert": 2}
    found = run_ranks(count_bytes, 4, 60, data=str(tokens), run=str(tmp_path / "run"), more=more)
    stacks = [stack for *_, stack in found]
    assert stacks == [count * stacks[0] // experts[0] for count in experts] and stacks[0]
    for held, said, apart, _ in found:
        assert apart == 0
        for name, size in held.items():
            assert abs(said[name] - size) <= 0.05 * size + 4096, (name, said[name], size)  # parts are padded apart
