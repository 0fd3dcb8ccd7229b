"""Kinds of source files and their records: running text, a conversation, or a labelled text.

The layouts of ShareGPT and Alpaca are read as conversations and prompts.
"""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import DataError
from phalanx.storage import files as storage

if TYPE_CHECKING:
    from phalanx.config.model import DataSection

HUB = "hub:"
COMPRESSIONS = (".gz", ".zst")


class FileKind(StrEnum):
    """Kinds of files: how their bytes become documents."""

    TEXT = "running text"  # one document
    LINES = "JSON lines"  # one document a line
    LIST = "a JSON list"  # one document an element
    ROWS = "Parquet"  # one document a row
    TOKENS = "Megatron tokens"  # token ids already
    TALKS = "conversations"  # Python modules, of whose functions and classes conversations are made
    REMOTE = "a hub dataset"
    SHARDS = "masked shards"  # HDF5 files of sequences that are masked already


KINDS = {
    ".jsonl": FileKind.LINES, ".ndjson": FileKind.LINES, ".json": FileKind.LIST, ".parquet": FileKind.ROWS,
    ".idx": FileKind.TOKENS, ".hdf5": FileKind.SHARDS, ".h5": FileKind.SHARDS,
}  # fmt: skip
# How the records of a kind of task are read; those of others as data.format says.
FORMATS = {"tag": "tags", "classify": "classes", "shards": "masked"}


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: an absolute path, a URL or a hub id.

    `version` changes when its contents do. `lenient`: bytes that are not UTF-8 are replaced (the standard library
    cannot be fixed).
    """

    path: str
    kind: str
    size_bytes: int
    version: str
    lenient: bool = False


@dataclass(frozen=True)
class Record:
    """One document as its source holds it: `text`; for conversations and prompts the object with their `fields`; for
    labelled records `texts` (the words of a sentence, or one or two texts) and `labels` (a tag for each word, or one).

    `where` names the place for a user: "FILE, line 3" or alike.
    """

    text: str | None
    fields: dict[str, Any] | None
    where: str
    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it to learn from."""
        return not (self.text or self.fields or any(self.texts))


@dataclass(frozen=True)
class RecordFormat:
    """The format of records: which keys are read and how they are encoded, from the keys of `data` with these names."""

    format: str = "text"
    text_key: str = "text"
    messages_key: str = "messages"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    chat_template: str | None = None
    loss_on: str = "assistant"
    storage_timeout_s: float = storage.TIMEOUT_S  # how long a store is tried for
    # Of labelled records, which task.kind asks for:
    tokens_key: str = "tokens"
    tags_key: str = "ner_tags"
    label_key: str = "label"
    pair_key: str | None = None

    @property
    def labelled(self) -> bool:
        """Whether records are tagged sentences or labelled texts."""
        return self.format in ("tags", "classes")

    def columns(self) -> list[str]:
        """The keys of a record that matter."""
        return [key for key in self._options().values() if key is not None]

    def option_name(self, key: str) -> str:
        """What `data.{what}_key` names this key of a record."""
        return next(what for what, named in self._options().items() if named == key)

    def _options(self) -> dict[str, str | None]:
        options: dict[str, dict[str, str | None]] = {
            "text": {"text": self.text_key},
            "chat": {"messages": self.messages_key},
            "prompt": {"prompt": self.prompt_key, "completion": self.completion_key},
            "tags": {"tokens": self.tokens_key, "tags": self.tags_key},
            "classes": {"text": self.text_key, "pair": self.pair_key or None, "label": self.label_key},
            "masked": {},
        }
        return options[self.format]


def make_format(data: "DataSection", kind: str, storage_timeout_s: float = storage.TIMEOUT_S) -> RecordFormat:
    """How the records of a recipe are read, for a task of this `kind`."""
    return RecordFormat(
        FORMATS.get(kind, data.format),
        data.text_key,
        data.messages_key,
        data.prompt_key,
        data.completion_key,
        data.chat_template,
        data.loss_on,
        storage_timeout_s,
        data.tokens_key,
        data.tags_key,
        data.label_key,
        data.pair_key,
    )


def text_digest(text: str) -> bytes:
    """The sha256 of a document: what decides on which side it falls, on any machine and in any order of files."""
    return hashlib.sha256(text.encode()).digest()


