"""BERT from text to a tagger and a classifier, by the real command line; and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import phalanx
from phalanx.config.load import build_config
from phalanx.config.model_spec import build_model_spec
from phalanx.config.resolve import resolve_autos
from phalanx.core.errors import ConfigError
from phalanx.core.records import EventKind
from tests.code_tags import LIBRARY, sentences, write_conll
from tests.dist.command import call
from tests.helpers import run_ranks
from tests.numerics.runs import events
from tests.shards import write_shard

MASKED = """
model: {architecture: bert, hidden: 32, layers: 2, heads: 2, dropout: 0.1, max_seq_len: 64}
task: {next_sentence: true}
data: {source: text, tokenizer_vocab: 400, seq_len: 32, held_out: 0.3, cache: cache}
train: {steps: 4, global_batch: 8, micro_batch: 8, eval_sequences: 16}
balance: {batch: even}
report: {tensorboard: false}
"""
TAGS = """
model: {from_hf: pretrained}
task: {kind: tag}
data: {source: code.conll, seq_len: 64, held_out: 0.3, cache: cache}
train: {steps: 3, global_batch: 8, micro_batch: 8, eval_sequences: 400}
report: {tensorboard: false}
"""
CLASSES = TAGS.replace("kind: tag", "kind: classify").replace("code.conll", "lines.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a BERT was pre-trained, exported, and tuned twice."""
    root = tmp_path_factory.mktemp("bert")
    (root / "text").mkdir()
    for name in ("heapq.py", "bisect.py", "textwrap.py", "shlex.py", "queue.py", "sched.py"):
        shutil.copy(LIBRARY / name, root / "text" / name)
    write_conll(root / "code.conll", ["heapq.py", "shlex.py"])
    lines = [(" ".join(words), "definition" if words[0] in ("def", "class") else "other") for words, _ in
             sentences("textwrap.py")]  # fmt: skip
    (root / "lines.jsonl").write_text("".join(json.dumps({"text": t, "label": label}) + "\n" for t, label in lines))
    for name, content in (("masked", MASKED), ("tags", TAGS), ("classes", CLASSES)):
        (root / f"{name}.yaml").write_text(content)
    commands = [
        ["train", "masked.yaml", "--ranks", "2", "--run-dir", "masked"],
        ["export", "masked", "pretrained"],
        ["train", "tags.yaml", "--run-dir", "tags"],
        ["export", "tags", "tagger"],
        ["train", "classes.yaml", "--run-dir", "classes"],
        ["export", "classes", "classifier", "--dtype", "fp32"],
        ["generate", "masked", "--prompt", "def "],
        ["train", "tags.yaml", "--run-dir", "again", "task.kind=language"],
        ["generate", "tagger", "--prompt", "def "],
    ]
    done = run_ranks(call, 1, timeout_s=200, folder=str(root), commands=commands)[0]
    for command, (code, out, err) in zip(commands[:6], done[:6], strict=True):
        assert code == 0, (command, out, err)
    (root / "last.json").write_text(json.dumps(done[6:]))
    return root


def test_what_was_pre_trained_is_transformers_bert(folder: Path) -> None:
    model = AutoModelForPreTraining.from_pretrained(folder / "pretrained")
    tokenizer = AutoTokenizer.from_pretrained(folder / "pretrained")
    out = model(**tokenizer("def heap [MASK]", "return", return_tensors="pt"))
    assert out.prediction_logits.shape[-1] == model.config.vocab_size
    assert model.config.architectures == ["BertForPreTraining"]
    assert not (folder / "pretrained" / "generation_config.json").exists()
    loaded = sum(each.numel() for each in phalanx.Run(folder / "masked").load_model().parameters())
    assert loaded == sum(each.numel() for each in model.parameters())
    (scores,) = [event["scores"] for event in events(folder / "masked", EventKind.EVALUATED)]
    assert set(scores) == {"accuracy", "next_accuracy"}


