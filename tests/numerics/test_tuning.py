"""Mixtures, and rows of whole documents of which only a part is learnt: the cluster changes nothing here either.

Documents are of all lengths, some too long for a row; a row holds several; every row and every step weighs something
else, and some micro-batches nothing at all; dropout is on.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.data.packing import PackedRows, PackingOptions
from phalanx.data.record_files import TokenFile
from tests.helpers import some
from tests.numerics.runs import VOCAB, Outcome, events, same_bits, walk
from tests.numerics.test_rank_layout import assert_same
from tests.token_sets import TokenWriter

STEPS = 8
TUNED: dict[str, Any] = {"data__format": "prompt", "train__steps": STEPS, "optim__decay_steps": STEPS,
                         "train__micro_batch": 3, "train__eval_every": 4}  # fmt: skip


def write_set(folder: Path, documents: int, seed: int, masked: bool) -> None:
    """Documents of 2 to 24 tokens, of which the last few are learnt and often none within a row's reach."""
    generator = np.random.default_rng(seed)
    writer = TokenWriter(folder, VOCAB, 0, "proofs")
    for length in generator.integers(2, 25, documents):
        tokens = np.append((generator.integers(1, VOCAB - 1) + 7 * np.arange(length - 1)) % (VOCAB - 1) + 1, 0)
        writer.extend(tokens, np.array([length]), np.arange(length) >= generator.integers(0, 20) if masked else None)
    writer.finish()


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets to train on and two to evaluate on, all with masks."""
    folder = tmp_path_factory.mktemp("tuning")
    for number, (name, documents) in enumerate({"train-a": 60, "train-b": 25, "held_out": 12, "other": 5}.items()):
        write_set(folder / name, documents, number, masked=True)
    return folder


@pytest.fixture(scope="module")
def tuned(tuning: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    run = tmp_path_factory.mktemp("alone")
    return walk(1, run, tuning, **TUNED), run


def test_the_run_is_as_hard_as_it_claims(tuned: tuple[Outcome, Path], tuning: Path) -> None:
    outcome, run = tuned
    steps = read_steps(RunPaths(run).metrics)
    assert len({step["tokens"] for step in steps}) > 5
    assert outcome.losses[-1] < outcome.losses[0]
    assert set(outcome.evaluations) == set(itertools.product((4, STEPS), ("held_out", "other")))
    packed = PackedRows(TokenFile(tuning / "train-a"), PackingOptions(16, packed=True), 0)
    rows = [packed.sample(number, 0) for number in range(packed.count)]
    learnt = [row.learnt.sum() for row in rows if row.learnt is not None]
    assert min(learnt) == 0 < max(learnt)
    assert max(len(row.lengths) for row in rows if row.lengths is not None) >= 3
    said = [event["message"] for event in events(run, EventKind.WARNING)]
    assert len(said) == 2
    assert all("documents are longer than data.seq_len 16 and are cut" in message for message in said)


@pytest.mark.parametrize(("ranks", "shares"), some([(2, [7, 1]), (3, None), (3, [5, 0, 3]), (5, [3, 0, 2, 2, 1])], 2))
def test_ranks_and_shares(
    ranks: int, shares: list[int] | None, tuned: tuple[Outcome, Path], tuning: Path, tmp_path: Path
) -> None:
    assert_same(walk(ranks, tmp_path, tuning, shares=shares, **TUNED), tuned[0])


def test_resumed_it_is_the_same_to_the_last_bit(tuned: tuple[Outcome, Path], tuning: Path, tmp_path: Path) -> None:
    walk(1, tmp_path, tuning, **TUNED | {"train__steps": 3})
    found = walk(1, tmp_path, tuning, **TUNED)
    assert found.losses == tuned[0].losses
    assert {key: loss for key, loss in found.evaluations.items() if key[0] != 3} == tuned[0].evaluations
    assert same_bits(found.state, tuned[0].state)


def test_too_long_documents_may_be_left_out(tuned: tuple[Outcome, Path], tuning: Path, tmp_path: Path) -> None:
    found = walk(1, tmp_path, tuning, **TUNED | {"train__steps": 1, "data__too_long": "drop"})
    assert found.losses[0] != tuned[0].losses[0]
    assert "are left out" in events(tmp_path, EventKind.WARNING)[0]["message"]


def test_isolated_text_in_a_mixture(tmp_path: Path) -> None:
    for number, (name, documents) in enumerate({"train-a": 60, "train-b": 25, "held_out": 12}.items()):
        write_set(tmp_path / "data" / name, documents, number, masked=False)
    isolated: dict[str, Any] = {"data__isolate_documents": True, "train__steps": 4, "train__micro_batch": 3}
    one = walk(1, tmp_path / "one", tmp_path / "data", **isolated)
    assert_same(walk(2, tmp_path / "two", tmp_path / "data", shares=[5, 3], **isolated), one)
    connected = walk(1, tmp_path / "connected", tmp_path / "data", **isolated | {"data__isolate_documents": False})
    assert one.losses[0] != connected.losses[0]
    tokens = [{step["tokens"] for step in read_steps(RunPaths(tmp_path / run).metrics)} for run in ("one", "connected")]
    assert max(tokens[0]) < 8 * 16  # no label across a border
    assert tokens[1] == {8 * 16}
