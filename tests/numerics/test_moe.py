"""Mixture of experts: every division of a step, and a run that was killed, walks the curve of one process, with the
same choices of experts, whatever they are balanced by."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.disk.load import Checkpoint, list_steps, step_folder
from phalanx.core.run_paths import RunPaths
from phalanx.workload.expert_balance import BIAS_KEY, KEY
from phalanx.workload.step_table import decode_table
from tests.helpers import ALL
from tests.numerics.runs import Outcome, farthest, same_bits, walk
from tests.numerics.test_rank_layout import assert_same

STEPS = 6 if ALL else 3
EXPERTS = {"experts": 5, "experts_per_token": 2, "balance_weight": 0.5, "z_loss": 0.01}
BASE: dict[str, Any] = {
    "model__architecture": "mixtral", "train__steps": STEPS, "optim__decay_steps": STEPS,
}  # fmt: skip
# How a step is divided: ranks, parts of each, and more.
DIVISIONS: dict[str, tuple[int, list[int] | None, dict[str, Any]]] = {
    "micro-batch 1": (1, None, {"train__micro_batch": 1}),
    "5, 2, 1": (3, [5, 2, 1], {"train__micro_batch": 2}),
    "0, 8, zero 3": (2, [0, 8], {"train__micro_batch": 3, "parallel__zero": 3}),
    "recomputed": (2, [3, 5], {"train__micro_batch": 2, "memory__activations": "full"}),
    "selectively": (1, None, {"train__micro_batch": 3, "memory__activations": "selective"}),
    "zero 2": (2, [6, 2], {"train__micro_batch": 4, "parallel__zero": 2}),
    "fsdp2": (2, [4, 4], {"train__micro_batch": 4, "parallel__engine": "fsdp2"}),
    "stages": (2, None, {"train__micro_batch": 2, "parallel__pipeline": 2}),
}
BALANCES = {
    "sequence": {"balance": "sequence"},
    "group": {"balance": "group", "group": 3},
    "step_before": {"balance": "step_before"},
    "step_before, over the model": {"balance": "step_before", "over": "model"},
    "step": {"balance": "step"},
    "none": {"balance": "none"},
}
BIAS = {
    "model__architecture": "deepseek_v3", "model__latent": [0, 12, 4, 6], "model__kv_heads": 4,
    "model__moe": EXPERTS | {"balance": "bias", "bias_rate": 0.004}, "train__steps": max(4, STEPS),
}  # fmt: skip


def keys_of(balance: str) -> dict[str, Any]:
    """The recipe's, by what experts are balanced by."""
    return BASE | (BIAS if balance == "bias" else {"model__moe": EXPERTS | BALANCES[balance]})


def loads(run: Path) -> str | None:
    """The loads of experts, or corrections, in the header of the newest checkpoint."""
    folder = RunPaths(run).checkpoints
    checkpoint = Checkpoint(step_folder(folder, list_steps(folder)[0]))
    found = checkpoint.header.get(KEY, checkpoint.header.get(BIAS_KEY))
    checkpoint.close()
    return found


def run_divided(name: str, balance: str, tokens: Path, run: Path) -> Outcome:
    ranks, shares, more = DIVISIONS[name]
    return walk(ranks, run, tokens, shares, masked=True, **keys_of(balance), **more)


@pytest.mark.parametrize("balance", [*BALANCES, "bias"] if ALL else ["step_before", "bias"])
def test_any_division_walks_one_curve(balance: str, tokens: Path, tmp_path: Path) -> None:
    whole = walk(1, tmp_path / "whole", tokens, masked=True, **keys_of(balance))
    for number, name in enumerate(DIVISIONS if ALL else ["5, 2, 1"]):
        if name == "stages" and balance in ("step", "group"):
            continue
        found = run_divided(name, balance, tokens, tmp_path / str(number))
        print(f"{balance}, {name}: {farthest(found.losses, whole.losses):.1e}")
        assert_same(found, whole)
        assert loads(tmp_path / str(number)) == loads(tmp_path / "whole")
    assert (loads(tmp_path / "whole") is None) == (not balance.startswith(("step_before", "bias")))
    if balance == "bias":
        kept = decode_table(loads(tmp_path / "whole"), torch.zeros(2, 5, dtype=torch.float64), BIAS_KEY)
        moves = (kept / 0.004).round()
        assert (
            torch.allclose(kept, moves * 0.004)
            and len(moves.unique()) > 2
            and moves.abs().max() <= BIAS["train__steps"]
        )
        for layer, row in enumerate(kept):
            assert torch.equal(whole.state[f"param/layers.{layer}.mlp.router.correction"], row)


@pytest.mark.parametrize(("group", "like"), [(1, "sequence"), (8, "step")])
def test_a_group_may_be_one_row_or_the_whole_step(group: int, like: str, tokens: Path, tmp_path: Path) -> None:
    few = {"masked": True, "train__steps": 3}
    grouped = BASE | {"model__moe": EXPERTS | {"balance": "group", "group": group}}
    found = walk(1, tmp_path / "group", tokens, **grouped | few)
    assert_same(found, walk(1, tmp_path / like, tokens, **keys_of(like) | few))


def test_what_experts_are_balanced_by_matters(tokens: Path, tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    curves = {}
    for number, (name, balance) in enumerate(BALANCES.items()):
        run = tmp_path / str(number)
        curves[name] = walk(1, run, tokens, model__moe=EXPERTS | balance, **BASE | {"train__steps": 3}).losses[2]
    assert len({round(loss, 7) for loss in curves.values()}) == len(curves)


@pytest.mark.parametrize(("balance", "shares"), [("step_before", [5, 3]), ("bias", [5, 3] if ALL else [8])])
def test_a_resumed_run_has_the_same_loads(balance: str, shares: list[int], tokens: Path, tmp_path: Path) -> None:
    changes, ranks = keys_of(balance), len(shares)
    whole = walk(ranks, tmp_path / "whole", tokens, shares, **changes)
    walk(ranks, tmp_path / "torn", tokens, shares, **changes | {"train__steps": 2})
    torn = walk(ranks, tmp_path / "torn", tokens, shares, **changes)
    assert torn.losses == whole.losses
    assert same_bits(torn.state, whole.state)
    assert loads(tmp_path / "torn") == loads(tmp_path / "whole") is not None
