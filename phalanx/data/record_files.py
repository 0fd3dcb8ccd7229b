"""Record files: columns of integers on disk, memory-mapped and read by index.

A set is a folder: for each column `NAME.bin` (its values, little endian) and `NAME.index.bin` (int64, records + 1
offsets into them, the first 0 and the last the number of values), and `manifest.json`, which also holds facts about the
set such as its vocabulary. A column `NAME.X` has one value for each value of `NAME`, whose index it shares.

A token file is a record file of one column, `tokens`: its records are documents, each of which ends with EOS. Where not
every token is learnt it has `tokens.mask` besides, 1 where it is. Tagged sentences, labelled texts and masked shards
have more columns. Files of version 1, which had other names in token files, are still read.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.core import format_versions
from phalanx.core.errors import DataError
from phalanx.core.json_lines import sync_folder, write_atomic
from phalanx.data.wordpiece import SpecialTokens

FORMAT_VERSION = 2
READABLE = (1, FORMAT_VERSION)
TOKEN_COLUMN, MASK_COLUMN = "tokens", "tokens.mask"
MANIFEST = "manifest.json"
VERIFIED = "verified.json"  # a mark: the contents were found whole
CHECK_BYTES = 16 << 20  # how much of a file is read at a time to check it
COPY_RECORDS = 1 << 16  # copied at a time
TYPES = ("<u1", "<u2", "<u4", "<i4")
# The files of a token set as version 1 named them.
OLD_NAMES = {"tokens.bin": "tokens.bin", "tokens.index.bin": "index.bin", "tokens.mask.bin": "mask.bin"}

Columns = Mapping[
    str, tuple[NDArray[Any], NDArray[np.int64]]
]  # values behind one another, and how many each record has


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest little-endian type that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_and_sync(path: Path, content: bytes) -> None:
    """Write a file and bring it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# -------------------------------------------------------------------------------------------------------------- reader


class RecordFile:
    """A set of records opened for reading; values stay on disk (memory-mapped) until they are sliced.

    Attributes: `folder`, `count` (records), `types` of the columns by name, `facts` about the set, `checksum` of the
    contents as written, `indexes` (int64, records + 1, by column); of the first column `values` (how many), its
    `index`, and whether it is `masked`. Raises DataError when a file is missing, unreadable or of another size than the
    manifest says; contents are checked by `verify`, which reads everything.
    """

    noun = "a set of records"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = _read_manifest(folder, self.noun)
        columns, names = manifest["columns"], manifest["names"]
        self.count: int = manifest["records"]
        self.facts: dict[str, Any] = manifest["facts"]
        self.types = {name: str(about["dtype"]) for name, about in columns.items()}
        sums = sorted(manifest["crc32"].items())
        self.checksum = "".join(f"{crc32:08x}" for _, crc32 in sums)
        self._crc32: dict[str, int] = {names.get(name, name): crc32 for name, crc32 in sums}
        self.indexes: dict[str, NDArray[np.int64]] = {}
        self._data: dict[str, NDArray[Any]] = {}
        for name, about in columns.items():
            path = folder / names.get(f"{name}.bin", f"{name}.bin")
            self._data[name] = _map_array(path, np.dtype(about["dtype"]), about["values"])
            path, along = folder / names.get(_index_name(name), _index_name(name)), name.partition(".")[0]
            if along == name:
                self.indexes[name] = _map_array(path, np.dtype("<i8"), self.count + 1)
            self.indexes[name] = index = self.indexes[along]
            if index[0] != 0 or index[-1] != about["values"]:
                raise DataError(
                    describe_damage(path, f"its offsets do not end at the {about['values']} values of the manifest")
                )
        first = next(iter(columns))
        self.values: int = columns[first]["values"]
        self.index, self._first, self._mask = self.indexes[first], self._data[first], self._data.get(f"{first}.mask")
        self.masked = self._mask is not None

    def record(self, number: int) -> dict[str, NDArray[np.int64]]:
        """The values of one record by column, as new int64 arrays."""
        assert 0 <= number < self.count, f"record {number} of {self.count}"
        found = {}
        for name, data in self._data.items():
            start, stop = self.indexes[name][number : number + 2].tolist()
            found[name] = data[start:stop].astype(np.int64)
        return found

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Values [start, stop) of the first column as a new int64 array of shape (stop - start,)."""
        assert 0 <= start <= stop <= self.values, f"values [{start}, {stop}) of {self.values}"
        return self._first[start:stop].astype(np.int64)

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the values [start, stop) are learnt, as a new array of shape (stop - start,); all without a mask."""
        assert 0 <= start <= stop <= self.values, f"values [{start}, {stop}) of {self.values}"
        return np.ones(stop - start, np.bool_) if self._mask is None else self._mask[start:stop].astype(np.bool_)

    def check_tokens(self, tokens: NDArray[np.int64], where: str) -> None:
        """Raise DataError for a token beyond the vocabulary."""
        vocab_size = self.facts["vocab_size"]
        if tokens.max(initial=0) >= vocab_size:
            raise DataError(
                f"{self.folder} has a token outside its vocabulary of {vocab_size} {where}, so the file is damaged; "
                "delete that folder and prepare the data again"
            )

    def lengths(self, name: str) -> NDArray[np.int64]:
        """How many values each record has in a column."""
        return np.diff(self.indexes[name])

    def columns(self, start: int, stop: int) -> dict[str, tuple[NDArray[Any], NDArray[np.int64]]]:
        """The records [start, stop), as `RecordFileWriter.extend` takes them; values are not copied."""
        found = {}
        for name, data in self._data.items():
            index = self.indexes[name][start : stop + 1]
            found[name] = (data[int(index[0]) : int(index[-1])], np.diff(index))
        return found

    def verify(self) -> None:
        """Read all files whole and compare their checksums with the manifest; raises DataError."""
        for name, expected in self._crc32.items():
            found = _checksum(self.folder / name)
            if found != expected:
                said = f"its checksum is {found:08x}, not {expected:08x}"
                raise DataError(describe_damage(self.folder / name, said))

    def verify_once(self) -> None:
        """`verify`, unless these files, by size and time of change, have been verified before; raises DataError.

        A mark beside them remembers it; where it cannot be written they are read whole each time.
        """
        states = [os.stat(self.folder / name) for name in self._crc32]
        now = [[status.st_size, status.st_mtime_ns] for status in states]
        mark = self.folder / VERIFIED
        with contextlib.suppress(OSError, ValueError):
            if json.loads(mark.read_text(encoding="utf-8")) == now:
                return
        self.verify()
        with contextlib.suppress(OSError):
            write_atomic(mark, json.dumps(now))


