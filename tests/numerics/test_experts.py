"""Expert parallelism: whatever ranks hold the experts, and however a step is divided, the curve is that of one process,
with the same choices."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout.model_shape import LATENT_TARGETS, LatentSpec, ModelSpec, MoESpec
from phalanx.models.hf_export import export
from phalanx.models.model import draw_init_slice
from phalanx.models.moe import moe_init_rule
from phalanx.models.user_model import build_on_meta, load_family_class
from tests.helpers import ALL
from tests.numerics.runs import VOCAB, Outcome, distance, events, farthest, walk
from tests.numerics.test_moe import BALANCES, BASE, EXPERTS, keys_of, loads
from tests.numerics.test_rank_layout import assert_same
from tests.unit.test_moe import SPEC

# How a step is divided: ranks, sequences of each, and more.
DIVISIONS: dict[str, tuple[int, list[int] | None, dict[str, Any]]] = {
    "two": (2, [5, 3], {"parallel__expert": 2, "train__micro_batch": 2}),
    "two copies": (4, [3, 1, 0, 4], {
        "parallel__expert": 2, "balance__experts": [4, 1], "train__micro_batch": 2, "memory__activations": "full",
    }),
    "four, one without": (4, None, {
        "parallel__expert": 4, "balance__experts": [3, 0, 1, 1], "train__micro_batch": 2, "parallel__zero": 3,
    }),
    "two slices of two copies": (4, [5, 3], {
        "parallel__expert": 2, "parallel__tensor": 2, "balance__experts": [2, 0, 1, 2], "train__micro_batch": 4,
        "parallel__zero": 2,
    }),
}  # fmt: skip
MORE: dict[str, tuple[int, list[int] | None, dict[str, Any]]] = {
    "two copies, zero 3": (4, [3, 1, 0, 4], {
        "parallel__expert": 2, "balance__experts": [3, 2], "train__micro_batch": 2, "parallel__zero": 3,
        "memory__activations": "selective",
    }),
    "two copies, zero 2": (4, [1, 1, 5, 1], {"parallel__expert": 2, "train__micro_batch": 1, "parallel__zero": 2}),
    "one without, selective": (3, [1, 4, 3], {
        "parallel__expert": 3, "balance__experts": [0, 1, 4], "train__micro_batch": 2,
        "memory__activations": "selective",
    }),
    "state apart": (4, [2, 2, 2, 2], {
        "parallel__expert": 2, "train__micro_batch": 2, "balance__optimizer_state": [0, 3, 0, 1],
    }),
    "two stages": (4, [5, 3], {
        "parallel__expert": 2, "balance__experts": [4, 1], "parallel__pipeline": 2, "train__micro_batch": 2,
        "memory__activations": "full",
    }),
    "two slices": (2, None, {
        "parallel__tensor": 2, "parallel__sequence_parallel": False, "train__micro_batch": 3,
        "memory__activations": "full",
    }),
    "two slices of each of two copies": (4, [6, 2], {
        "parallel__tensor": 2, "train__micro_batch": 2, "parallel__zero": 3, "memory__activations": "selective",
    }),
    "four slices": (4, None, {"parallel__tensor": 4, "balance__experts": [0, 3, 1, 1], "train__micro_batch": 4}),
    "two slices of two copies, whole activations": (4, [1, 7], {
        "parallel__expert": 2, "parallel__tensor": 2, "parallel__sequence_parallel": False, "train__micro_batch": 3,
        "memory__activations": "offload", "memory__offload_prefetch_blocks": 1,
    }),
    "two slices of two groups of copies": (8, [1, 3, 0, 4], {
        "parallel__expert": 2, "parallel__tensor": 2, "train__micro_batch": 2, "parallel__zero": 3,
        "balance__optimizer_state": [0, 3, 1, 2],
    }),
    "two slices of two stages of two copies": (8, [5, 3], {
        "parallel__expert": 2, "parallel__tensor": 2, "parallel__pipeline": 2, "train__micro_batch": 2,
        "memory__activations": "full",
    }),
    "two slices, compiled": (2, None, {"parallel__tensor": 2, "train__compile": True, "train__micro_batch": 4}),
    "compiled": (2, [5, 3], {
        "parallel__expert": 2, "train__micro_batch": 2, "train__compile": True, "memory__activations": "full",
    }),
    "two slots": (2, [6, 2], {"parallel__expert": 2, "train__micro_batch": 2, "optim__double_buffer": True}),
    "offloaded": (2, [6, 2], {
        "parallel__expert": 2, "train__micro_batch": 2, "memory__activations": "offload",
        "memory__offload_prefetch_blocks": 1,
    }),
}  # fmt: skip


def list_loads(run: Path) -> list[Any]:
    """Those in the newest checkpoint, in the steps' records and in the last evaluation's event."""
    steps = [(step["expert_entropy"], step["expert_max_load"]) for step in read_steps(RunPaths(run).metrics)]
    (evaluated,) = events(run, "evaluated")
    assert [len(row) for row in evaluated["experts"]["load"]] == [5, 5]
    return [loads(run), steps, evaluated["experts"]]


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Outcome, list[Any]]]:
    """One process and all of a step at once, by what experts are balanced by; with its loads."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def walk_alone(balance: str) -> tuple[Outcome, list[Any]]:
        run = folder / balance
        return walk(1, run, tokens, masked=True, **keys_of(balance)), list_loads(run)

    return walk_alone


