"""Other update rules walk one curve too: on any number of ranks, and killed and resumed."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.core.placement import Placement
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import distance, farthest, same_bits, walk

# Wide enough that matrices are coded; their rows do not divide by 3.
WIDE: dict[str, Any] = {"model__hidden": 64, "model__intermediate": 131, "train__steps": 6}
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"optim__options": {"momentum": 0.9, "dampening": 0.1}, "optim__lr": 0.3, "optim__weight_decay": 0.1},
    "adadelta": {"optim__lr": 3.0},
    "nadam": {},
    "adamw8bit": WIDE,
}


@pytest.mark.parametrize("rule", some(RULES, 0, 2, 3))
def test_any_ranks_walk_the_curve_of_one(rule: str, tokens: Path, tmp_path: Path) -> None:
    changes = {"train__steps": 6, "optim__name": rule} | RULES[rule]
    alone = walk(1, tmp_path / "1", tokens, **changes)
    other = walk(3 if ALL or rule == "adamw8bit" else 2, tmp_path / "other", tokens, **changes)
    kinds = sorted({name.partition("/")[0] for name in alone.state})
    apart = {kind: distance(other.state, alone.state, kind) for kind in kinds}
    print(rule, apart)
    assert max(farthest(other.losses, alone.losses), *apart.values()) < 1e-9
    assert len(kinds) == {"sgd": 2}.get(rule, 3)
    assert alone.losses[-1] < alone.losses[0] - 0.1


def test_moments_in_8_bits_are_those_of_one_process_wherever_experts_are(tokens: Path, tmp_path: Path) -> None:
    changes = WIDE | {"train__steps": 3, "optim__name": "adamw8bit", "model__architecture": "mixtral"}
    changes["model__moe"] = {"experts": 5, "experts_per_token": 2}
    alone = walk(1, tmp_path / "1", tokens, **changes)
    more = {"parallel__expert": 2, "balance__experts": [4, 1], "train__micro_batch": 2}
    two = walk(2, tmp_path / "2", tokens, **changes, **more)
    apart = [distance(two.state, alone.state, kind) for kind in ("param", "exp_avg", "exp_avg_sq")]
    assert max(farthest(two.losses, alone.losses), *apart) < 1e-9


@pytest.mark.parametrize(("rule", "ranks"), some([("adamw8bit", 1), ("adamw8bit", 2), ("sgd", 1)], 1))
def test_resumed_is_bitwise_the_undisturbed(rule: str, ranks: int, tokens: Path, tmp_path: Path) -> None:
    changes = {"optim__name": rule, "train__dtype": "bf16"} | RULES[rule] | {"train__steps": 4}
    whole = walk(ranks, tmp_path / "whole", tokens, **changes)
    walk(ranks, tmp_path / "cut", tokens, **changes | {"train__steps": 2})
    cut = walk(ranks, tmp_path / "cut", tokens, **changes)
    assert cut.losses == whole.losses
    assert same_bits(cut.state, whole.state)


def test_moments_in_8_bits_may_be_read_by_adamw(tokens: Path, tmp_path: Path) -> None:
    walk(1, tmp_path, tokens, **WIDE | {"train__steps": 3}, optim__name="adamw8bit")
    on = walk(1, tmp_path, tokens, **WIDE | {"train__steps": 4}, optim__name="adamw")
    assert len(on.losses) == 4


def go_on(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> str:
    """What a run in a folder is refused with."""
    try:
        runs.train(placement, run, data, changes)
    except PhalanxError as error:
        return str(error)
    return "it went on"


def test_a_checkpoint_of_another_rule_is_refused_in_a_sentence(tokens: Path, tmp_path: Path) -> None:
    walk(1, tmp_path, tokens, train__steps=1)
    changes = {"train.steps": 2, "optim.name": "sgd", "optim.options": {"momentum": 0.9}}
    (said,) = run_ranks(go_on, 1, run=str(tmp_path), data=str(tokens), changes=changes)
    assert "does not hold elements" in said
    assert "of momentum_buffer of parameter embed.weight" in said
    assert said.endswith("resume with the configuration that wrote it")
