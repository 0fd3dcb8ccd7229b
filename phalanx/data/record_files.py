"""Sets of records: columns of integers on disk, each record as long in each of them as it likes.

A set is a folder: for each column `NAME.bin` (its values, little endian) and `NAME.index.bin` (int64, records + 1
offsets into them, the first 0 and the last the number of values), and `manifest.json`, which also holds facts about the
set such as the names of labels. Masked shards, tagged sentences and labelled texts are kept so.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.core.json_lines import sync_folder
from phalanx.data.sources import RecordFormat
from phalanx.data.token_files import (
    MANIFEST,
    describe_damage,
    describe_other_version,
    map_array,
    verify_files_once,
    write_and_sync,
)

FORMAT_VERSION = 1
_TYPES = ("<u1", "<u2", "<u4", "<i4")


class RecordSet:
    """A set of records opened for reading; values stay on disk (memory-mapped) until a record is asked for.

    Attributes: `folder`, `count` (records), `names` of the columns and their `types`, `facts` about the set, `values`
    (how many there are in the first column), `checksum` of the contents as written, `index` (int64, records + 1, of
    each column). Raises DataError when a file is missing, unreadable or of another size than the manifest says;
    contents are checked by `verify_files_once`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = _manifest(folder)
        self.count: int = manifest["records"]
        self.facts: dict[str, Any] = manifest["facts"]
        self.names: list[str] = list(manifest["columns"])
        self.values: int = next(iter(manifest["columns"].values()))["values"]
        self._crc32: dict[str, int] = manifest["crc32"]
        self.checksum = "".join(f"{self._crc32[name]:08x}" for name in sorted(self._crc32))
        self.types = {name: str(about["dtype"]) for name, about in manifest["columns"].items()}
        self._data: dict[str, NDArray[Any]] = {}
        self.index: dict[str, NDArray[np.int64]] = {}
        for name, about in manifest["columns"].items():
            self._data[name] = map_array(folder / f"{name}.bin", np.dtype(about["dtype"]), about["values"])
            self.index[name] = index = map_array(folder / f"{name}.index.bin", np.dtype("<i8"), self.count + 1)
            if index[0] != 0 or index[-1] != about["values"]:
                path = folder / f"{name}.index.bin"
                raise DataError(
                    describe_damage(path, f"its offsets do not end at the {about['values']} values of the manifest")
                )

    def record(self, number: int) -> dict[str, NDArray[np.int64]]:
        """The values of one record by column, as new int64 arrays."""
        assert 0 <= number < self.count, f"record {number} of {self.count}"
        found = {}
        for name, data in self._data.items():
            start, stop = self.index[name][number : number + 2].tolist()
            found[name] = data[start:stop].astype(np.int64)
        return found

    def slice(self, name: str, start: int, stop: int) -> NDArray[np.int64]:
        """Values [start, stop) of a column as a new int64 array."""
        return self._data[name][start:stop].astype(np.int64)

    def lengths(self, name: str) -> NDArray[np.int64]:
        """How many values each record has in a column."""
        return np.diff(self.index[name])

    def verify_once(self) -> None:
        """Compare all files with the manifest's checksums, unless that has been done before; raises DataError."""
        verify_files_once(self.folder, dict(sorted(self._crc32.items())))


