"""BERT's tasks keep the promise: any split, any ranks, killed and resumed, it is the curve of one process.

Rows have lengths of their own and are padded differently in each micro-batch; dropout is on, of attention too.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.records import EventKind
from phalanx.data.record_files import RecordFileWriter
from phalanx.data.wordpiece import SpecialTokens
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.model import draw_init_slice
from phalanx.workload.workload import make_workload
from tests.dist.incidents import train_with_signal
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import VOCAB, distance, farthest, job, same_bits, walk
from tests.token_sets import TokenWriter

EXACT = 1e-9
STEPS = 4
SPECIALS = SpecialTokens(0, 1, 2, 3, 4, tuple(range(45, VOCAB)))
LABELS = ["O", "B-A", "I-A"]
SEQ_LEN = 80  # rows are padded to 64 or to 80
MODEL = {"architecture": "bert", "hidden": 16, "layers": 2, "heads": 2, "intermediate": 28, "vocab_size": VOCAB,
         "dropout": 0.1, "attention_dropout": 0.1}  # fmt: skip
DATA = {"seq_len": SEQ_LEN}


def text(folder: Path) -> None:
    generator = np.random.default_rng(3)
    for name, documents in (("train", 30), ("held_out", 4)):
        writer = TokenWriter(folder / name, VOCAB, SPECIALS.sep, "proofs", SPECIALS)
        for _ in range(documents):
            writer.append(5 + np.cumsum(generator.integers(0, 3, int(generator.integers(2, 150)))) % (VOCAB - 5))
        writer.finish()


def records(kind: str, columns: dict[str, str], make: Callable[[Any, Any], dict[str, Any]]) -> Callable[[Path], None]:
    """A writer of sets of records of one kind; `make` makes one of a generator and its tokens."""

    def write(folder: Path) -> None:
        generator = np.random.default_rng(5)
        facts = {"kind": kind, "vocab_size": VOCAB, "specials": SPECIALS.to_json(), "labels": LABELS}
        for name, count in (("train", 40), ("held_out", 13)):
            writer = RecordFileWriter(folder / name, {"tokens": "<u2", **columns}, facts)
            for _ in range(count):
                tokens = 5 + np.cumsum(generator.integers(0, 3, int(generator.integers(6, 75)))) % (VOCAB - 5)
                writer.append({"tokens": tokens, **make(generator, tokens)})
            writer.finish()

    return write


def _shard(generator: Any, tokens: Any) -> dict[str, Any]:
    places = np.sort(generator.choice(np.arange(1, len(tokens)), int(generator.integers(0, 5)), replace=False))
    labels = tokens[places].copy()
    tokens[places] = SPECIALS.mask
    segments = np.arange(len(tokens)) > len(tokens) // 2
    return {"segments": segments, "places": places, "labels": labels, "follows": [int(generator.integers(2))]}


KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "masked": (text, {"data": DATA}),
    "masked pairs": (text, {"data": DATA, "task": {"next_sentence": True, "whole_word": True}}),
    "shards": (
        records("shards", {"segments": "<u1", "places": "<u2", "labels": "<u2", "follows": "<u1"}, _shard),
        {"data": DATA | {"format": "masked"}, "task": {"kind": "masked", "next_sentence": True}},
    ),
    "tag": (
        records("tag", {"labels": "<i4"}, lambda _, tokens: {"labels": np.where(tokens % 5 > 2, -1, tokens % 3)}),
        {"data": DATA, "task": {"kind": "tag", "labels": LABELS}},
    ),
    "classify": (
        records(
            "classify",
            {"pair": "<u2", "labels": "<i4"},
            lambda generator, tokens: {"pair": tokens[: int(generator.integers(0, 5))], "labels": [tokens[0] % 3]},
        ),
        {"data": DATA, "task": {"kind": "classify", "labels": LABELS}},
    ),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("bert")

    def of(kind: str) -> Path:
        if not (folder / kind).exists():
            (folder / kind).mkdir()
            KINDS[kind][0](folder / kind)
        return folder / kind

    return of


def changes(kind: str, **more: Any) -> dict[str, Any]:
    """What is changed in the proofs' recipe: a whole model, and single keys."""
    given = {"train": {"steps": STEPS, "micro_batch": 8}, **KINDS[kind][1], **more}
    return {"model": MODEL} | {f"{name}.{key}": value for name, keys in given.items() for key, value in keys.items()}


def written(kind: str, **more: Any) -> dict[str, Any]:
    """The same as arguments of `walk`."""
    return {key.replace(".", "__"): value for key, value in changes(kind, **more).items()}


