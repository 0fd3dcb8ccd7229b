"""The sharded engine with each kind of module, rule and arithmetic, beside torch's AdamW or the engine of one rank."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.comm.mesh import Mesh, join, single_rank_mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.placement import Placement
from phalanx.engine import sharded
from phalanx.engine.interface import Precision
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.single import SingleEngine
from phalanx.optim import gradients
from phalanx.optim.adamw8bit import AdamW8bit
from phalanx.optim.gradients import LossScale
from phalanx.optim.torch_optimizers import make_torch_rule
from phalanx.optim.update import UpdateRule
from phalanx.parallel import activations
from tests.dist.engine_cases import ADAMW, FLOAT64, NOMINAL, WIDTH, Batch, Driven, Net, batches, fill_from, rate
from tests.helpers import run_ranks, some


class Dense(nn.Module):
    """A unit of products and a bias; `seldom` is in its bucket, and without a gradient."""

    def __init__(self, inner: int = 7) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(WIDTH, inner, dtype=torch.float64) * 0.4)
        self.out = nn.Parameter(torch.randn(inner, WIDTH, dtype=torch.float64) * 0.4)
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.seldom = nn.Parameter(torch.ones(inner, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.into) @ self.out + self.bias


class Checkpointed(Net):
    """Computes units again in the backward pass, and what comes behind them in the same portion."""

    def __init__(self, units: Sequence[nn.Module], reentrant: bool, together: int = 1) -> None:
        super().__init__(units)
        self.reentrant, self.together = reentrant, together

    def forward(self, hidden: torch.Tensor, *extra: bool) -> torch.Tensor:
        hidden = hidden @ self.own
        for first in range(0, len(self.blocks), self.together):
            hidden = checkpoint(self.portion, first, hidden, use_reentrant=self.reentrant, preserve_rng_state=False)
        return hidden

    def portion(self, first: int, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[first : first + self.together]:
            hidden = block(hidden)
        return hidden.sin()


def dense(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Dense() for _ in range(count)]


def ours(selective: bool) -> Net:
    model = Net(dense())
    activations.recompute(list(model.blocks), selective)
    return model


def compiled() -> Net:
    """Each unit's forward as the trainer compiles it; the quick backend, since hooks and buffers are what is tested."""
    model = Net(dense())
    torch._dynamo.reset()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    return model


MODELS: dict[str, Any] = {
    "recomputed": lambda: ours(selective=False),
    "selective": lambda: ours(selective=True),
    "checkpoint": lambda: Checkpointed(dense(), reentrant=False),
    "reentrant": lambda: Checkpointed(dense(), reentrant=True),
    "compiled": compiled,
}
PLAIN: dict[str, Any] = {  # what the twin computes with
    "checkpoint": lambda: Checkpointed(dense(), reentrant=False),
    "reentrant": lambda: Checkpointed(dense(), reentrant=False),
}


def again(placement: Placement, kinds: Sequence[str]) -> list[float]:
    found = []
    with join(placement, 30) as mesh:
        for kind in kinds:
            for zero in (2, 3)[kind == "compiled" :]:
                model = MODELS[kind]()
                twin = PLAIN.get(kind, lambda: Net(dense()))()  # a copy would call the units of the original
                driven = Driven(mesh, model, model.units(), ShardingSpec(zero, weights=(1.0, 2.0)), twin=twin)
                driven.walk(4, lambda step, rank: batches(step, rank, 2))
                found.append(driven.apart())
                driven.engine.close()
    assert found
    return found


@pytest.mark.parametrize("kinds", [["recomputed", "selective"], ["checkpoint", "reentrant"], ["compiled"]])
def test_units_that_are_computed_again_or_compiled(kinds: list[str]) -> None:
    for found in run_ranks(again, 2, kinds=kinds):
        assert max(found) < 1e-9, found


def too_many(placement: Placement) -> str:
    with join(placement, 20) as mesh:
        model = Checkpointed(dense(), reentrant=False, together=2)
        driven = Driven(mesh, model, model.units(), ShardingSpec(3))
        with pytest.raises(RuntimeError) as raised:
            driven.walk(1, twin=False)
        return str(raised.value)


def test_several_units_in_one_checkpoint_are_refused_where_they_are_released() -> None:
    assert "checkpoint the activations of one unit at a time" in run_ranks(too_many, 1)[0]


