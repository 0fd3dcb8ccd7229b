"""What is masked, and what follows what: by the seed and the sample's place alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError, DataError
from phalanx.data.bert_rows import (
    IGNORE_INDEX,
    MaskedPairs,
    MaskedSample,
    MaskedWindows,
    MaskingOptions,
    MaskingVocabulary,
    make_masked_rows,
    mask_tokens,
)
from phalanx.data.record_files import TokenFile
from phalanx.data.wordpiece import SpecialTokens
from tests.token_sets import TokenWriter

PAD, UNK, CLS, SEP, MASK = range(5)
VOCAB = 50
CONTINUING = tuple(range(40, VOCAB))
SPECIALS = SpecialTokens(PAD, UNK, CLS, SEP, MASK, CONTINUING)
VOCABULARY = MaskingVocabulary(SPECIALS, VOCAB)


def write(folder: Path, lengths: list[int], specials: SpecialTokens | None = SPECIALS) -> TokenFile:
    """Documents whose tokens say which they are: document d consists of 5 + d."""
    writer = TokenWriter(folder, 5 + max(len(lengths), VOCAB), SEP, "key", specials)
    for number, length in enumerate(lengths):
        writer.append(np.full(length, 5 + number))
    writer.finish()
    return TokenFile(folder)


def unmasked(sample: MaskedSample) -> list[int]:
    tokens = sample.tokens.copy()
    tokens[sample.places] = sample.labels
    return tokens.tolist()


# ------------------------------------------------------------------------------------------------------------ masking


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=60),
    whole=st.booleans(),
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 99),
    position=st.integers(0, 2**40),
)
def test_masks_keep_to_their_rules(text: list[int], whole: bool, share: float, seed: int, position: int) -> None:
    form = MaskingOptions(64, share, whole_words=whole)
    before = np.array([CLS, *text, SEP], np.int64)
    tokens = before.copy()
    places, labels = mask_tokens(tokens, VOCABULARY, form, seed, position)
    assert (np.diff(places) > 0).all()
    assert (labels == before[places]).all()
    assert not set(labels.tolist()) & {CLS, SEP, PAD}
    others = np.setdiff1d(np.arange(len(tokens)), places)
    assert (tokens[others] == before[others]).all()
    candidates = int((~np.isin(before, [CLS, SEP, PAD])).sum())
    wanted = min(form.max_predicted, max(1, int(len(tokens) * share + 0.5)), candidates)
    assert len(places) <= wanted
    assert len(places) == wanted or whole
    if whole:
        masked = set(places.tolist())
        for place, token in enumerate(before.tolist()):
            if token in CONTINUING and before[place - 1] not in (CLS, SEP, PAD):
                assert (place in masked) == (place - 1 in masked), "a word is masked as a whole"
    again = before.copy()
    assert (mask_tokens(again, VOCABULARY, form, seed, position)[0] == places).all()
    assert (again == tokens).all()


def test_eight_of_ten_are_masked_one_is_any_token_and_one_stays() -> None:
    text = np.full(66, 7, np.int64)
    text[0], text[-1] = CLS, SEP
    kinds = np.zeros(3)
    places_seen = np.zeros(66)
    any_token = set()
    for position in range(2000):
        tokens = text.copy()
        places, _ = mask_tokens(tokens, VOCABULARY, MaskingOptions(66, 0.15), 3, position)
        found = tokens[places]
        kinds += [(found == MASK).sum(), ((found != MASK) & (found != 7)).sum(), (found == 7).sum()]
        any_token |= set(found.tolist())
        places_seen[places] += 1
    shares = kinds / kinds.sum()
    assert np.abs(shares - [0.8 + 0.1 / VOCAB, 0.1 * (VOCAB - 2) / VOCAB, 0.1 + 0.1 / VOCAB]).max() < 0.01
    assert any_token == set(range(VOCAB))
    inside = places_seen[1:-1] / 2000
    assert places_seen[0] == places_seen[-1] == 0
    assert np.abs(inside - 10 / 64).max() < 0.03, "no place is favoured"


# --------------------------------------------------------------------------------------------------------------- rows


def test_windows_are_the_text_as_it_runs(tmp_path: Path) -> None:
    file = write(tmp_path / "set", [10, 20, 3])
    rows = make_masked_rows(file, MaskingOptions(10, 0.15), seed=0)
    assert isinstance(rows, MaskedWindows)
    assert rows.count == 36 // 8
    running = file.slice(0, file.tokens).tolist()
    for number in range(rows.count):
        sample = rows.sample(number, 100 + number)
        assert unmasked(sample) == [CLS, *running[8 * number : 8 * number + 8], SEP]
        assert not sample.segments.any()
        assert (sample.follows, sample.position) == (IGNORE_INDEX, 100 + number)
    drawn = [rows.sample(0, position).places.tolist() for position in range(20)]
    assert len({tuple(one) for one in drawn}) > 3, "every epoch masks anew"
    assert [rows.sample(0, position).places.tolist() for position in range(20)] == drawn
    other = make_masked_rows(file, MaskingOptions(10, 0.15), seed=1)
    assert [other.sample(0, position).places.tolist() for position in range(20)] != drawn


def test_half_of_the_pairs_follow_one_another(tmp_path: Path) -> None:
    lengths = [40, 1, 25, 12, 0, 60, 13]
    rows = make_masked_rows(write(tmp_path / "set", lengths), MaskingOptions(15, 0.15, pairs=True), seed=0)
    assert isinstance(rows, MaskedPairs)
    # Of 12 tokens each; a rest of one is left out.
    assert rows.count == 4 + 0 + 2 + 1 + 0 + 5 + 1
    used = [document for document, length in enumerate(lengths) if length >= 2]
    follows = []
    for position in range(400):
        sample = rows.sample(position % rows.count, position)
        tokens = unmasked(sample)
        middle = tokens.index(SEP)
        first, second = tokens[1:middle], tokens[middle + 1 : -1]
        assert tokens[0] == CLS and tokens[-1] == SEP and len(tokens) <= 15
        assert first and second and len(set(first)) == len(set(second)) == 1
        assert sample.segments.tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert (first[0] != second[0]) == sample.follows
        assert {first[0] - 5, second[0] - 5} <= set(used)
        follows.append(sample.follows)
    assert 150 < sum(follows) < 250
    assert len({tuple(rows.sample(0, position).segments.tolist()) for position in range(30)}) > 5


def test_data_that_cannot_be_masked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks one of the tokens \[PAD\]"):
        make_masked_rows(write(tmp_path / "other", [9], None), MaskingOptions(8, 0.15), 0)
    with pytest.raises(DataError, match=r"one document .* task.next_sentence=false"):
        make_masked_rows(write(tmp_path / "one", [30, 1]), MaskingOptions(8, 0.15, pairs=True), 0)
    alone = make_masked_rows(
        write(tmp_path / "held-out", [30, 1]), MaskingOptions(8, 0.15, pairs=True), 0, held_out=True
    )
    assert {alone.sample(number, number).follows for number in range(alone.count)} == {0}
    assert make_masked_rows(write(tmp_path / "short", [1, 1]), MaskingOptions(8, 0.15, pairs=True), 0).count == 0


def test_a_damaged_set_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "set", [30, 30])
    data = bytearray((tmp_path / "set" / "tokens.bin").read_bytes())
    data[6:8] = b"\xff\xff"
    (tmp_path / "set" / "tokens.bin").write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"outside its vocabulary of 55 near number 0"):
        make_masked_rows(TokenFile(file.folder), MaskingOptions(8, 0.15), 0).sample(0, 0)
