"""Ranks that compute in different types: one curve, exchanged in float32, and the same weights everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm import collectives
from phalanx.config import load, resolve
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.engine import fsdp2
from phalanx.engine.sharded import ShardedEngine
from phalanx.system import accelerator
from phalanx.trainer import train_rank
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import distance, farthest, same_bits, walk

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXPERTS = {"model__architecture": "mixtral", "model__moe": {"experts": 4, "experts_per_token": 2}}
MIXED = {"train.dtype": "mixed", "train.steps": 4, "train.micro_batch": 2}


def train(placement: Placement, run: str, data: str, types: list[str], changes: dict[str, Any]) -> list[Any]:
    """A run in which each rank's device is best at another type; what travelled, and what each computes with."""
    accelerator.best_dtype = lambda device: TYPES[types[placement.rank]]
    travelled: set[str] = set()

    def noting(function: Any) -> Any:
        def call(output: torch.Tensor, shard: torch.Tensor, *rest: Any) -> Any:
            travelled.update((str(output.dtype), str(shard.dtype)))
            return function(output, shard, *rest)

        return call

    fsdp2.collectives.all_gather = noting(collectives.all_gather)
    fsdp2.collectives.reduce_scatter = noting(collectives.reduce_scatter)
    described = runs.job(run, data, MIXED | changes, placement.world)
    with runs.loop_of(placement, described) as loop:
        restored = loop.restore()
        if isinstance(loop.setup.components.engine, ShardedEngine):
            moves = loop.setup.components.engine._update.queue.routes["data"].trained
            gather, reduce_scatter = moves.all_gather, moves.reduce_scatter
            noted = noting(lambda output, shard, cuts: gather(output, cuts))
            moves.all_gather = lambda tensor, cuts: noted(tensor, tensor, cuts)  # type: ignore[method-assign]
            summed = noting(lambda tensor, into, cuts: reduce_scatter(tensor, cuts, into))
            moves.reduce_scatter = lambda tensor, cuts, into: summed(tensor, into, cuts)  # type: ignore[method-assign]
        assert train_rank.run_steps(loop, restored) == 0
        saved, shards = runs.state(Path(run)), loop.setup.components.model_part.shards
        with loop.setup.components.engine.full_parameters() as whole:
            for name, tensor in whole.items():
                assert tensor.dtype == TYPES[types[placement.rank]]
                first = shards[name].offset if name in shards else 0
                kept = saved[f"param/{name}"][first : first + tensor.numel()]
                assert torch.equal(tensor.flatten(), kept.to(tensor.dtype)), name
    return [sorted(travelled), loop.setup.components.engine.loss_scale is not None]


def mixed(folder: Path, tokens: Path, types: list[str], **changes: Any) -> tuple[runs.Outcome, list[Any]]:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    arguments = {"run": str(folder), "data": str(tokens), "types": types, "changes": dotted}
    found = run_ranks(train, len(types), timeout_s=240, **arguments)
    return runs.outcome(folder), found


@pytest.fixture(scope="module")
def exact(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., runs.Outcome]:
    """What one rank walks in float32, by what is changed in the model."""
    known: dict[str, runs.Outcome] = {}

    def walked(**model: Any) -> runs.Outcome:
        if str(model) not in known:
            run = tmp_path_factory.mktemp("exact")
            known[str(model)] = walk(1, run, tokens, train__steps=4, train__dtype="fp32", **model)
        return known[str(model)]

    return walked


