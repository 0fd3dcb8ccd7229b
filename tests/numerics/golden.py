"""The curve in numbers, as this version walks it; golden.json holds them as they were when they were last renewed.

`python -m tests.numerics.golden` renews that file. What may be renewed, and what must be said then, is in
docs/guarantees.md. Nothing here draws from a library's generator, whose numbers another version of it might change.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.core.placement import Placement
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.data.bert_rows import MaskingOptions, make_masked_rows
from phalanx.data.loader import Loader
from phalanx.data.packing import PackingOptions, Sample, make_rows
from phalanx.data.record_files import TokenFile
from phalanx.data.records import is_held_out, text_digest
from phalanx.data.shuffle import shuffle_indices
from phalanx.data.wordpiece import SpecialTokens
from phalanx.layout.balance import Division
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.hf_export import export
from phalanx.models.llama import Llama, init_slice
from phalanx.models.model import draw_init_slice
from phalanx.models.user_model import shapes_of
from phalanx.workload.workload import make_workload
from tests.helpers import run_ranks
from tests.numerics import runs
from tests.numerics.runs import VOCAB
from tests.token_sets import TokenWriter

FILE = Path(__file__).with_suffix(".json")
Values = dict[str, list[int] | list[float]]
FIRST, SEEDS, STEPS = 32, (0, 1, 2**31), 10
LENGTH = {"train.steps": STEPS, "optim.decay_steps": 30}
SPECIALS = SpecialTokens(0, 1, 2, 3, 4, tuple(range(45, VOCAB)))
SPEC = ModelSpec(
    vocab_size=VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=44, max_seq_len=16
)
BERT = {"architecture": "bert", "hidden": 16, "layers": 2, "heads": 2, "intermediate": 28, "vocab_size": VOCAB,
        "dropout": 0.1, "attention_dropout": 0.1}  # fmt: skip
LORA = {"rank": 3, "alpha": 9, "dropout": 0.2}


def numbers(name: str, count: int, below: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`count` numbers below 256 at most that look random, by a name."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(count), np.uint8).astype(np.int64) % below


def write_tokens(folder: Path, count: int, specials: SpecialTokens | None = None, masked: bool = False) -> TokenFile:
    """A set of `count` documents of 2 to 29 tokens, of which, if `masked`, some are not learnt."""
    first, end = (1, 0) if specials is None else (5, specials.sep)
    writer = TokenWriter(folder, VOCAB, end, "golden", specials)
    for document, length in enumerate((2 + numbers("lengths", count, 28)).tolist()):
        tokens = np.append(first + numbers(f"document {document}", length - 1, VOCAB - first), end)
        learnt = numbers(f"learnt {document}", length, 3) > 0 if masked else None
        writer.extend(tokens, np.array([length]), learnt)
    writer.finish()
    return TokenFile(folder)


def orders() -> Values:
    """Where the first things of a set go, by seed, epoch and how many there are; and of the orders with a name."""
    index = np.arange(FIRST)
    found = {
        f"seed {seed}, epoch {epoch}, {count} samples": shuffle_indices(seed, epoch, count, index).tolist()
        for seed in SEEDS
        for epoch, count in ((0, 1000), (1, 1000), (2, 1 << 33))
    }
    return found | {
        f"named {name}": shuffle_indices(1, 2, 1000, index, name).tolist() for name in ("packing", "source 1")
    }


def samples(folder: Path) -> Values:
    """(position, source, epoch, row) of the samples of some steps of a mixture; rows that are evaluated on; documents
    that are held out."""
    sets = [make_rows(write_tokens(folder / f"mixed-{count}", count), PackingOptions(16), 3) for count in (20, 60)]
    mixture = Loader([(sets[0], 1.0), (sets[1], 2.0)], 8, 3, 0)
    alone = Loader([(sets[1], 1.0)], 8, 3, 0, held_out=True)
    found: Values = {f"mixture, step {step}": _flat(mixture.list_positions(step)) for step in (0, 1, 20)}
    found["evaluated on"] = [
        sample.position
        for parts in alone.evaluation_batches(lambda count: Division((count,), 1), 16)
        for part in parts
        for sample in part
    ]
    texts = [f"document {number}" for number in range(200)]
    found["held out"] = [number for number, text in enumerate(texts) if is_held_out(text_digest(text), 0.1)]
    return found


def rows(folder: Path) -> Values:
    """Rows of a fixed set: windows, windows that know their documents, and packed ones."""
    file = write_tokens(folder / "rows", 40, masked=True)
    forms = {
        "windows": PackingOptions(24),
        "isolated": PackingOptions(24, isolated=True),
        "packed": PackingOptions(24, packed=True),
        "packed without long ones": PackingOptions(24, packed=True, drop_long=True),
    }
    found: Values = {}
    for name, form in forms.items():
        made = make_rows(file, form, 3)
        found[f"{name}: rows"] = [made.count]
        for number in (0, 1, made.count - 1):
            found[f"{name}, row {number}"] = _of_sample(made.sample(number, number))
    return found


def masks(folder: Path) -> Values:
    """Masked rows of a fixed set: tokens, segments, places, labels, and whether the second part follows."""
    file = write_tokens(folder / "masked", 40, SPECIALS)
    found: Values = {}
    for name, pairs, words in (("windows", False, False), ("words", False, True), ("pairs", True, False)):
        made = make_masked_rows(file, MaskingOptions(24, 0.3, pairs, words), 3)
        for number in range(3):
            row = made.sample(number, number + 100)
            found[f"{name}, row {number}"] = [
                *row.tokens.tolist(), *row.segments.tolist(), *row.places.tolist(), *row.labels.tolist(), row.follows
            ]  # fmt: skip
    return found


def weights(folder: Path) -> Values:
    """The first initial weights of each kind of parameter, and some from the middle of a block of draws."""
    found: Values = {
        name: init_slice(SPEC, seed, name, 0, 8, "cpu", torch.float64).tolist()
        for seed, name in enumerate(list(shapes_of(Llama, SPEC))[:10])
    }
    for first in (65_530, 10**9 + 1):
        drawn = draw_init_slice(("normal", 0.02), 3, "weight", first, first + 8, "cpu", torch.float64)
        found[f"elements from {first}"] = drawn.tolist()
    config = runs.job(folder / "bert", write_tokens(folder / "bert-data" / "train", 9, SPECIALS).folder.parent,
                      {"model": BERT}, 1)  # fmt: skip
    bert = make_workload(config.config, config.spec).model()
    for name, parameter in list(bert.named_parameters())[:3]:
        start = bert.start(name, tuple(parameter.shape))
        found[f"bert: {name}"] = draw_init_slice(start, 1, name, 0, 8, "cpu", torch.float64).tolist()
    return found


def dropout() -> Values:
    """Which elements dropout keeps, by seed, step, sample and layer."""
    ones = torch.ones(2, 3, 5)
    found: Values = {}
    for seed, step, layer in ((0, 0, 0), (1, 7, 3), (2**31, 10**6, 12)):
        kept = CounterRNG(seed, step, torch.tensor([4, 10**7])).dropout(ones, layer, 0.3) > 0
        found[f"seed {seed}, step {step}, layer {layer}"] = kept.flatten().int().tolist()
    return found


def losses(folder: Path) -> Values:
    """The first losses in float64, of a mixture of windows, of masked pairs, and of adapters on packed rows."""
    for name, specials in (("text", None), ("bert", SPECIALS)):
        for part, count in (("train", 60), ("held_out", 12)):
            write_tokens(folder / name / part, count, specials)
    write_tokens(folder / "text" / "train-2", 30)
    for part, count in (("train", 60), ("held_out", 12)):
        write_tokens(folder / "answers" / part, count, masked=True)
    base = folder / "base"
    shapes = shapes_of(Llama, SPEC)
    export(base, SPEC, lambda name: _far_from_zero(name, shapes[name]), torch.float64)
    changed: dict[str, tuple[str, dict[str, Any]]] = {
        "language model": ("text", {}),
        "bert": ("bert", {"model": BERT, "data.seq_len": 24, "task.next_sentence": True, "task.whole_word": True}),
        "lora": ("answers", {"model": {"from_hf": str(base), "dropout": 0.1, "lora": LORA}, "data.format": "prompt"}),
    }
    jobs = {
        name: {
            "run": str(folder / f"run {name}"),
            "data": str(folder / data),
            "changes": {"train.steps": STEPS, "optim.decay_steps": 30} | more,
        }
        for name, (data, more) in changed.items()
    }
    run_ranks("tests.numerics.golden:walk_all", 1, jobs=list(jobs.values()))
    steps = {name: read_steps(RunPaths(Path(job["run"])).metrics) for name, job in jobs.items()}
    return {name: [step["loss"] for step in found] for name, found in steps.items()}


def walk_all(placement: Placement, jobs: list[dict[str, Any]]) -> None:
    """A rank's part of several runs, one after the other."""
    for job in jobs:
        assert runs.train(placement, **job) == 0


def compute(folder: Path) -> dict[str, Values]:
    """All of it; `folder` is empty."""
    return {
        "orders": orders(), "samples": samples(folder), "rows": rows(folder), "masks": masks(folder),
        "weights": weights(folder), "dropout": dropout(), "losses": losses(folder),
    }  # fmt: skip


def _far_from_zero(name: str, shape: Any) -> torch.Tensor:
    values = init_slice(SPEC, 1, name, 0, torch.Size(shape).numel(), "cpu", torch.float64)
    return values * (1.0 if "norm" in name else 4.0)


def _of_sample(sample: Sample) -> list[int]:
    learnt = [] if sample.learnt is None else sample.learnt.astype(int).tolist()
    return [*sample.tokens.tolist(), *learnt, *([] if sample.lengths is None else sample.lengths.tolist())]


def _flat(places: list[tuple[int, ...]]) -> list[int]:
    return [number for place in places for number in place]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        values = compute(Path(scratch))
    sections = [
        f" {json.dumps(section)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(listed)}" for name, listed in found.items())
        + "\n }"
        for section, found in values.items()
    ]
    FILE.write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")
