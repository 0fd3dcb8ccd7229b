"""BERT's tokenizers: their special tokens, pieces that continue a word, and how one is trained."""

import collections
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError

# What each special token is called in a tokenizer's files, and how it is spelt where they do not say.
SPECIAL_NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
CONTINUATION_PREFIX = "##"
WORD_START = "\u2581"  # before the first character of a word, while pieces are looked for
MOST_CHARACTERS = 1000  # of a trained alphabet: rarer ones are [UNK]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens, and of all pieces that continue a word."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    continuing: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {name: getattr(self, name) for name in (*SPECIAL_NAMES, "continuing")}

    @staticmethod
    def from_json(content: dict[str, Any]) -> "SpecialTokens":
        """Raises KeyError, TypeError and ValueError for what is none."""
        ids = {name: int(content[name]) for name in SPECIAL_NAMES}
        return SpecialTokens(**ids, continuing=tuple(map(int, content["continuing"])))


def find_specials(folder: Path, backend: Any) -> SpecialTokens | None:
    """The special tokens of an opened tokenizer; None where it lacks one of them, and so is none of BERT's."""
    names = dict(SPECIAL_NAMES)
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name in names:
            token = read_json(folder / file).get(f"{name}_token")
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                names[name] = content
    ids = {name: backend.token_to_id(token) for name, token in names.items()}
    if None in ids.values():
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    continuing = sorted(
        id for token, id in vocabulary.items() if token.startswith(CONTINUATION_PREFIX) and token != CONTINUATION_PREFIX
    )
    return SpecialTokens(**ids, continuing=tuple(continuing))


def read_json(path: Path) -> dict[str, Any]:
    """One of a tokenizer's files; empty where there is none. Raises ConfigError where it is no JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); restore the file") from None
    return content if isinstance(content, dict) else {}


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> tuple[Any, dict[str, str]]:
    """(the tokenizer, its special tokens by their names in Hugging Face's files): a WordPiece that keeps case.

    The same texts in the same order give the same tokenizer. Source: Schuster and Nakajima, "Japanese and Korean Voice
    Search", 2012, as in BERT (Devlin et al. 2018); pieces are found by byte pair encoding, as transformers' are.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    normalizer = normalizers.BertNormalizer(lowercase=False)
    pieces = _pieces([normalizer.normalize_str(text) for text in texts], vocab_size - len(SPECIAL_NAMES))
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_NAMES.values(), *pieces])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_NAMES["unk"]))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    backend.add_special_tokens(list(SPECIAL_NAMES.values()))
    cls, sep = SPECIAL_NAMES["cls"], SPECIAL_NAMES["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )
    return backend, {f"{name}_token": token for name, token in SPECIAL_NAMES.items()}


def _pieces(texts: list[str], most: int) -> list[str]:
    """At most so many pieces of words: every character, at the beginning of a word and within, then those found.

    The library's own trainer of WordPieces numbers characters within words as its hash table has them, so that ties are
    broken differently each time. Here the beginning of a word is a separate character, which avoids that.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    counted = collections.Counter(itertools.chain.from_iterable(texts))
    letters = sorted((letter for letter in counted if not letter.isspace()), key=lambda one: (-counted[one], one))
    alphabet = sorted(letters[: min(MOST_CHARACTERS, most // 3)])
    backend = Tokenizer(models.BPE())
    marked = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), marked])
    trainer = trainers.BpeTrainer(
        vocab_size=most + len(alphabet) + 1,
        initial_alphabet=[*alphabet, WORD_START],
        limit_alphabet=len(alphabet) + 1,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab()
    by_number = sorted(found, key=lambda piece: found[piece])
    named = [
        piece[1:] if piece.startswith(WORD_START) else CONTINUATION_PREFIX + piece
        for piece in by_number
        if piece != WORD_START
    ]
    pieces = dict.fromkeys([*alphabet, *(CONTINUATION_PREFIX + letter for letter in alphabet), *named])
    return list(pieces)[:most]