@pytest.mark.parametrize(
    ("types", "changes"),
    [
        (["bf16", "fp16"], {"parallel__engine": "fsdp2"}),
        (["bf16", "fp32"], {"parallel__zero": 1, "optim__double_buffer": True}),
        (["bf16", "fp32"], {"parallel__zero": 3, "balance__optimizer_state": [1, 3]}),
        (["fp32", "bf16", "fp16"], {"parallel__zero": 2, "memory__activations": "full"}),
        (["bf16", "fp16"], EXPERTS | {"parallel__expert": 2, "balance__experts": [3, 1]}),
    ]
    + ([(["fp32", "bf16", "fp16"], {"parallel__engine": "fsdp2"}), (["fp16", "fp32"], {})] if ALL else []),
)
def test_unlike_ranks_walk_the_curve_of_float32(
    types: list[str], changes: dict[str, Any], exact: Callable[..., runs.Outcome], tokens: Path, tmp_path: Path
) -> None:
    whole = exact(**{key: value for key, value in changes.items() if key.startswith("model__")})
    unlike, found = mixed(tmp_path / "mixed", tokens, types, **changes)
    apart = max(abs(a - b) for a, b in zip(unlike.losses, whole.losses, strict=True))
    print(f"{types}: losses {apart:.1e} apart, parameters {distance(unlike.state, whole.state, 'param'):.1e}")
    assert 0 < apart < 2e-2
    for travelled, scaled in found:
        assert travelled == ["torch.float32"]
        assert scaled is ("fp16" in types), "all ranks scale or none"
    assert {tensor.dtype for tensor in unlike.state.values()} == {torch.float32}


@pytest.mark.parametrize("ranks", some([2, 3], 0))
def test_alike_they_are_the_plain_types_to_the_bit(ranks: int, tokens: Path, tmp_path: Path) -> None:
    # What is gathered wide and rounded on arrival is what is rounded before it travels.
    narrow = walk(ranks, tmp_path / "bf16", tokens, train__steps=4, train__dtype="bf16", train__micro_batch=2)
    gathered, _ = mixed(tmp_path / "mixed", tokens, ["bf16"] * ranks)
    assert gathered.losses == narrow.losses
    assert same_bits(gathered.state, narrow.state)


def test_one_rank_computes_in_what_it_has(tokens: Path, tmp_path: Path) -> None:
    found = walk(1, tmp_path / "mixed", tokens, train__steps=3, train__dtype="mixed")
    plain = walk(1, tmp_path / "plain", tokens, train__steps=3, train__dtype="fp32")
    assert farthest(found.losses, plain.losses) == 0.0


def disagree(placement: Placement, run: str, data: str) -> str:
    changes = {"train.dtype": "bf16" if placement.rank else "fp32"}
    try:
        runs.train(placement, run, data, changes)
    except ConfigError as error:
        return str(error)
    return "it trained"


def test_ranks_that_resolved_the_type_each_for_itself_are_refused(tokens: Path, tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(disagree, 2, run=str(tmp_path), data=str(tokens))):
        assert f"(rank {rank} has {'bf16' if rank else 'fp32'})" in said
        assert said.endswith("set train.dtype=mixed")


def train_divided(placement: Placement, run: str, data: str, axis: str) -> str:
    accelerator.best_dtype = lambda device: TYPES[("bf16", "fp16")[placement.rank]]
    with pytest.raises(ConfigError) as refused:
        runs.train(placement, run, data, MIXED | {f"parallel.{axis}": 2, "parallel.context_by": "auto"})
    return str(refused.value)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_unlike_ranks_share_no_layer_and_no_row(axis: str, tokens: Path, tmp_path: Path) -> None:
    for said in run_ranks(train_divided, 2, run=str(tmp_path), data=str(tokens), axis=axis):
        assert f"ranks 0, 1, which parallel.{axis} has exchange activations, compute in bf16 and fp16; set" in said


def test_auto_is_mixed_where_devices_differ() -> None:
    config = load.build_config({"model": {"hidden": 16, "layers": 1, "heads": 2}}, "the recipe")
    for bf16, differ, expected in ((True, False, "bf16"), (False, False, "fp16"), (False, True, "mixed")):
        resolved, reasons = resolve.resolve_autos(config, device="gpu", world=2, bf16=bf16, differ=differ)
        assert resolved.train.dtype == expected
        assert "train.dtype" in [key for key, _, _ in reasons]