@pytest.mark.parametrize(
    ("run", "exported", "head"),
    [
        ("tags", "tagger", AutoModelForTokenClassification),
        ("classes", "classifier", AutoModelForSequenceClassification),
    ],
)
def test_a_head_is_drawn_and_its_labels_are_kept(run: str, exported: str, head: Any, folder: Path) -> None:
    (warning,) = [one["message"] for one in events(folder / run, EventKind.WARNING) if "head" in one["message"]]
    assert "has no head for task.kind" in warning and warning.endswith("newly initialized: classifier")
    chosen = {event["key"]: event["value"] for event in events(folder / run, EventKind.AUTO_RESOLVED)}
    model, info = head.from_pretrained(folder / exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert [model.config.id2label[number] for number in range(model.config.num_labels)] == chosen["task.labels"]
    before = AutoModelForPreTraining.from_pretrained(folder / "pretrained")
    name = "bert.encoder.layer.0.output.dense.weight"
    moved = (model.state_dict()[name].float() - before.state_dict()[name].float()).norm()
    assert 0 < float(moved) < 0.1 * float(before.state_dict()[name].float().norm()), "it started from those weights"


def test_what_was_scored_is_what_transformers_says(folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "classifier")
    from phalanx.data.record_files import RecordFile

    (sets,) = [path.parent for path in (folder / "cache").glob("records-*/held_out/pair.bin")]
    columns = RecordFile(sets)
    losses = []
    for number in range(columns.count):
        record = columns.record(number)
        label = model.config.label2id[columns.facts["labels"][record["labels"][0]]]
        tokens = [tokenizer.cls_token_id, *record["tokens"].tolist()[:62], tokenizer.sep_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        losses.append(-float(torch.log_softmax(logits, -1)[label]))
    (event,) = events(folder / "classes", EventKind.EVALUATED)
    (started,) = events(folder / "classes", EventKind.RUN_STARTED)
    assert started["unit"] == event["unit"] == "samples", "what the speed of labelled texts counts"
    assert 10 < columns.count < 400, "all of the held-out texts are evaluated on"
    assert event["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_what_a_bert_cannot_do_is_a_sentence(folder: Path) -> None:
    generate, language, folder_generate = json.loads((folder / "last.json").read_text())
    assert generate[0] == 2
    assert "trained a BERT (task.kind masked), which writes no text" in " ".join(generate[2].split())
    assert folder_generate[0] == 2
    assert "tagger holds a BERT, which writes no text; name a model that does" in " ".join(folder_generate[2].split())
    assert language[0] == 2
    assert "a BERT does not support task.kind language; set it to masked, tag or classify" in " ".join(
        language[2].split()
    )


def test_shards_are_trained_on_as_they_are(folder: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "shards" / "a.hdf5", rows=200)
    write_shard(tmp_path / "shards" / "b.hdf5", rows=100, seed=1)
    content = MASKED.replace("source: text", f"source: shards, format: masked, tokenizer: {folder / 'pretrained'}")
    (tmp_path / "shards.yaml").write_text(content)
    commands = [["train", "shards.yaml", "--run-dir", "run", "--ranks", "2"], ["train", "shards.yaml", "--shrink"]]
    (trained, small) = run_ranks(call, 1, timeout_s=180, folder=str(tmp_path), commands=commands)[0]
    assert trained[0] == 0, trained
    assert small[0] == 0, small
    (event,) = events(tmp_path / "run", EventKind.EVALUATED)
    assert event["tokens"] > 0
    assert json.loads((tmp_path / "run" / "data.json").read_text())["train"]["records"] > 150


TREE: dict[str, Any] = {"model": {"preset": "bert-tiny"}, "task": {"kind": "masked"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"preset": "llama-3.2-1b"}}, r"task.kind masked needs a BERT, and the model is a llama"),
        ({"task": {"kind": "language"}}, r"a BERT does not support task.kind language"),
        ({"model": {"preset": "bert-tiny", "code": "mine.py"}}, r"model.code requires a causal language model"),
        ({"model": {"preset": "bert-tiny", "sliding_window": 8}}, r"each position of BERT sees all"),
        ({"task": {"kind": "masked", "labels": ["a"]}}, r"task.labels is for task.kind tag and classify"),
        ({"task": {"kind": "tag", "whole_word": True}}, r"task.whole_word is for task.kind masked, but it is tag"),
        ({"task": {"kind": "tag", "labels": ["a", "b", "a"]}}, r"task.labels has a duplicate label"),
        ({"task": {"kind": "masked", "mask_share": 0.0}}, r"task.mask_share must be > 0"),
        ({"data": {"label_key": "x"}}, r"data.label_key is for task.kind classify, but it is masked"),
        ({"data": {"format": "chat", "chat_template": "chatml"}}, r"data.format chat is for task.kind language"),
        ({"data": {"isolate_documents": True}}, r"data.isolate_documents is for task.kind language"),
        ({"data": {"format": "masked"}, "task": {"kind": "tag"}}, r"data.format masked is for task.kind"),
        ({"data": {"format": "masked"}, "task": {"kind": "masked", "whole_word": True}}, r"task.whole_word has n"),
        ({"data": {"seq_len": 4}}, r"data.seq_len is 4, but a BERT sequence needs at least 8"),
        ({"data": {"seq_len": 513}}, r"data.seq_len 513 is longer than the model's 512 positions"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(TREE | changes, "it")


def test_what_auto_stands_for() -> None:
    kinds = {"bert-mini": "masked", "llama-3.2-1b": "language"}
    for preset, kind in kinds.items():
        resolved, chosen = resolve_autos(build_config({"model": {"preset": preset}}, "it"), device="cpu", world=1)
        assert resolved.task.kind == kind
        assert "task.kind" in [key for key, _, _ in chosen]
    small = build_config({"model": {"preset": "bert-mini", "hidden": 48, "heads": 3}, "data": {"too_long": "drop"}}
                  | {"task": {"kind": "tag", "labels": ["a", "b"]}}, "it")  # fmt: skip
    spec = build_model_spec(small)
    assert (spec.head_dim, spec.kv_heads) == (16, 3)
    assert spec.encoder is not None and (spec.encoder.objective, spec.encoder.labels) == ("tags", ("a", "b"))
    own = build_config(
        {"model": {"architecture": "bert", "hidden": 48, "layers": 1, "heads": 3, "vocab_size": 99}}, "it"
    )
    spec = build_model_spec(own)
    assert (spec.intermediate, spec.norm_eps, spec.tie_embeddings) == (192, 1e-12, True)
    assert spec.encoder is not None and spec.encoder.segment_kinds == 2