def few_units(placement: Placement) -> list[float]:
    """No unit at all, so that everything is the model's own; one; and the model's own alone beside frozen ones."""
    found = []
    with join(placement, 20) as mesh:
        for zero in (1, 2, 3):
            for count in (0, 1):
                model = Net(dense(1))
                driven = Driven(mesh, model, model.units()[:count], ShardingSpec(zero))
                driven.walk(3)
                found.append(driven.apart())
            model = Net(dense(2))
            model.blocks.requires_grad_(False)
            driven = Driven(mesh, model, model.units(), ShardingSpec(zero))
            driven.walk(3)
            found.append(driven.apart())
    return found


def test_models_of_one_unit_or_none() -> None:
    for found in run_ranks(few_units, 2):
        assert max(found) < 1e-9, found


# ---------------------------------------------------------------------------------------------------------------- rules


class Alone:
    """The same on the engine of one rank, which has the data of all."""

    def __init__(
        self, mesh: Mesh, model: nn.Module, rule: UpdateRule, precision: Precision, scale: LossScale | None
    ) -> None:
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.model = model
        self.engine = SingleEngine(
            model, [], mesh=mesh, rule=rule, nominal_weight=NOMINAL, precision=precision, loss_scale=scale
        )
        with torch.no_grad():
            self.engine.initialise(fill_from(values))

    def step(self, number: int, everything: Sequence[Batch], clip: float | None) -> list[float]:
        self.engine.begin_step(number, sum(batch.weight for batch in everything), rate(number), clip)
        for index, batch in enumerate(everything):
            with self.engine.micro_batch(last=index == len(everything) - 1):
                gradients.backward(batch.loss_sum(self.model), NOMINAL, self.engine.loss_scale)
        outcome = self.engine.finish_step()
        self.engine.commit(number)
        return list(outcome.get())


def beside_one_rank(
    mesh: Mesh, model: Net, sharding: ShardingSpec, rule: UpdateRule, precision: Precision = FLOAT64,
    scale: bool = False, steps: int = 6, size: float = 1.0,
) -> tuple[float, list[list[float]]]:  # fmt: skip
    """The greatest difference of states after some steps, and norms, skips and loss scales of both; `size`: of the
    data of the third step."""

    def of(step: int, rank: int) -> list[Batch]:
        return batches(step, rank, 2, size=size if step == 3 else 1.0)

    scales = [LossScale(2.0**12, 2, mesh.device) if scale else None for _ in range(2)]
    with single_rank_mesh(mesh) as single:
        twin = Alone(single, copy.deepcopy(model), rule, precision, scales[0])
        driven = Driven(mesh, model, model.units(), sharding, 5.0, rule, precision, scales[1])
        curves: list[list[float]] = [[], []]
        for number in range(1, steps + 1):
            curves[0] += twin.step(number, [batch for rank in range(mesh.world) for batch in of(number, rank)], 5.0)
            driven.walk(1, of, twin=False)
            curves[1] += [driven.norms[-1], driven.skipped[-1]]
            for curve, one in zip(curves, scales, strict=True):
                if one is not None:
                    curve.append(one.state()["factor"])
        whole = {(piece.name, piece.kind): piece.tensor.clone() for piece in twin.engine.pieces()}
        apart = [
            (piece.tensor - whole[piece.name, piece.kind][piece.start : piece.stop]).abs().max().item()
            for piece in driven.engine.pieces()
        ]
        driven.engine.close()
    return max(apart, default=0.0), curves


def wide() -> Net:
    """Two units with a matrix that is large enough to be coded; its rows are no multiple of what ranges are cut at."""
    torch.manual_seed(0)
    return Net([Dense(900), Dense(7), Dense(830)])


def rules(placement: Placement) -> list[list[Any]]:
    made: list[UpdateRule] = [
        AdamW8bit(ADAMW),
        make_torch_rule("sgd", lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, options={"momentum": 0.9}),
        make_torch_rule("adagrad", lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, options={}),
    ]
    shardings = ShardingSpec(1, slots=2), ShardingSpec(2, weights=(1.0, 0.0, 2.0)), ShardingSpec(3)
    found = []
    with join(placement, 30) as mesh:
        for rule, sharding in some(itertools.product(made, shardings), 0, 1, 2, 4, 8):
            apart, (one, other) = beside_one_rank(mesh, wide(), sharding, rule, steps=4)
            found.append([f"{type(rule).__name__} {sharding}", apart, one, other])
    return found


