"""A BERT learns from text that every machine has: the modules of Python's own library."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.config.schema import Config
from phalanx.core.records import EventKind
from phalanx.data.bert_rows import order_labels
from phalanx.data.prepare import PreparedData, prepare_for
from phalanx.data.record_files import RecordFile, TokenFile
from tests.code_tags import write_conll
from tests.helpers import ALL
from tests.numerics import runs
from tests.numerics.runs import walk

MODEL = {"architecture": "bert", "hidden": 64, "layers": 1, "heads": 4, "init_std": 0.12}


def prepared(folder: Path, source: Any, task: dict[str, Any], **data: Any) -> tuple[PreparedData, Path]:
    """The prepared data, and a folder with its sets as `walk` looks for them."""
    keys = {"source": source, "tokenizer": "train", "cache": str(folder / "cache"), "held_out": 0.15, **data}
    made = prepare_for(Config.model_validate({"model": MODEL, "task": task, "data": keys}))
    sets = folder / "sets"
    sets.mkdir()
    (sets / "train").symlink_to(made.train[0][0])
    (sets / "held_out").symlink_to(made.held_out["held_out"])
    return made, sets


@pytest.mark.skipif(not ALL, reason="long: make test-all; entities are learned in less")
def test_masked_tokens_are_told_from_those_around_them(tmp_path: Path) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    sources = [str(library / name) for name in ("email", "json", "http")]
    made, sets = prepared(tmp_path, sources, {"kind": "masked"}, tokenizer_vocab=300)
    train, held_out = TokenFile(made.train[0][0]), TokenFile(made.held_out["held_out"])
    often = np.bincount(train.slice(0, train.tokens), minlength=train.vocab_size) + 0.5
    text = held_out.slice(0, held_out.tokens)
    alone = float(-np.log(often / often.sum())[text[text != held_out.eos_id]].mean())
    outcome = walk(
        1, tmp_path / "run", sets, model=MODEL | {"vocab_size": made.vocab_size}, data__seq_len=16, train__steps=500,
        train__global_batch=128, train__micro_batch=128, train__dtype="fp32", train__eval_sequences=500, optim__lr=6e-3,
        optim__warmup_steps=30, optim__decay_steps=500, optim__clip_norm=1.0,
    )  # fmt: skip
    (loss,) = outcome.evaluations.values()
    (scores,) = [event["scores"] for event in runs.events(tmp_path / "run", EventKind.EVALUATED)]
    print(f"{loss:.3f} nats for a masked token, {alone:.3f} from how often tokens are; {scores}")
    assert loss < alone - 0.5
    assert scores["accuracy"] > 0.15


def test_entities_are_found(tmp_path: Path) -> None:
    write_conll(tmp_path / "code.conll", ["json/decoder.py", "json/encoder.py", "heapq.py", "textwrap.py", "shlex.py"])
    source = str(tmp_path / "code.conll")
    made, sets = prepared(tmp_path, source, {"kind": "tag"}, tokenizer_vocab=600)
    labels = order_labels(RecordFile(made.train[0][0]).facts["labels"])
    assert labels == ["O", "B-ATTRIBUTE", "B-BUILTIN", "B-DEFINED", "B-KEYWORD", "B-NUMBER", "I-ATTRIBUTE"]
    walk(
        1, tmp_path / "run", sets, model=MODEL | {"vocab_size": made.vocab_size}, data__seq_len=64, train__steps=150,
        task={"kind": "tag", "labels": labels}, train__global_batch=32, train__micro_batch=32, train__dtype="fp32",
        train__eval_sequences=1000, optim__lr=4e-3, optim__decay_steps=150, optim__clip_norm=1.0,
    )  # fmt: skip
    (scores,) = [event["scores"] for event in runs.events(tmp_path / "run", EventKind.EVALUATED)]
    print(scores)
    assert scores["accuracy"] > 0.9
    assert scores["f1"] > 0.75
    assert min(scores["precision"], scores["recall"]) > 0.7