# ------------------------------------------------------------------------------------------------- one process, split


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_split_are_those_of_the_whole(kind: str, sets: Callable[[str], Path], tmp_path: Path) -> None:
    described = job(tmp_path, sets(kind), changes(kind), 1)
    workload = make_workload(described.config, described.spec)
    task, exact = workload.task(), torch.float64
    model = workload.model().to_empty(device="cpu").to(exact)
    for name, parameter in model.named_parameters():
        start = model.start(name, tuple(parameter.shape))
        parameter.data.copy_(draw_init_slice(start, 0, name, 0, parameter.numel(), "cpu", exact).view_as(parameter))
    ((rows, _),) = workload.train_data(described.train_tokens)

    def gradients(samples: list[Any], borders: list[int], of: torch.dtype) -> tuple[float, int, torch.Tensor]:
        model.to(of).zero_grad(set_to_none=False)
        loss, weight = 0.0, 0
        for start, stop in zip([0, *borders], [*borders, len(samples)], strict=True):
            batch = task.collate(samples[start:stop])
            part = task.loss_sum(model, batch, CounterRNG(0, 1, batch.samples))
            part.backward()
            loss, weight = loss + part.item(), weight + batch.weight
        found = [p.grad for p in model.parameters()]
        assert all(grad is not None for grad in found)
        return loss, weight, torch.cat([grad.flatten() for grad in found if grad is not None])

    @settings(max_examples=6 if ALL else 4, deadline=None)
    @given(borders=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(sorted), first=st.integers(0, 10**6))
    def check(borders: list[int], first: int) -> None:
        samples = [rows.sample((first + n) % rows.count, first + n) for n in range(9)]
        loss, weight, whole = gradients(samples, [], exact)
        for dtype, tolerance in ((exact, 1e-12), (torch.float32, 1e-6)):
            split_loss, split_weight, split = gradients(samples, borders, dtype)
            assert weight == split_weight > 0
            assert abs(split_loss - loss) <= tolerance * abs(loss)
            assert float((split.double() - whole).norm() / whole.norm()) < tolerance

    check()


# --------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize("kind", some(["masked pairs", "shards", "tag", "classify"], 1, 2))
def test_ranks_with_unlike_shares_walk_one_curve(kind: str, sets: Callable[[str], Path], tmp_path: Path) -> None:
    one = walk(1, tmp_path / "one", sets(kind), **written(kind))
    assert len(set(one.losses)) == STEPS, "what would not change would be the same everywhere"
    given = written(kind, train={"steps": STEPS, "micro_batch": 3})
    other = walk(3, tmp_path / "three", sets(kind), shares=[5, 0, 3], **given)
    apart = {
        "losses": farthest(other.losses, one.losses),
        "norms": farthest(other.norms, one.norms),
        "evaluations": farthest([*other.evaluations.values()], [*one.evaluations.values()]),
        "param": distance(other.state, one.state, "param"),
    }
    print("apart:", ", ".join(f"{what} {value:.1e}" for what, value in apart.items()))
    assert max(apart.values()) < EXACT, apart
    scores = [
        [event["scores"] for event in runs.events(tmp_path / run, EventKind.EVALUATED)] for run in ("one", "three")
    ]
    assert scores[0] == scores[1]
    assert scores[0][0]["accuracy"] >= 0


@pytest.mark.parametrize("kind", some(["masked pairs", "tag"], 0))
def test_killed_and_resumed_it_is_the_same_to_the_bit(kind: str, sets: Callable[[str], Path], tmp_path: Path) -> None:
    quiet = walk(2, tmp_path / "quiet", sets(kind), shares=[5, 3], **written(kind))
    run = tmp_path / "killed"
    run.mkdir()
    often = changes(kind) | {"checkpoint.every": 1, "balance.batch": [5, 3]}  # of two, one is whole by the third step
    kwargs = {"step": 3, "number": signal.SIGKILL, "ranks": [1]}
    codes = run_ranks(train_with_signal, 2, restarts=1, run=str(run), data=str(sets(kind)), changes=often, **kwargs)
    assert codes == [0, 0]
    assert len(runs.events(run, EventKind.RESUMED)) == 1
    killed = runs.outcome(run)
    assert killed.losses == quiet.losses
    assert killed.evaluations == quiet.evaluations
    assert same_bits(killed.state, quiet.state)


def test_blocks_may_be_computed_again(sets: Callable[[str], Path], tmp_path: Path) -> None:
    plain = walk(1, tmp_path / "plain", sets("masked pairs"), **written("masked pairs"))
    for mode in ("full", "selective"):
        given = written("masked pairs", memory={"activations": mode})
        again = walk(1, tmp_path / mode, sets("masked pairs"), **given)
        assert farthest(again.losses, plain.losses) < EXACT
