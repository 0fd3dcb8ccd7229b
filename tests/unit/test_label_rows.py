"""Tagged sentences and labelled texts: how they are read, made into rows, and scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from torch import nn

from phalanx.config.model import DataSection
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, DataError
from phalanx.data.bert_rows import LabelledRows, LabelledSample, LabelRowOptions, order_labels
from phalanx.data.prepare import PreparedData, prepare, prepare_for
from phalanx.data.record_files import RecordFile
from phalanx.data.tokenizer import load_tokenizer
from phalanx.tasks.labels import IGNORE_INDEX, SequenceClassificationTask, TokenClassificationTask, find_entities
from tests.helpers import ALL

SENTENCES = [
    (["Ada", "Lovelace", "met", "Babbage", "in", "London", "."], ["B-PER", "I-PER", "O", "B-PER", "O", "B-LOC", "O"]),
    (["He", "wrote", "in", "Turin", "."], ["O", "O", "O", "B-LOC", "O"]),
    (["Unbelievable", "!"], ["O", "O"]),
]
NAMES = ["O", "B-LOC", "B-PER", "I-PER"]


def conll(sentences: list[tuple[list[str], list[str]]]) -> str:
    text = "-DOCSTART- -X- O\n\n"
    for words, tags in sentences:
        text += "".join(f"{word}\tNN {tag}\n" for word, tag in zip(words, tags, strict=True)) + "\n"
    return text


def data(tmp_path: Path, source: str | Path, **keys: Any) -> DataSection:
    keys = {"tokenizer": "train", "tokenizer_vocab": 300, "held_out": 0.0, "cache": str(tmp_path / "cache")} | keys
    return DataSection.model_validate({"source": [str(source)], **keys})


def records_of(prepared: PreparedData) -> list[dict[str, list[int]]]:
    columns = RecordFile(prepared.train[0][0])
    return [{name: values.tolist() for name, values in columns.record(n).items()} for n in range(columns.count)]


def decoded(prepared: PreparedData, sentences: list[dict[str, list[int]]]) -> list[tuple[list[str], list[str]]]:
    """Words and tags, from the columns."""
    backend = load_tokenizer(prepared.tokenizer_folder).backend
    names = RecordFile(prepared.train[0][0]).facts["labels"]
    found = []
    for record in sentences:
        starts = [place for place, label in enumerate(record["labels"]) if label >= 0]
        pieces = [record["tokens"][a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        words = ["".join(backend.id_to_token(id).removeprefix("##") for id in word) for word in pieces]
        found.append((words, [names[record["labels"][place]] for place in starts]))
    return found


# ------------------------------------------------------------------------------------------------------------- reading


def test_conll_records_and_parquet_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text(conll(SENTENCES))
    lines = [{"tokens": words, "ner_tags": tags} for words, tags in SENTENCES]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "a.json").write_text(json.dumps(lines))
    numbered = [{"tokens": words, "ner_tags": [NAMES.index(tag) for tag in tags]} for words, tags in SENTENCES]
    features = {"ner_tags": {"feature": {"names": NAMES, "_type": "ClassLabel"}, "_type": "List"}}
    described = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(pa.Table.from_pylist(numbered).replace_schema_metadata(described), tmp_path / "a.parquet")
    found = []
    for name in ("a.conll", "a.jsonl", "a.json", "a.parquet"):
        prepared = prepare(data(tmp_path, tmp_path / name), kind="tag")
        found.append(decoded(prepared, records_of(prepared)))
    assert found == [[(words, tags) for words, tags in SENTENCES]] * 4


@pytest.mark.parametrize("saved", [False, True])
def test_datasets_of_a_folder_are_read(saved: bool, tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(datasets.ClassLabel(names=NAMES))}
    )
    rows = [{"tokens": words, "ner_tags": [NAMES.index(tag) for tag in tags]} for words, tags in SENTENCES]
    dataset = datasets.Dataset.from_list(rows, features=features)
    folder = tmp_path / "set"
    if saved:
        datasets.DatasetDict({"train": dataset}).save_to_disk(folder)
    else:
        folder.mkdir()
        dataset.to_parquet(folder / "train.parquet")
    prepared = prepare(data(tmp_path, f"hub:{folder}"), kind="tag")
    assert decoded(prepared, records_of(prepared)) == [(words, tags) for words, tags in SENTENCES]
    if saved:
        with pytest.raises(DataError, match=r"is not a complete dataset of the datasets library"):
            prepare(data(tmp_path, f"hub:{folder}::test"), kind="tag")


def test_texts_with_labels_are_read(tmp_path: Path) -> None:
    texts = [("good", "fine, really", "yes"), ('bad "luck"', "no\nend", "no")]
    (tmp_path / "a.csv").write_text("text,other,label\n" + 'good,"fine, really",yes\n"bad ""luck""","no\nend",no\n')
    (tmp_path / "a.tsv").write_text("label\ttext\nyes\tgood\nno\tbad\n")
    lines = [{"text": a, "other": b, "label": c} for a, b, c in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.jsonl").write_text('{"text": "good", "label": 10}\n{"text": "bad", "label": 9}\n')
    pairs = [
        records_of(prepare(data(tmp_path, tmp_path / name, pair_key="other"), kind="classify"))
        for name in ("a.csv", "a.jsonl")
    ]
    assert pairs[0] == pairs[1]
    assert [record["labels"] for record in pairs[0]] == [[0], [1]]
    assert all(record["tokens"] and record["pair"] for record in pairs[0])
    for name, labels in (("a.tsv", ["yes", "no"]), ("b.jsonl", ["10", "9"])):
        prepared = prepare(data(tmp_path, tmp_path / name), kind="classify")
        assert [record["pair"] for record in records_of(prepared)] == [[], []]
        assert RecordFile(prepared.train[0][0]).facts["labels"] == labels
    assert order_labels(["10", "9"]) == ["9", "10"]
    assert order_labels(["B-X", "O", "I-X", "B-A"]) == ["O", "B-A", "B-X", "I-X"]
    assert order_labels(["b", "a"], ["b", "c", "a"]) == ["b", "c", "a"]
    assert order_labels(["b", "d"], ["b", "c", "a"]) == ["b", "d"]


BAD = [
    ("tag", "a.conll", "word O\nlonely\n", r"a\.conll, line 2 has a word without a tag"),
    ("tag", "a.conll", "word NN O\nother O\n", r"line 2 has 2 columns but the lines before have 3"),
    ("tag", "a.conll", "\n\n", r"leaves no record to train on"),
    ("tag", "a.jsonl", '{"tokens": ["a"], "ner_tags": ["O", "O"]}\n', r"line 1 has 1 words .* and 2 tags"),
    ("tag", "a.jsonl", '{"tokens": "a", "ner_tags": ["O"]}\n', r"a str under 'tokens' instead of a list; set data.tok"),
    ("tag", "a.jsonl", '{"words": ["a"], "ner_tags": ["O"]}\n', r"has no key 'tokens' .* set data.tokens_key"),
    ("tag", "a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n', r"has no key 'ner_tags' .* set data.tags_key"),
    ("tag", "a.jsonl", '{"tokens": [1], "ner_tags": ["O"]}\n', r"a word under 'tokens' that is not text"),
    ("tag", "a.jsonl", '{"tokens": ["a"], "ner_tags": [1.5]}\n', r"has 1.5 under 'ner_tags', which is not a label"),
    ("classify", "a.txt", "just text", r"is running text, but task.kind classify needs a label"),
    ("classify", "a.csv", "text,class\na,b\n", r"has no column 'label' \(it has: text, class\); set data.label_key"),
    ("classify", "a.csv", "text,label\na\n", r"line 2 does not have the 2 columns of the first line"),
    ("classify", "a.csv", "text,label\na,b,c\n", r"line 2 does not have the 2 columns"),
    ("classify", "a.csv", 'text,label\n"a,b\n', r"is not a table row"),
    ("classify", "a.jsonl", '{"text": ["a"], "label": 1}\n', r"a list under 'text' instead of text; set data.text_key"),
    ("classify", "a.jsonl", '{"text": "a", "label": null}\n', r"has null under 'label', which is not a label"),
    ("classify", "a.jsonl", '{"text": "\\ud800", "label": 1}\n', r"an unpaired surrogate"),
    ("classify", "a.hdf5", "x", r"is masked shards, but labelled records are needed"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), BAD)
def test_bad_files_are_a_sentence(kind: str, name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        prepare(data(tmp_path, tmp_path / name), kind=kind)


def test_a_wrong_number_of_a_named_label_is_a_sentence(tmp_path: Path) -> None:
    features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    table = pa.Table.from_pylist([{"text": "a", "label": 1}, {"text": "b", "label": 2}])
    described = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(described), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 2 has the number 2 under 'label', but there are 2 labels"):
        prepare(data(tmp_path, tmp_path / "a.parquet"), kind="classify")


def test_sides_are_chosen_by_what_a_record_says(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {number}", "label": number % 3}) + "\n" for number in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(lines[::-1]))
    sides = []
    for name in ("a.jsonl", "b.jsonl"):
        prepared = prepare(data(tmp_path, tmp_path / name, held_out=0.2), kind="classify")
        held_out = RecordFile(prepared.held_out["held_out"])
        assert 30 < held_out.count < 90
        assert RecordFile(prepared.train[0][0]).count == 300 - held_out.count
        backend = load_tokenizer(prepared.tokenizer_folder).backend
        sides.append({backend.decode(held_out.record(n)["tokens"].tolist()) for n in range(held_out.count)})
    assert sides[0] == sides[1]


def test_a_mixture_keeps_labels_apart(tmp_path: Path) -> None:
    for name, labels in (("a", ["x", "y"]), ("b", ["z", "x"])):
        lines = [json.dumps({"text": f"{name} {n}", "label": labels[n % 2]}) + "\n" for n in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("a", 3), ("b", 1))]
    config = Config.model_validate(
        {"model": {"preset": "bert-tiny"}, "task": {"kind": "classify"},
         "data": {"source": sources, "tokenizer": "train", "tokenizer_vocab": 300, "held_out": 0.3,
                  "cache": str(tmp_path / "cache")}}
    )  # fmt: skip
    prepared = prepare_for(config)
    assert [weight for _, weight in prepared.train] == [3.0, 1.0]
    assert [RecordFile(folder).facts["labels"] for folder, _ in prepared.train] == [["x", "y"], ["z", "x"]]
    both = RecordFile(prepared.held_out["held_out"])
    backend = load_tokenizer(prepared.tokenizer_folder).backend
    for number in range(both.count):
        record = both.record(number)
        name, n = backend.decode(record["tokens"].tolist()).replace("##", "").replace(" ", "")[0], record["labels"][0]
        assert both.facts["labels"][n] in {"a": ["x", "y"], "b": ["z", "x"]}[name]


# ---------------------------------------------------------------------------------------------------------------- rows


def rows(tmp_path: Path, kind: str, content: str, name: str, seq_len: int, drop: bool = False) -> LabelledRows:
    (tmp_path / name).write_text(content)
    keys = {"pair_key": "pair"} if '"pair"' in content else {}
    prepared = prepare(data(tmp_path, tmp_path / name, **keys), kind=kind)
    columns = RecordFile(prepared.train[0][0])
    return LabelledRows(columns, LabelRowOptions(seq_len, tuple(order_labels(columns.facts["labels"])), drop))


def test_a_long_sentence_is_cut_or_left_out(tmp_path: Path) -> None:
    long = (["word"] * 30, ["O"] * 15 + ["B-A"] * 15)
    content = conll([*SENTENCES, long])
    cut = rows(tmp_path, "tag", content, "a.conll", 24)
    assert (cut.count, cut.too_long) == (4, 2) or cut.count == 4
    assert "cut" in cut.warnings()[0]
    sample = cut.sample(3, 9)
    assert len(sample.tokens) == len(sample.labels) == len(sample.segments) == 24
    assert sample.labels[0] == sample.labels[-1] == IGNORE_INDEX
    left = rows(tmp_path, "tag", content, "a.conll", 24, drop=True)
    assert left.count == cut.count - cut.too_long
    assert "left out" in left.warnings()[0]
    whole = rows(tmp_path, "tag", content, "a.conll", 200)
    assert whole.warnings() == []
    assert int((whole.sample(3, 0).labels != IGNORE_INDEX).sum()) == 30


def test_of_a_pair_the_longer_text_is_cut_first(tmp_path: Path) -> None:
    lines = [("a " * 5, "b " * 30), ("a " * 30, "b " * 5), ("a " * 30, "b " * 30), ("a " * 3, "b " * 4), ("a " * 3, "")]
    content = "".join(json.dumps({"text": a, "pair": b, "label": i % 2}) + "\n" for i, (a, b) in enumerate(lines))
    made = rows(tmp_path, "classify", content, "a.jsonl", 23)
    shapes = []
    for number in range(5):
        sample = made.sample(number, 0)
        second = int(sample.segments.sum())
        shapes.append((len(sample.tokens) - second - 2, max(0, second - 1)))
        assert len(sample.tokens) <= 23
        assert sample.labels.tolist() == [number % 2]
    assert shapes == [(5, 15), (15, 5), (10, 10), (3, 4), (3, 0)]


def test_labels_have_the_numbers_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good", "label": "yes"}\n{"text": "bad", "label": "no"}\n')
    columns = RecordFile(prepare(data(tmp_path, tmp_path / "a.jsonl"), kind="classify").train[0][0])
    found = LabelledRows(columns, LabelRowOptions(16, ("maybe", "no", "yes")))
    assert [int(found.sample(number, 0).labels[0]) for number in range(2)] == [2, 1]
    with pytest.raises(ConfigError, match=r"has the label 'yes', which is not in task.labels \(no, maybe\)"):
        LabelledRows(columns, LabelRowOptions(16, ("no", "maybe")))


# -------------------------------------------------------------------------------------------------------------- scores

TAGS = ["O", "B-A", "I-A", "B-BB", "I-BB", "E-A", "S-A", "E-BB", "S-BB"]
SENTENCE = st.lists(st.sampled_from(TAGS), min_size=1, max_size=12)


@settings(max_examples=300 if ALL else 60, deadline=None)
@given(pairs=st.lists(st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1), min_size=1))
@pytest.mark.filterwarnings("ignore")
def test_scores_are_seqevals(pairs: list[list[tuple[str, str]]]) -> None:
    from seqeval import metrics  # with scikit-learn, which takes a second

    truth = [[one for one, _ in sentence] for sentence in pairs]
    told = [[other for _, other in sentence] for sentence in pairs]
    task = TokenClassificationTask(64, tuple(TAGS))
    there, claimed = find_entities(truth), find_entities(told)
    words = [(one, other) for sentence in pairs for one, other in sentence]
    counts = {
        "words": len(words),
        "words right": sum(one == other for one, other in words),
        "entities": len(there),
        "entities found": len(claimed),
        "entities right": len(there & claimed),
    }
    scores = task.scores({name: float(value) for name, value in counts.items()})
    assert scores["f1"] == pytest.approx(metrics.f1_score(truth, told, zero_division=0))
    assert scores["precision"] == pytest.approx(metrics.precision_score(truth, told, zero_division=0))
    assert scores["recall"] == pytest.approx(metrics.recall_score(truth, told, zero_division=0))
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(truth, told))


class Told(nn.Module):
    """A model that says what it is told."""

    def __init__(self, answers: torch.Tensor, classes: int) -> None:
        super().__init__()
        self.logits = nn.functional.one_hot(answers, classes).float()

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.logits


def sample(tokens: int, labels: list[int], position: int) -> LabelledSample:
    ones = np.ones(tokens, np.int64)
    return LabelledSample(ones, ones * 0, np.array(labels, np.int64), position)


def test_words_are_counted_where_a_word_begins() -> None:
    task = TokenClassificationTask(16, ("O", "B-A", "I-A"))
    batch = task.collate([sample(6, [-100, 1, -100, 2, 0, -100], 4), sample(3, [-100, 1, -100], 5)])
    assert batch.weight == 4
    assert batch.samples.tolist() == [4, 5]
    answers = torch.tensor([[0, 1, 1, 2, 1, 1], [0, 2, 0, 0, 0, 0]])
    answers = nn.functional.pad(answers, (0, batch.inputs["tokens"].shape[1] - 6))
    counts = {name: float(value) for name, value in task.counts(Told(answers, 3), batch).items()}
    assert counts == {"words": 4, "words right": 2, "entities": 2, "entities found": 3, "entities right": 2}
    empty = task.collate([])
    assert empty.weight == 0
    told = Told(torch.ones(empty.inputs["tokens"].shape, dtype=torch.int64), 3)
    assert all(float(value) == 0 for value in task.counts(told, empty).values())
    assert TokenClassificationTask(16, ("NOUN", "VERB")).scores({"words": 4.0, "words right": 3.0}) == {
        "accuracy": 0.75
    }


@settings(max_examples=50, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_the_mean_f1_is_that_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    from sklearn.metrics import f1_score

    task = SequenceClassificationTask(16, ("a", "b", "c", "d"))
    truth, told = [one for one, _ in pairs], [other for _, other in pairs]
    batch = task.collate([sample(3, [one], place) for place, one in enumerate(truth)])
    counts = {name: float(value) for name, value in task.counts(Told(torch.tensor(told), 4), batch).items()}
    scores = task.scores(counts)
    assert scores["macro_f1"] == pytest.approx(f1_score(truth, told, average="macro"))
    assert scores["accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    empty = task.collate([])
    assert empty.weight == 0
    assert sum(float(value) for value in task.counts(Told(torch.tensor([2]), 4), empty).values()) == 0