def record_digest(record: Record, keys: list[str]) -> bytes:
    """The same for a record, of its text, its labels, or the fields under `keys`. Raises DataError for what is no
    text."""
    text = record.text
    if text is None and record.fields is None:
        text = json.dumps([record.texts, record.labels], ensure_ascii=False)
    elif text is None:
        assert record.fields is not None
        known = {key: record.fields[key] for key in keys if key in record.fields}
        text = json.dumps(known, sort_keys=True, ensure_ascii=False, default=str)
    try:
        return text_digest(text)
    except UnicodeEncodeError:  # JSON can spell what is no character, as in \\ud800
        raise DataError(
            f"{record.where} holds an unpaired surrogate instead of text; correct or delete the line"
        ) from None


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document is kept for evaluation: its digest, read as a number in [0, 1), is below `fraction`."""
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


# ------------------------------------------------------------------------------------------------------------- parsing


def check_keys(found: Any, format: RecordFormat, where: str) -> dict[str, Any]:
    """A record under the keys that `format` names. Raises DataError naming the key that it lacks."""
    found = normalise_record(found, format) if isinstance(found, dict) else found
    for key in format.columns():
        if not isinstance(found, dict) or key not in found:
            has = ", ".join(map(str, list(found)[:8])) if isinstance(found, dict) else "no object"
            what = format.option_name(key)
            likely = guess_format(found, format) if isinstance(found, dict) else None
            remedy = f"set data.format={likely}, or " if likely else "set "
            remedy += f"data.{what}_key to the key that holds the {what}"
            raise DataError(f"{where} has no key {key!r} (it has: {has}); {remedy}")
    assert isinstance(found, dict)
    return found


def parse_record(found: Any, format: RecordFormat, where: str, names: list[str] | None = None) -> Record:
    """Read a record. Conversations and prompts are checked when they are encoded; `names`: the names of label numbers.
    Raises DataError naming place and key."""
    found = check_keys(found, format, where)
    if format.format == "tags":
        return _parse_tagged(found, names, format, where)
    if format.format == "classes":
        return _parse_classified(found, names, format, where)
    if format.format != "text":
        return Record(None, found, where)
    text = found[format.text_key]
    if not isinstance(text, str):
        raise DataError(
            f"{where} has a {type(text).__name__} under {format.text_key!r} instead of text; set data.text_key to "
            f"another key"
        )
    return Record(text, None, where)


def _parse_tagged(fields: dict[str, Any], names: list[str] | None, format: RecordFormat, where: str) -> Record:
    words, tags = fields[format.tokens_key], fields[format.tags_key]
    for key, value in ((format.tokens_key, words), (format.tags_key, tags)):
        if not isinstance(value, list):
            kind = type(value).__name__
            raise DataError(
                f"{where} has a {kind} under {key!r} instead of a list; "
                f"set data.{format.option_name(key)}_key to another"
            )
    if len(words) != len(tags):
        raise DataError(
            f"{where} has {len(words)} words under {format.tokens_key!r} and {len(tags)} tags under "
            f"{format.tags_key!r}; give each word one tag"
        )
    if not all(isinstance(word, str) for word in words):
        raise DataError(f"{where} has a word under {format.tokens_key!r} that is not text; correct it")
    labels = tuple(_label(tag, names, format.tags_key, where) for tag in tags)
    return Record(None, None, where, tuple(words), labels)


def _parse_classified(fields: dict[str, Any], names: list[str] | None, format: RecordFormat, where: str) -> Record:
    *keys, label_key = format.columns()
    for key in keys:
        if not isinstance(fields[key], str):
            kind = type(fields[key]).__name__
            raise DataError(
                f"{where} has a {kind} under {key!r} instead of text; "
                f"set data.{format.option_name(key)}_key to another key"
            )
    label = _label(fields[label_key], names, label_key, where)
    return Record(None, None, where, tuple(fields[key] for key in keys), (label,))


def _label(value: Any, names: list[str] | None, key: str, where: str) -> str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if names is None:
            return str(value)
        if 0 <= value < len(names):
            return names[value]
        raise DataError(f"{where} has the number {value} under {key!r}, but there are {len(names)} labels; correct it")
    raise DataError(
        f"{where} has {json.dumps(value, default=str)} under {key!r}, which is not a label; give a word or an integer"
    )


# ------------------------------------------------------------------------------------------------------ record layouts
# Layouts of records that other projects made common, read as conversations and prompts: ShareGPT's and Alpaca's.


SHAREGPT = "conversations"  # [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"  # Alpaca; the input may be empty or missing
KEYS = (SHAREGPT, INSTRUCTION, INPUT, OUTPUT, "system")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
# The prompts that Alpaca was trained with (Taori et al. 2023), with an input and without.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)

USUAL_KEYS = {"text": ("text",), "chat": ("messages", SHAREGPT), "prompt": ("prompt", INSTRUCTION)}


def guess_format(record: dict[str, Any], format: RecordFormat) -> str | None:
    """The `data.format` under whose usual keys a record stands, where that is not the one that is read."""
    named = [name for name, keys in USUAL_KEYS.items() if not record.keys().isdisjoint(keys)]
    return named[0] if named and format.format in USUAL_KEYS and format.format not in named else None


def normalise_record(record: dict[str, Any], format: RecordFormat) -> dict[str, Any]:
    """A record under the keys that `format` names. One that has these, or is of no known layout, stays as it is.

    Where conversations are read, ShareGPT's list and the pairs of Alpaca become messages; where prompts are read, the
    pairs of Alpaca a prompt in the words that Alpaca was trained with.
    """
    if all(key in record for key in format.columns()) or format.format not in ("chat", "prompt"):
        return record
    if format.format == "chat" and SHAREGPT in record:
        return record | {format.messages_key: _with_system(record, record[SHAREGPT])}
    if INSTRUCTION not in record or OUTPUT not in record:
        return record
    instruction, added, output = record[INSTRUCTION], record.get(INPUT) or "", record[OUTPUT]
    if not all(isinstance(part, str) for part in (instruction, added, output)):
        return record
    if format.format == "prompt":
        words = WITH_INPUT if added else WITHOUT_INPUT
        return record | {
            format.prompt_key: words.format(instruction=instruction, input=added),
            format.completion_key: output,
        }
    question = f"{instruction}\n\n{added}" if added else instruction
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return record | {format.messages_key: _with_system(record, messages)}


def _with_system(record: dict[str, Any], messages: Any) -> Any:
    """Messages with the record's own system prompt before them, where it has one."""
    system = record.get("system")
    if not isinstance(system, str) or not system or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": system}, *messages]


def as_message(message: Any) -> Any:
    """Convert a turn of ShareGPT to a message; other values are returned unchanged."""
    if not isinstance(message, dict) or "role" in message or not isinstance(message.get("from"), str):
        return message
    return {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