class RecordSetWriter:
    """Writes a set of records; `finish` renames the complete folder into place, and before it `folder` does not exist.

    `columns`: the type of the values of each by name, of `_TYPES`. What a killed writer left is removed by the next.
    """

    def __init__(self, folder: Path, columns: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        assert not folder.exists(), f"{folder} exists"
        assert columns
        assert set(columns.values()) <= set(_TYPES), f"columns of the types {columns}"
        self.folder, self.facts, self.count = folder, dict(facts), 0
        self._types = {name: np.dtype(kind) for name, kind in columns.items()}
        self._temporary = folder.with_name(f".{folder.name}.writing")
        if self._temporary.exists():
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        self._files = {name: open(self._temporary / f"{name}.bin", "wb") for name in columns}  # noqa: SIM115
        self._crc32 = dict.fromkeys(columns, 0)
        self._lengths: dict[str, list[NDArray[np.int64]]] = {name: [np.zeros(1, np.int64)] for name in columns}

    def extend(self, columns: Mapping[str, tuple[NDArray[Any], NDArray[np.int64]]]) -> None:
        """Add records: for each column their values behind one another, and how many each record has."""
        assert columns.keys() == self._types.keys()
        added = {len(lengths) for _, lengths in columns.values()}
        assert len(added) == 1, "columns of different numbers of records"
        for name, (values, lengths) in columns.items():
            limits = np.iinfo(self._types[name])
            assert lengths.sum() == len(values), f"lengths do not cover the values of {name}"
            assert not len(values) or limits.min <= values.min() <= values.max() <= limits.max, name
            data = values.astype(self._types[name]).tobytes()
            self._files[name].write(data)
            self._crc32[name] = zlib.crc32(data, self._crc32[name])
            self._lengths[name].append(lengths.astype(np.int64))
        self.count += added.pop()

    def append(self, record: Mapping[str, Sequence[int]]) -> None:
        """Add one record."""
        arrays = {name: np.asarray(values, np.int64) for name, values in record.items()}
        self.extend({name: (values, np.array([len(values)], np.int64)) for name, values in arrays.items()})

    def finish(self) -> None:
        """Write indexes and manifest, bring everything to the disk and give the folder its name."""
        crc32: dict[str, int] = {}
        columns: dict[str, Any] = {}
        for name, file in self._files.items():
            with file:
                file.flush()
                os.fsync(file.fileno())
            offsets = np.cumsum(np.concatenate(self._lengths[name]))
            index = offsets.astype("<i8").tobytes()
            write_and_sync(self._temporary / f"{name}.index.bin", index)
            columns[name] = {"dtype": self._types[name].str.replace("|", "<"), "values": int(offsets[-1])}
            crc32 |= {f"{name}.bin": self._crc32[name], f"{name}.index.bin": zlib.crc32(index)}
        manifest = {
            "columns_version": FORMAT_VERSION,
            "records": self.count,
            "columns": columns,
            "facts": self.facts,
            "crc32": crc32,
        }
        write_and_sync(self._temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_folder(self._temporary)
        os.rename(self._temporary, self.folder)
        sync_folder(self.folder.parent)


def is_record_set(folder: Path) -> bool:
    """Whether a folder says of itself that it is a set of records."""
    with contextlib.suppress(OSError, ValueError):
        return "columns_version" in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return False


def copy_records(
    writer: RecordSetWriter, columns: RecordSet, numbers: Mapping[str, NDArray[Any]], at_a_time: int = 65536
) -> None:
    """Add all records of another set with the same columns; values of those in `numbers` become what it has there."""
    for first in range(0, columns.count, at_a_time):
        last = min(first + at_a_time, columns.count)
        part = {}
        for name in columns.names:
            index = columns.index[name]
            values = columns._data[name][int(index[first]) : int(index[last])]
            values = numbers[name][values] if name in numbers else values
            part[name] = (values, np.diff(index[first : last + 1]))
        writer.extend(part)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["columns_version"]
        if version == FORMAT_VERSION:
            columns = manifest["columns"]
            fine = type(manifest["records"]) is int and isinstance(manifest["facts"], dict) and columns
            files = {f"{name}{kind}" for name in columns for kind in (".bin", ".index.bin")}
            fine = fine and all(c["dtype"] in _TYPES and type(c["values"]) is int for c in columns.values())
            if not fine or set(manifest["crc32"]) != files:
                raise DataError(describe_damage(path, "its fields are not those of a set of records"))
            return dict(manifest)
    except FileNotFoundError:
        raise DataError(f"{folder} is not a set of records: it has no {MANIFEST}; prepare the data again") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(describe_damage(path, f"it is not a manifest of a set of records ({error!r})")) from None
    raise DataError(describe_other_version(path, version, FORMAT_VERSION))


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
    """A turn of ShareGPT as a message; any other value as it is."""
    if not isinstance(message, dict) or "role" in message or not isinstance(message.get("from"), str):
        return message
    return {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
