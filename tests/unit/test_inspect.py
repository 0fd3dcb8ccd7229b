"""What `phalanx data inspect` finds in token sets, and how it shows it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.config.model import DataSection
from phalanx.core.errors import ConfigError
from phalanx.data.inspect import compute_stats, find_token_sets
from phalanx.data.packing import PackingOptions
from phalanx.data.prepare import prepare
from phalanx.data.record_files import TokenFile
from phalanx.data.tokenizer import load_tokenizer, train_tokenizer
from phalanx.report import tables
from phalanx.report.logs import open_terminal
from tests.token_sets import TokenWriter


def masked_set(folder: Path, tokenizer: Path) -> TokenFile:
    """Documents "ask i" + "say i" + EOS of which the last two parts are learnt."""
    opened = load_tokenizer(tokenizer)
    writer = TokenWriter(folder, opened.vocab_size, opened.eos_id, "test")
    for i in range(10):
        ask, say = (opened.backend.encode(text).ids for text in (f"ask [{i}] ", f"say {i}" * (i + 1)))
        ids = [*ask, *say, opened.eos_id]
        writer.extend(np.array(ids), np.array([len(ids)]), np.arange(len(ids)) >= len(ask))
    writer.finish()
    return TokenFile(folder)


def test_counts_lengths_and_samples(tmp_path: Path) -> None:
    train_tokenizer(["ask say"], 260, tmp_path / "tokenizer")
    file = masked_set(tmp_path / "set", tmp_path / "tokenizer")
    found = compute_stats("chat", tmp_path / "set", tmp_path / "tokenizer", PackingOptions(30, packed=True), samples=2)
    lengths = [len(file.document(i)) for i in range(10)]
    assert (found.documents, found.tokens) == (10, sum(lengths))
    assert (found.mean, found.median) == (np.mean(lengths), np.median(lengths))
    assert (found.longest, found.p95) == (max(lengths), np.percentile(lengths, 95))
    assert sum(count for _, _, count in found.lengths) == 10
    for low, high, count in found.lengths:
        assert count == sum(low <= length <= high for length in lengths)
    everything = file.slice(0, file.tokens)
    assert found.used == len(set(everything.tolist())) < found.vocab_size
    assert found.learnt == file.mask(0, file.tokens).sum()
    assert found.too_long == sum(length > 31 for length in lengths) > 0
    assert found.rows is not None
    assert found.filled == pytest.approx(sum(min(length, 31) for length in lengths) / (found.rows * 31))
    assert [number for number, _ in found.samples] == [2, 7]
    assert found.samples[0][1] == [("ask [2] ", False), ("say 2" * 3 + "<|endoftext|>", True)]
    stream = io.StringIO()
    tables.print_datasets(open_terminal(stream, width=100), [found])
    shown = stream.getvalue()
    assert f"{found.tokens:,}" in shown
    assert f"{found.learnt:,} ({found.learnt / found.tokens:.1%})" in shown
    assert "ask [2] ⟦say 2say 2say 2<|endoftext|>⟧" in shown
    assert f"{found.rows:,}, {found.filled:.1%} full" in shown


def test_an_empty_set_and_one_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello [bold] world")
    made = prepare(DataSection(source=[str(tmp_path / "a.txt")], tokenizer="train", tokenizer_vocab=257, held_out=0.0,
                               cache=str(tmp_path / "c")))  # fmt: skip
    sets, tokenizer = find_token_sets(made.train[0][0].parent)
    assert sets == {"train": made.train[0][0], "held_out": made.held_out["held_out"]}
    assert tokenizer == made.tokenizer_folder
    assert find_token_sets(made.train[0][0]) == ({"train": made.train[0][0]}, tokenizer)
    found = [compute_stats(name, folder, tokenizer, None, 3) for name, folder in sets.items()]
    assert [one.documents for one in found] == [1, 0]
    assert found[0].learnt is found[0].rows is None
    stream = io.StringIO()
    tables.print_datasets(open_terminal(stream, width=100), found)
    shown = stream.getvalue()
    assert "hello [bold] world<|endoftext|>" in shown
    assert "learnt" not in shown
    assert "packed" not in shown
    with pytest.raises(ConfigError, match="neither a token set nor a recipe"):
        find_token_sets(tmp_path)


def test_a_set_whose_tokenizer_is_gone_shows_no_samples(tmp_path: Path) -> None:
    train_tokenizer(["ask say"], 260, tmp_path / "tokenizer")
    masked_set(tmp_path / "both" / "train", tmp_path / "tokenizer")
    assert find_token_sets(tmp_path / "both" / "train") == ({"train": tmp_path / "both" / "train"}, None)
    (tmp_path / "both" / "prepared.json").write_text(json.dumps({"tokenizer": "../gone"}))
    assert find_token_sets(tmp_path / "both")[1] is None
    assert compute_stats("train", tmp_path / "both" / "train", None, None, 2).samples == []