def test_rules_beside_the_engine_of_one_rank() -> None:
    for found in run_ranks(rules, 3):
        for name, apart, one, other in found:
            # A moment that lies between two codes is coded by its last bit.
            assert apart < (1e-3 if "8bit" in name else 1e-9), name
            assert other == pytest.approx(one, rel=1e-6 if "8bit" in name else 1e-9), name


# ------------------------------------------------------------------------------------------------------------ precision


def scaled(placement: Placement, zero: int) -> list[Any]:
    half = Precision(torch.float16, torch.float16)
    with join(placement, 30) as mesh:
        sharding = ShardingSpec(zero, slots=1 if zero == 3 else 2)
        return list(beside_one_rank(mesh, Net(dense()), sharding, ADAMW, half, scale=True, steps=7, size=300.0))


@pytest.mark.parametrize("zero", [1, 3])
def test_the_loss_scale_goes_the_same_way(zero: int) -> None:
    for apart, (one, other) in run_ranks(scaled, 2, zero=zero):
        assert apart < 2e-2
        assert one[7] == other[7] == 1.0, "the third step overflows"
        assert one[2::3] == other[2::3]
        assert len(set(one[2::3])) > 2


def unlike(placement: Placement, frozen: bool) -> list[Any]:
    """Ranks that compute in unlike types: how far from float32, and whether all compute with the same numbers."""
    with join(placement, 30) as mesh:
        compute = torch.float32 if mesh.rank == 0 else torch.bfloat16
        found: list[Any] = []
        for zero in (1, 2, 3):
            model = Net(dense()).float()
            if frozen:
                model.blocks[0].requires_grad_(False)
                model.blocks[2].into.requires_grad_(False)
            precision = Precision(compute, torch.float32)
            driven = Driven(mesh, model, model.units(), ShardingSpec(zero, weights=(2.0, 1.0)), precision=precision)
            assert {parameter.dtype for parameter in model.parameters()} == {compute}
            driven.walk(6)
            apart = max(abs(one / other - 1) for one, other in zip(driven.norms, driven.twin.norms, strict=True))
            with driven.engine.full_parameters() as whole:
                rounded = {name: value.bfloat16().float().flatten().tolist() for name, value in whole.items()}
            everybody = JsonGroup(mesh.control).all_gather_objects(rounded)
            found.append([apart, all(each == rounded for each in everybody)])
            driven.engine.close()
        return found


@pytest.mark.parametrize("frozen", [False, True])
def test_ranks_of_unlike_types_share_parameters(frozen: bool) -> None:
    for found in run_ranks(unlike, 2, frozen=frozen):
        for apart, same in found:
            assert apart < 0.05
            assert same


def undone(placement: Placement, zero: int) -> list[Any]:
    """Of one slot and of two on ranks of unlike types: the norms, and a sum of the weights that are computed with."""
    sharded.PART_BYTES = 64  # several parts, of which some are gathered before the ranks have agreed
    found: list[Any] = []
    with join(placement, 30) as mesh:
        precision = Precision(torch.float32 if mesh.rank == 0 else torch.bfloat16, torch.float32)
        for slots in (1, 2):
            torch.manual_seed(0)
            model = Net([Dense(width) for width in (400, 200, 500, 300)]).float()
            sharding = ShardingSpec(zero, weights=(2.0, 1.0), slots=slots)
            driven = Driven(mesh, model, model.units(), sharding, 4500.0, precision=precision)
            driven.walk(6, lambda step, rank: batches(step, rank, 1, 9.0 if step % 2 == 0 else 0.05), twin=False)
            with driven.engine.full_parameters() as whole:
                found += [driven.norms, sum(value.double().abs().sum().item() for value in whole.values())]
            driven.engine.close()
    return found


@pytest.mark.parametrize("zero", [1, 2])
def test_what_is_updated_early_on_unlike_ranks_is_undone(zero: int) -> None:
    for plain, sum_of_plain, kept, sum_of_kept in run_ranks(undone, 2, zero=zero):
        assert max(plain[0::2]) < 0.8 * 4500 < 4500 < min(plain[1::2])
        assert (kept, sum_of_kept) == (plain, sum_of_plain)
