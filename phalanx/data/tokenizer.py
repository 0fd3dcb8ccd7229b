"""Tokenizers: train one on a sample, open one of a local Hugging Face folder, and turn many documents into ids fast."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, DataError
from phalanx.core.json_lines import sync_folder
from phalanx.core.run_paths import TOKENIZER_FILES, VOCABULARY_FILES
from phalanx.data import wordpiece
from phalanx.data.read_chunks import (
    CHUNK_BYTES,
    MANY_CHUNKS,
    MAX_CHUNK_BYTES,
    Chunk,
    Meter,
    count_lines_before,
    plan_chunks,
    read_records,
)
from phalanx.data.record_files import token_dtype, write_and_sync
from phalanx.data.records import FileKind, Record, RecordFormat, SourceFile, is_held_out, record_digest, text_digest
from phalanx.data.wordpiece import SpecialTokens

if TYPE_CHECKING:  # which needs pydantic
    from phalanx.config.model import DataSection

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257  # the 256 bytes and the end of text
SEGMENT_CHARS = 1 << 18  # longer documents are cut, so that all cores work on them and memory stays small
# Text handed to one call of the tokenizer: fewer idle cores at its end, more memory (some 100 bytes a token).
ENCODE_CHARS = 1 << 23
WINDOW_CHARS = 256  # text on each side of a cut that must have the same tokens with and without it
CANDIDATES = 16  # places tried for one cut
SAMPLE_BYTES = 8 << 20  # text that a tokenizer is trained on at most; more changes few merges
SAMPLE_CHARS = 1 << 16  # the sample is drawn in chunks of this length, so that one huge document is no exception
SAMPLE_READ = 64  # times its size is read of a source to draw the sample


@dataclass(frozen=True)
class Tokenizer:
    """An opened tokenizer. `vocab_size` is the highest id plus one, which is what a model's table must hold;
    `specials` are BERT's special tokens, if it has them all."""

    backend: Any  # tokenizers.Tokenizer, which is only imported where it is used
    vocab_size: int
    eos_id: int
    specials: SpecialTokens | None = None


# ------------------------------------------------------------------------------------------------------------ training


def train_tokenizer(documents: Iterable[str], vocab_size: int, folder: Path, pieces: bool = False) -> None:
    """Train a byte-level BPE and save it so that AutoTokenizer loads it; `<|endoftext|>` is EOS and BOS. With `pieces`
    it is a WordPiece with BERT's special tokens instead.

    The same documents in the same order give the same files. A small text gives fewer entries than `vocab_size`.
    `folder` appears complete or not at all. Raises ConfigError when `vocab_size` cannot hold all bytes.
    Source: Sennrich et al. 2016 (BPE) on bytes as in GPT-2 (Radford et al. 2019).
    """
    check_vocab(vocab_size)
    backend, special = (wordpiece.train_wordpiece if pieces else _train_byte_bpe)(documents, vocab_size)
    # PreTrainedTokenizerFast is the one name that transformers 4 and 5 both read.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if pieces else {}
    contents = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config | inputs, indent=1),
        "special_tokens_map.json": json.dumps(special, indent=1),
    }
    temporary = folder.with_name(f".{folder.name}.writing")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    for name, text in contents.items():
        write_and_sync(temporary / name, text.encode())
    os.rename(temporary, folder)
    sync_folder(folder.parent)


def _train_byte_bpe(documents: Iterable[str], vocab_size: int) -> tuple[Any, dict[str, str]]:
    """(the tokenizer, its special tokens by their names in Hugging Face's files)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    return backend, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}


def list_sample_sizes() -> list[int]:
    """The sampling rule for text of a source. The size of chunks matters where only some of them are read."""
    return [SAMPLE_BYTES, SAMPLE_CHARS, SAMPLE_READ, CHUNK_BYTES, MAX_CHUNK_BYTES, MANY_CHUNKS]


def sample_for_tokenizer(
    sources: list[tuple[list[SourceFile], float]],
    format: RecordFormat,
    held_out: float,
    progress: Callable[[str, int, int], None],
) -> Iterator[str]:
    """Text of training documents, all of it or a sample of about SAMPLE_BYTES chosen by hash, to which each source of a
    mixture gives its weight's part."""
    weights = sum(weight for _, weight in sources)
    drawn = []
    for files, weight in sources:
        target = SAMPLE_BYTES * weight / weights
        chunks = _draw_chunks(plan_chunks(files, format), int(SAMPLE_READ * target))
        size = sum(chunk.size_bytes for chunk in chunks)
        drawn.append((chunks, min(1.0, target / max(1, size)), size))
    total, done = sum(size for _, _, size in drawn), 0
    for chunks, share, _ in drawn:
        for chunk in chunks:
            progress("tokenizer", done, total)
            for text in _texts(chunk, format, held_out):
                digest = text_digest(text)
                for start in range(0, len(text), SAMPLE_CHARS):
                    if is_held_out(hashlib.sha256(digest + start.to_bytes(8, "big")).digest(), share):
                        yield text[start : start + SAMPLE_CHARS]
            done += chunk.size_bytes
    progress("tokenizer", total, total)