class TokenFile(RecordFile):
    """A token file opened for reading: see RecordFile, whose records are `documents` here and whose values `tokens`.

    Attributes besides: `vocab_size`, `eos_id`, `key` (what it was prepared from) and `specials` (BERT's special tokens,
    if its tokenizer has them).
    """

    noun = "a token set"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        facts = {name: self.facts.get(name) for name in ("vocab_size", "eos_id", "key")}
        if next(iter(self.types)) != TOKEN_COLUMN or [type(fact) for fact in facts.values()] != [int, int, str]:
            raise DataError(describe_damage(folder / MANIFEST, f"it does not have the fields of {self.noun}"))
        self.tokens, self.documents = self.values, self.count
        self.vocab_size: int = self.facts["vocab_size"]
        self.eos_id: int = self.facts["eos_id"]
        self.key: str = self.facts["key"]
        try:
            self.specials = SpecialTokens.from_json(self.facts["specials"]) if "specials" in self.facts else None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(describe_damage(folder / MANIFEST, f"its special tokens are invalid ({error!r})")) from None

    def gather(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The tokens at these places of the file, and which of them are learnt; new arrays of the same shape."""
        learnt = np.ones(places.shape, np.bool_) if self._mask is None else self._mask[places].astype(np.bool_)
        return self._first[places].astype(np.int64), learnt

    def document(self, number: int) -> NDArray[np.int64]:
        """The tokens of one document, its EOS included."""
        assert 0 <= number < self.documents, f"document {number} of {self.documents}"
        return self.slice(int(self.index[number]), int(self.index[number + 1]))


# -------------------------------------------------------------------------------------------------------------- writer


class RecordFileWriter:
    """Writes a set of records; `finish` renames the complete folder into place, and before it `folder` does not exist.

    `columns`: the type of the values of each by name, of `TYPES`; the first records may add one that lies along
    another, of type "<u1". The facts `vocab_size` and `eos_id`, where they are there, must hold for the first column.
    What a killed writer left is removed by the next.
    """

    def __init__(self, folder: Path, columns: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        assert not folder.exists(), f"{folder} exists"
        self.folder, self.facts, self.count = folder, dict(facts), 0
        self._temporary = folder.with_name(f".{folder.name}.writing")
        if self._temporary.exists():
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        self._first = next(iter(columns))
        self._types: dict[str, np.dtype[Any]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._crc32: dict[str, int] = {}
        self._lengths: dict[str, list[NDArray[np.int64]]] = {}
        for name, kind in columns.items():
            self._open(name, kind)

    def _open(self, name: str, kind: str) -> None:
        assert kind in TYPES, f"a column of type {kind}"
        self._types[name] = np.dtype(kind)
        self._files[name] = open(self._temporary / f"{name}.bin", "wb")  # noqa: SIM115  closed by finish
        self._crc32[name], self._lengths[name] = 0, [np.zeros(1, np.int64)]

    def extend(self, columns: Columns) -> None:
        """Add records: for each column their values behind one another, and how many each record has."""
        [added] = {len(lengths) for _, lengths in columns.values()}
        if not added:
            return
        for name in [] if self.count else columns.keys() - self._types.keys():
            assert name.partition(".")[0] in self._types, f"no column {name}"
            self._open(name, "<u1")
        assert columns.keys() == self._types.keys(), "a column for some records and none for others"
        self._check_tokens(*columns[self._first])
        for name, (values, lengths) in columns.items():
            limits = np.iinfo(self._types[name])
            assert lengths.sum() == len(values), f"lengths do not cover the {name}"
            assert not len(values) or limits.min <= values.min() <= values.max() <= limits.max, name
            data = np.ascontiguousarray(values, self._types[name]).data
            self._files[name].write(data)
            self._crc32[name] = zlib.crc32(data, self._crc32[name])
            self._lengths[name].append(lengths.astype(np.int64))
        self.count += added

    def _check_tokens(self, values: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        eos_id, vocab_size = self.facts.get("eos_id"), self.facts.get("vocab_size")
        if vocab_size is not None and len(values):
            assert 0 <= values.min() <= values.max() < vocab_size, "a token outside the vocabulary"
        if eos_id is not None:
            assert (lengths > 0).all(), "a document without EOS"
            assert (values[np.cumsum(lengths) - 1] == eos_id).all(), "a document without EOS"

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
            columns[name] = {"dtype": self._types[name].str.replace("|", "<"), "values": int(offsets[-1])}
            crc32[f"{name}.bin"] = self._crc32[name]
            if "." not in name:
                index = offsets.astype("<i8").tobytes()
                write_and_sync(self._temporary / _index_name(name), index)
                crc32[_index_name(name)] = zlib.crc32(index)
        manifest = {
            "format_version": FORMAT_VERSION,
            "records": self.count,
            "columns": columns,
            "facts": self.facts,
            "crc32": crc32,
        }
        write_and_sync(self._temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_folder(self._temporary)
        os.rename(self._temporary, self.folder)
        sync_folder(self.folder.parent)


def copy_records(writer: RecordFileWriter, file: RecordFile, numbers: Mapping[str, NDArray[Any]]) -> None:
    """Add all records of another set with the same columns; values of those in `numbers` become what it has there."""
    for first in range(0, file.count, COPY_RECORDS):
        writer.extend(renumber(file.columns(first, min(first + COPY_RECORDS, file.count)), numbers))


def renumber(columns: Columns, numbers: Mapping[str, NDArray[Any]]) -> Columns:
    """Columns of which the values of those in `numbers` become what it has there."""
    return {**columns, **{name: (new[columns[name][0]], columns[name][1]) for name, new in numbers.items()}}


# ------------------------------------------------------------------------------------------------------------ manifest


def describe_damage(path: Path, what: str) -> str:
    """The sentence about a file of a prepared set that is not what it was when it was written."""
    return f"{path} cannot be used: {what}; delete {path.parent} and prepare the data again"


def _index_name(column: str) -> str:
    return f"{column.partition('.')[0]}.index.bin"


def _read_manifest(folder: Path, noun: str) -> dict[str, Any]:
    """The manifest of a set, as this release writes it, and in `names` what its files are called otherwise."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["columns_version" if "columns_version" in manifest else "format_version"]
        if type(version) is int and version in READABLE:
            manifest = _convert_old(manifest)
            columns = manifest["columns"]
            files = {name for column in columns for name in (f"{column}.bin", _index_name(column))}
            fine = type(manifest["records"]) is int and isinstance(manifest["facts"], dict) and columns
            fine = fine and all(c["dtype"] in TYPES and type(c["values"]) is int for c in columns.values())
            if not fine or set(manifest["crc32"]) != files:
                raise DataError(describe_damage(path, f"it does not have the fields of {noun}"))
            return manifest
    except FileNotFoundError:
        raise DataError(f"{folder} is not {noun}: it has no {MANIFEST}; prepare the data again") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(describe_damage(path, f"it is not a manifest of {noun} ({error!r})")) from None
    remedy = f"delete {folder} and prepare the data again"
    raise DataError(f"{path} {format_versions.describe_version_problem(version, READABLE, remedy)}")


def _convert_old(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest of version 1, of token sets or of other records, as this release writes it."""
    if "columns" in manifest:
        return manifest | {"names": {}}
    crc32 = {name: manifest["crc32"][old] for name, old in OLD_NAMES.items() if old in manifest["crc32"]}
    columns = {TOKEN_COLUMN: {"dtype": manifest["dtype"], "values": manifest["tokens"]}}
    if f"{MASK_COLUMN}.bin" in crc32:
        columns[MASK_COLUMN] = {"dtype": "<u1", "values": manifest["tokens"]}
    return {
        "records": manifest["documents"],
        "columns": columns,
        "facts": {name: manifest[name] for name in ("vocab_size", "eos_id", "key", "specials") if name in manifest},
        "crc32": crc32,
        "names": OLD_NAMES,
    }


def _map_array(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """A file of `count` numbers, which stay on disk until they are sliced; raises DataError for another size."""
    expected_bytes = count * dtype.itemsize
    try:
        found_bytes = path.stat().st_size
    except FileNotFoundError:
        raise DataError(describe_damage(path, "it is missing")) from None
    if found_bytes != expected_bytes:
        raise DataError(describe_damage(path, f"it has {found_bytes} bytes, its manifest says {expected_bytes}"))
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    # A plain view: every slice of a memmap object costs some microseconds more.
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,)))


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(CHECK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