FEW = [("two copies", "group"), ("four, one without", "step_before"), ("two slices of two copies", "sequence")]


@pytest.mark.parametrize(("name", "balance"), itertools.product(DIVISIONS | MORE, [*BALANCES, "bias"]) if ALL else FEW)
def test_any_division_of_experts_walks_one_curve(
    name: str, balance: str, tokens: Path, tmp_path: Path, alone: Callable[[str], tuple[Outcome, list[Any]]]
) -> None:
    if "stages" in name and balance in ("step", "group"):
        pytest.skip("refused")
    if name == "two slices, compiled" and balance != "sequence":
        pytest.skip("compiling takes minutes")
    whole, counted = alone(balance)
    ranks, shares, more = (DIVISIONS | MORE)[name]
    found = walk(ranks, tmp_path / "run", tokens, shares, masked=True, **keys_of(balance) | more)
    print(f"{balance}, {name}: {farthest(found.losses, whole.losses):.1e} {farthest(found.norms, whole.norms):.1e}")
    assert_same(found, whole)
    assert list_loads(tmp_path / "run") == counted
    for at, loss in whole.evaluations.items():
        assert abs(found.evaluations[at] - loss) < 1e-9 * loss


@pytest.mark.skipif(not ALL, reason="PHALANX_TEST_ALL is not set")
@pytest.mark.parametrize(
    "more", [{"parallel__zero": 3}, {"parallel__pipeline": 2, "train__micro_batch": 2}, {"parallel__tensor": 2}]
)
def test_experts_and_positions_are_divided_together(more: dict[str, Any], tokens: Path, tmp_path: Path) -> None:
    given = BASE | {"model__moe": EXPERTS | {"balance": "step_before"}}
    parts = {"parallel__context": 2, "parallel__context_by": "ring", "balance__context": [3, 1]}
    one = walk(1, tmp_path / "one", tokens, **given)
    slices = more.get("parallel__tensor", 1)
    experts = {"parallel__expert": 2, "balance__experts": [1] * slices + [4] * slices, "train__micro_batch": 4}
    many = walk(
        4 * more.get("parallel__pipeline", 1) * slices, tmp_path / "many", tokens, **given | parts | experts | more
    )
    assert_same(many, one)


OF_EXPERTS = {"rank": 3, "alpha": 9, "targets": ["q", "experts.gate_up", "experts.down"]}


OF_LATENT = {"rank": 3, "alpha": 9, "dropout": 0.1, "targets": ["o", *LATENT_TARGETS]}
LATENT_SPEC = replace(
    SPEC, architecture="deepseek_v3", kv_heads=4,
    latent=LatentSpec(query_rank=10, key_rank=12, plain_dim=4, value_dim=6),
    moe=MoESpec(experts=5, experts_per_token=2, intermediate=24, scores="sigmoid", shared=1, balance="none"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "lora"),
    [(SPEC, OF_EXPERTS), (LATENT_SPEC, OF_LATENT)]
    + ([(SPEC, None), (SPEC, {"rank": 3, "alpha": 9, "targets": ["q", "v"]}), (LATENT_SPEC, None)] if ALL else []),
)
def test_experts_of_a_folder_are_read_by_who_holds_them(
    shape: ModelSpec, lora: dict[str, Any] | None, tokens: Path, tmp_path: Path
) -> None:
    """All weights are trained, or adapters beside frozen experts, or of these."""
    spec, family = replace(shape, vocab_size=VOCAB, layers=2), load_family_class(shape.architecture)
    shapes = {name: tuple(each.shape) for name, each in build_on_meta(spec, family).named_parameters()}

    def tensor_of(name: str) -> Tensor:
        rule, count = moe_init_rule(name, spec), math.prod(shapes[name])
        values = draw_init_slice(rule, 1, name, 0, count, torch.device("cpu"), torch.float64)
        return values * (1.0 if "norm" in name else 4.0)

    export(tmp_path / "hf", spec, tensor_of, torch.float64, model_class=family)
    given: dict[str, Any] = {"model": {"from_hf": str(tmp_path / "hf"), "lora": lora}, "optim__lr": 3e-2}
    given |= {"train__steps": 3 if ALL else 2, "optim__decay_steps": 3}
    one = walk(1, tmp_path / "one", tokens, **given)
    for zero in (1, 3) if ALL else (1,):
        more = {"parallel__expert": 2, "parallel__zero": zero, "balance__experts": [1, 4], "train__micro_batch": 1}
        many = walk(4 if ALL else 2, tmp_path / f"zero {zero}", tokens, **given | more)
        assert farthest(many.losses, one.losses) < 1e-9
        assert distance(many.state, one.state, "param") < 1e-9
        assert any(".experts.down_adapter." in name for name in one.state) == (lora == OF_EXPERTS)
        assert any(".kv_up.lora_b" in name for name in one.state) == (lora == OF_LATENT)