def _draw_chunks(chunks: list[Chunk], limit_bytes: int) -> list[Chunk]:
    """As many chunks, chosen by hash, as hold that much; in their order."""
    if sum(chunk.size_bytes for chunk in chunks) <= limit_bytes:
        return chunks
    shuffled = sorted(range(len(chunks)), key=lambda number: hashlib.sha256(b"%d" % number).digest())
    sizes = itertools.accumulate(chunks[number].size_bytes for number in shuffled)
    enough = next(count for count, size in enumerate(sizes, 1) if size >= limit_bytes)
    return [chunks[number] for number in sorted(shuffled[:enough])]


def _texts(chunk: Chunk, format: RecordFormat, held_out: float) -> Iterator[str]:
    """The texts of a chunk's training documents; of conversations and prompts, each string under their keys; of
    labelled records, their words or texts as one."""
    try:
        for record in read_records(chunk, format, Meter()):
            if not record.empty and not is_held_out(record_digest(record, format.columns()), held_out):
                yield from _strings(record, format)
    except DataError:
        if chunk.kind == FileKind.LINES and chunk.start:  # see encode_chunk
            for record in read_records(chunk, format, Meter(), count_lines_before(chunk, format) + 1):
                record_digest(record, format.columns())
        raise


def _strings(record: Record, format: RecordFormat) -> list[str]:
    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for one in value.values() if isinstance(value, dict) else value:
                yield from inside(one)

    if record.fields is None:
        return [" ".join(record.texts) if record.text is None else record.text]
    return [text for key in format.columns() for text in inside(record.fields[key])]


def check_vocab(vocab_size: int) -> None:
    """Raise ConfigError when a trained tokenizer of this size could not hold every byte."""
    if vocab_size < SMALLEST_VOCAB:
        raise ConfigError(
            f"data.tokenizer_vocab is {vocab_size}, but a byte-level tokenizer needs {SMALLEST_VOCAB} entries for the "
            f"bytes and the "
            f"end of text; set it to {SMALLEST_VOCAB} or more"
        )


# ------------------------------------------------------------------------------------------------------------- opening


def default_tokenizer(from_hf: str | None) -> tuple[str, str]:
    """Resolve `data.tokenizer: auto`, with the reason. Raises ConfigError where the model's folder has none."""
    if not from_hf:
        return "train", "no tokenizer was given"
    if any((Path(from_hf).expanduser() / name).is_file() for name in VOCABULARY_FILES):
        return from_hf, "model.from_hf has one"
    if not Path(from_hf).expanduser().exists():
        raise ConfigError(f"model.from_hf {from_hf} does not exist; give a Hugging Face folder")
    raise ConfigError(
        f"model.from_hf {from_hf} has no tokenizer, and a newly trained one would not match its weights; set "
        "data.tokenizer to the folder of its tokenizer"
    )


def tokenizer_hash(folder: Path) -> str:
    """The sha256 of a tokenizer's files and their names; ConfigError for a folder without a tokenizer."""
    _check_folder(folder)
    digest = hashlib.sha256()
    for name in (*TOKENIZER_FILES, "config.json"):  # the last may name the end of a text
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def _check_folder(folder: Path) -> None:
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        found = (
            "does not exist" if not folder.is_dir() else f"holds no tokenizer (none of {', '.join(VOCABULARY_FILES)})"
        )
        raise ConfigError(f'data.tokenizer is {folder}, which {found}; give a local Hugging Face folder, or "train"')


def load_tokenizer(folder: Path) -> Tokenizer:
    """Open the tokenizer of a local Hugging Face folder; nothing is downloaded.

    Raises ConfigError when it cannot be opened and DataError when no file names its end-of-text token.
    """
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read ({error}); restore the file") from None
    else:
        _check_folder(folder)  # else the library would look for it on the hub
        backend = _load_converted(folder)
    # A folder saved for fine-tuning may say how to cut and pad its inputs; a token file wants neither.
    backend.no_truncation()
    backend.no_padding()
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    specials = wordpiece.find_specials(folder, backend)
    eos_id = _eos_id(folder, backend)
    if eos_id is None and specials is not None:
        eos_id = specials.sep  # BERT's tokenizers name no other
    if eos_id is None or not 0 <= eos_id < vocab_size:
        raise DataError(
            f"the tokenizer in {folder} defines no end-of-text token, so documents cannot be separated; set "
            "eos_token in its tokenizer_config.json"
        )
    return Tokenizer(backend, vocab_size, eos_id, specials)


