"""Rows: whole documents packed full, windows that know where documents end, and nothing that crosses a border."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.load import build_config
from phalanx.core.errors import ConfigError, DataError
from phalanx.data.loader import Loader
from phalanx.data.packing import PackedRows, PackingOptions, TextWindows, make_rows, pack_documents
from phalanx.data.record_files import TokenFile
from phalanx.layout.balance import Division
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import parameter_shapes
from phalanx.models.llama import Llama, init_slice
from phalanx.tasks.language import CausalLMTask
from tests.token_sets import TokenWriter

EOS = 1
VOCAB = 50


def write(folder: Path, lengths: list[int], masked: bool = True) -> TokenFile:
    """Documents of these lengths (EOS included) of random tokens, of which a random half is learnt."""
    generator = np.random.default_rng(len(lengths))
    writer = TokenWriter(folder, VOCAB, EOS, "key")
    for length in lengths:
        tokens = np.append(generator.integers(2, VOCAB, length - 1), EOS)
        writer.extend(tokens, np.array([length]), generator.random(length) < 0.5 if masked else None)
    writer.finish()
    return TokenFile(folder)


def best_fit_decreasing(lengths: list[int], room: int) -> Counter[int]:
    """The plain twin: one document after the other. How many rows hold how much; which of equal rows takes a document
    makes no difference to that."""
    rows: list[list[int]] = []
    for length in sorted((length for length in lengths if length), reverse=True):
        fitting = [row for row in rows if sum(row) + length <= room]
        if fitting:
            min(fitting, key=lambda row: room - sum(row)).append(length)
        else:
            rows.append([length])
    return Counter(sum(row) for row in rows)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(0, room), max_size=60))))
def test_packing_is_best_fit_decreasing(case: tuple[int, list[int]]) -> None:
    room, lengths = case
    documents, first = pack_documents(np.array(lengths, np.int64), room, seed=3)
    assert sorted(documents.tolist()) == [number for number, length in enumerate(lengths) if length]
    rows = [sum(lengths[d] for d in documents[start:stop]) for start, stop in itertools.pairwise(first)]
    assert Counter(rows) == best_fit_decreasing(lengths, room)


def test_the_seed_says_which_of_equal_documents_lie_together() -> None:
    lengths = np.array([4, 3, 3, 4, 7, 3, 4] * 20)
    one, again, other = (pack_documents(lengths, 10, seed)[0].tolist() for seed in (1, 1, 2))
    assert one == again != other
    assert lengths[one].tolist() == lengths[other].tolist()


def test_many_documents_are_packed_nearly_full() -> None:
    # So many that a walk over each would be felt; the benchmark measures it.
    lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 1.0, 200_000).astype(np.int64), 1, 1025)
    _, first = pack_documents(lengths, 1025, seed=0)
    assert lengths.sum() > 0.995 * 1025 * (len(first) - 1)


@pytest.mark.parametrize("drop_long", [False, True])
def test_a_row_is_whole_documents_and_padding(tmp_path: Path, drop_long: bool) -> None:
    lengths = [3, 9, 4, 30, 1, 8, 2, 9, 12]
    file = write(tmp_path / "set", lengths)
    rows = PackedRows(file, PackingOptions(8, packed=True, drop_long=drop_long), seed=0)
    assert rows.too_long == 2
    seen = []
    for number in range(rows.count):
        row = rows.sample(number, 0)
        assert row.tokens.shape == (9,)
        assert row.learnt is not None
        assert row.lengths is not None
        assert row.learnt.shape == (8,)
        assert row.lengths.sum() == 8
        at = 0
        ends = np.cumsum(row.lengths)
        while at < 9:
            found = [d for d in range(file.documents) if row.tokens[at:].tolist()[: min(9, lengths[d])]
                     == file.document(d).tolist()[:9] and d not in seen]  # fmt: skip
            if not found:
                break
            document, size = found[0], min(9, lengths[found[0]])
            seen.append(document)
            start = int(file.index[document])
            # The label of a document's last token would be another document's: it is not learnt.
            expected = file.mask(start, start + size)[1:].tolist() + [False]
            assert row.learnt[at : at + size].tolist() == expected[: 8 - at]
            assert min(8, at + size) in ends
            at += size
        assert (row.tokens[at:] == EOS).all()
        assert not row.learnt[at:].any()
    left_out = [3, 8] if drop_long else []
    assert sorted(seen) == [number for number in range(len(lengths)) if number not in left_out]
    kept = sum(min(9, length) for number, length in enumerate(lengths) if number not in left_out)
    assert rows.filled == pytest.approx(kept / (9 * rows.count))


def test_a_row_that_its_documents_fill_but_for_a_last_label_has_no_padding_to_attend_to(tmp_path: Path) -> None:
    file = write(tmp_path / "set", [5, 3], masked=False)
    row = PackedRows(file, PackingOptions(8, packed=True), seed=0).sample(0, 0)
    assert row.lengths is not None
    assert row.learnt is not None
    assert sorted(row.lengths.tolist()) == [3, 5]
    assert row.learnt.sum() == 6  # of each document all but its first token, and nothing of what fills the row
    assert not row.learnt[-1]


def test_documents_that_no_row_holds_are_told(tmp_path: Path) -> None:
    file = write(tmp_path / "set", [3, 30, 40])
    for drop, done in ((False, "cut"), (True, "left out")):
        [said] = make_rows(file, PackingOptions(8, packed=True, drop_long=drop), 0).warnings()
        assert said.startswith(f"2 of 3 documents are longer than data.seq_len 8 and are {done} (data.too_long)")
    assert not make_rows(file, PackingOptions(39, packed=True), 0).warnings()
    assert not make_rows(file, PackingOptions(8), 0).warnings()


def test_too_few_rows_are_named_with_their_documents(tmp_path: Path) -> None:
    file = write(tmp_path / "set", [3, 5])
    with pytest.raises(
        DataError, match="8 tokens in 2 documents, which make 1 sequences of 8, fewer than one global b"
    ):
        Loader([(make_rows(file, PackingOptions(8, packed=True), 0), 1.0)], 2, 0, 0)


def test_windows_know_their_documents_where_they_are_asked(tmp_path: Path) -> None:
    file = write(tmp_path / "set", [3, 5, 4, 9, 4], masked=False)
    plain, isolated = TextWindows(file, PackingOptions(4)), TextWindows(file, PackingOptions(4, isolated=True))
    assert plain.count == isolated.count == 6
    borders = set(file.index.tolist())
    for number in range(6):
        row, other = isolated.sample(number, 0), plain.sample(number, 0)
        assert row.tokens.tolist() == other.tokens.tolist() == file.slice(4 * number, 4 * number + 5).tolist()
        assert other.learnt is other.lengths is None
        assert row.lengths is not None
        assert row.learnt is not None
        starts = [4 * number, *(4 * number + np.cumsum(row.lengths)[:-1]).tolist()]
        assert starts == [s for s in range(4 * number, 4 * number + 4) if s in borders or s == 4 * number]
        assert row.lengths.sum() == 4
        assert row.learnt.tolist() == [4 * number + i + 1 not in borders for i in range(4)]


def test_a_packed_row_is_its_documents_one_by_one(tmp_path: Path) -> None:
    spec = ModelSpec(
        vocab_size=VOCAB, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, intermediate=24, max_seq_len=32
    )
    model = Llama(spec).double()
    parameters = dict(model.named_parameters())
    for name, shape in parameter_shapes(spec).items():
        values = init_slice(spec, 0, name, 0, parameters[name].numel(), "cpu", torch.float64)
        parameters[name].data.copy_(50 * values.view(shape) if "norm" not in name else values.view(shape))
    lengths = [5, 8, 11, 2, 3, 20, 7, 33, 40]
    file = write(tmp_path / "set", lengths)
    loader = Loader([(make_rows(file, PackingOptions(32, packed=True), 0), 1.0)], 4, 0, 0)
    task = CausalLMTask(32, isolated=True)
    [samples] = loader.batches(0, Division((4,), 1))
    batch = task.collate(samples)
    together = task.loss_sum(model, batch, None)
    together.backward()
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    model.zero_grad()
    apart, weight = torch.zeros((), dtype=torch.float64), 0
    for document in range(file.documents):
        tokens = torch.from_numpy(file.document(document))[:33]
        learnt = torch.from_numpy(file.mask(int(file.index[document]), int(file.index[document + 1])))[1:33]
        labels = torch.where(learnt, tokens[1:], -100)
        weight += int(learnt.sum())
        apart = apart + model(tokens[None, :-1], labels[None])
    apart.backward()
    assert weight == batch.weight > 0
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=0)
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_the_end_of_a_document_may_be_masked_and_attended_across(tmp_path: Path) -> None:
    """As Megatron's --eod-mask-loss: no loss where the input is the end-of-text token."""
    token_file = write(tmp_path / "set", [3, 5, 4, 9, 4], masked=False)
    masked = TextWindows(token_file, PackingOptions(4, mask_end=True))
    isolated = TextWindows(token_file, PackingOptions(4, isolated=True))
    assert masked.count > 3
    ends = 0
    for number in range(masked.count):
        row = masked.sample(number, number)
        assert row.learnt is not None
        assert row.lengths is None
        np.testing.assert_array_equal(row.learnt, isolated.sample(number, number).learnt)
        np.testing.assert_array_equal(row.learnt, row.tokens[:-1] != EOS)
        ends += int((~row.learnt).sum())
    batch = CausalLMTask(4).collate([masked.sample(number, number) for number in range(masked.count)])
    assert ends > 0
    assert batch.weight == 4 * masked.count - ends
    assert batch.inputs.keys() == {"tokens", "labels"}


@pytest.mark.parametrize("data", [{"isolate_documents": True}, {"format": "chat"}])
def test_masking_what_is_masked_anyway_is_refused(data: dict[str, object]) -> None:
    tree = {"model": {"preset": "llama-3.2-1b"}, "data": data | {"mask_document_end": True}}
    with pytest.raises(ConfigError, match=r"data.mask_document_end has no effect with data\."):
        build_config(tree, "here")