def predict_vocab_size(data: "DataSection") -> int:
    """Resolve `model.vocab_size: auto`: the tokenizer's size, if the tokenizer exists."""
    folder = Path(data.tokenizer).expanduser()
    if data.tokenizer in ("auto", "train") or not folder.is_dir():
        return data.tokenizer_vocab
    return load_tokenizer(folder).vocab_size


def encode_documents(
    tokenizer: Tokenizer, texts: list[str], group_chars: int | None = None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Encode documents: their ids behind one another, each document followed by EOS; and their lengths with EOS.

    `group_chars`: text handed to the library at once, ENCODE_CHARS if None.

    No special token is added by the tokenizer itself. The ids have the token set's type (uint16 or uint32).
    """
    dtype = token_dtype(tokenizer.vocab_size)
    cuts = [split_segments(tokenizer, text) for text in texts]
    ids: list[NDArray[Any]] = []
    counts: list[NDArray[np.int64]] = []
    for group in _groups(itertools.chain.from_iterable(cuts), group_chars or ENCODE_CHARS):
        # The fast variant leaves out character offsets, which are not needed here.
        encodings = tokenizer.backend.encode_batch_fast(group, add_special_tokens=False)
        sizes = np.fromiter(map(len, encodings), np.int64, len(encodings))
        flat = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        ids.append(np.fromiter(flat, dtype, int(sizes.sum())))
        counts.append(sizes)
    if not texts:
        return np.empty(0, dtype), np.empty(0, np.int64)
    first_segment = np.cumsum([0, *map(len, cuts[:-1])])
    lengths = np.add.reduceat(np.concatenate(counts), first_segment)
    return np.insert(np.concatenate(ids), np.cumsum(lengths), tokenizer.eos_id), lengths + 1


def split_segments(tokenizer: Tokenizer, text: str) -> list[str]:
    """Split a long text where the tokenizer splits it anyway: its segments, encoded one by one, give the ids of the
    whole.

    A place is taken only if the text around it is encoded alike with and without the cut; a tokenizer for which that
    never holds (one that marks the beginning of each text) gets the text whole.
    """
    cut = [0]
    while cut[-1] + SEGMENT_CHARS < len(text):
        place = _place_to_cut(tokenizer, text, cut[-1] + SEGMENT_CHARS)
        if place is None:
            break
        cut.append(place)
    return [text[start:stop] for start, stop in itertools.pairwise([*cut, len(text)])]


def _place_to_cut(tokenizer: Tokenizer, text: str, start: int) -> int | None:
    for _ in range(CANDIDATES):
        newline = text.find("\n", start)
        if newline < 0 or newline + 1 >= len(text):
            return None
        place = newline + 1
        start = place
        if text[newline - 1].isspace() or text[place].isspace():
            continue  # runs of white space are often one token
        left, right = text[max(0, place - WINDOW_CHARS) : place], text[place : place + WINDOW_CHARS]
        whole, before, after = tokenizer.backend.encode_batch_fast(
            [left + right, left, right], add_special_tokens=False
        )
        if whole.ids == before.ids + after.ids:
            return place
    return None


def _groups(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    chars = 0
    for text in texts:
        group.append(text)
        chars += len(text)
        if chars >= size:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _load_converted(folder: Path) -> Any:
    from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

    # Google's, NVIDIA's and HetSeq's BERTs come with a vocab.txt and a configuration that names no type of model.
    bare = (folder / "vocab.txt").is_file() and not (folder / "tokenizer_config.json").exists()
    bare = bare and "model_type" not in wordpiece.read_json(folder / "config.json")
    try:
        tokenizer = (BertTokenizer if bare else AutoTokenizer).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises whatever the missing converter or file raised
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"transformers cannot open the tokenizer in {folder} ({reason}); add a tokenizer.json"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"the tokenizer in {folder} has no fast version, so it is too slow for a corpus; add a tokenizer.json"
        )
    return tokenizer.backend_tokenizer


def _eos_id(folder: Path, backend: Any) -> int | None:
    """The id of the end-of-text token: by name in the tokenizer's files, or by number in the model's."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = wordpiece.read_json(folder / name).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found = backend.token_to_id(content)
            if found is not None:
                return int(found)
    for name in ("generation_config.json", "config.json"):
        number = wordpiece.read_json(folder / name).get("eos_token_id")
        first = number[0] if isinstance(number, list) and number else number
        if isinstance(first, int):
            return first
    return None
