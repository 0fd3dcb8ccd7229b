"""Indexed token files: one flat array of token ids on disk and the offsets of its documents.

A token set is a folder of three files: `tokens.bin` (uint16 or uint32, little endian), `index.bin` (int64, documents +
1 offsets into the tokens, the first 0 and the last the number of tokens) and `manifest.json`. Each document ends with
EOS. A set of which not every token is learnt has a fourth, `mask.bin`: a byte for each token, 1 where it is learnt.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.core import format_versions
from phalanx.core.errors import DataError
from phalanx.core.json_lines import sync_folder, write_atomic
from phalanx.data.wordpiece import SpecialTokens

FORMAT_VERSION = 1
TOKENS = "tokens.bin"
INDEX = "index.bin"
MASK = "mask.bin"
MANIFEST = "manifest.json"
VERIFIED = "verified.json"  # a mark: the contents were found whole
CHECK_BYTES = 16 << 20  # how much of a file is read at a time to check it


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest little-endian type that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_and_sync(path: Path, content: bytes) -> None:
    """Write a file and bring it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class TokenFile:
    """A token set opened for reading; the tokens stay on disk (memory-mapped) until they are sliced.

    Attributes: `folder`, `tokens` and `documents` (counts), `vocab_size`, `eos_id`, `key` (what it was prepared from),
    `specials` (BERT's special tokens, if its tokenizer has them), `checksum` of the contents as written, `masked`
    (whether some tokens are not learnt), `index` (int64, documents + 1: where documents begin and the last ends).
    Raises DataError when a file is missing, unreadable or of another size than the manifest says; contents are checked
    by `verify`, which reads everything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = _read_manifest(folder)
        self.tokens: int = self._manifest["tokens"]
        self.documents: int = self._manifest["documents"]
        self.vocab_size: int = self._manifest["vocab_size"]
        self.eos_id: int = self._manifest["eos_id"]
        self.key: str = self._manifest["key"]
        self.specials = _specials(folder, self._manifest)
        self.masked = MASK in self._manifest["crc32"]
        self._files = (TOKENS, INDEX, MASK) if self.masked else (TOKENS, INDEX)
        self.checksum = "".join(f"{self._manifest['crc32'][name]:08x}" for name in self._files)
        self._data = map_array(folder / TOKENS, np.dtype(self._manifest["dtype"]), self.tokens)
        self.index = map_array(folder / INDEX, np.dtype("<i8"), self.documents + 1)
        self._mask = map_array(folder / MASK, np.dtype("u1"), self.tokens) if self.masked else None
        if self.index[0] != 0 or self.index[-1] != self.tokens:
            raise DataError(
                describe_damage(folder / INDEX, f"its offsets do not end at the {self.tokens} tokens of the manifest")
            )

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the whole file as a new int64 array of shape (stop - start,)."""
        assert 0 <= start <= stop <= self.tokens, f"tokens [{start}, {stop}) of {self.tokens}"
        return self._data[start:stop].astype(np.int64)

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens [start, stop) are learnt, as a new array of shape (stop - start,); all without a mask."""
        assert 0 <= start <= stop <= self.tokens, f"tokens [{start}, {stop}) of {self.tokens}"
        if self._mask is None:
            return np.ones(stop - start, np.bool_)
        return self._mask[start:stop].astype(np.bool_)

    def gather(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The tokens at these places of the file, and which of them are learnt; new arrays of the same shape."""
        learnt = np.ones(places.shape, np.bool_) if self._mask is None else self._mask[places].astype(np.bool_)
        return self._data[places].astype(np.int64), learnt

    def document(self, number: int) -> NDArray[np.int64]:
        """The tokens of one document, its EOS included."""
        assert 0 <= number < self.documents, f"document {number} of {self.documents}"
        return self.slice(int(self.index[number]), int(self.index[number + 1]))

    def verify(self) -> None:
        """Read all files whole and compare their checksums with the manifest; raises DataError."""
        verify_files(self.folder, self._checksums)

    def verify_once(self) -> None:
        """`verify_files`, unless these files have been verified before; raises DataError."""
        verify_files_once(self.folder, self._checksums)

    @property
    def _checksums(self) -> dict[str, int]:
        return {name: self._manifest["crc32"][name] for name in self._files}


class TokenWriter:
    """Writes a token set; `finish` renames the complete folder into place, and before it `folder` does not exist.

    What a killed writer left under the temporary name is removed by the next one. Whether the set has a mask is what
    the first documents say; a set without any document has none.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_id: int, key: str, specials: SpecialTokens | None = None
    ) -> None:
        assert 0 <= eos_id < vocab_size, f"EOS {eos_id} with a vocabulary of {vocab_size}"
        assert not folder.exists(), f"{folder} exists"
        self.folder = folder
        self.dtype = token_dtype(vocab_size)
        self._temporary = folder.with_name(f".{folder.name}.writing")
        self._manifest: dict[str, Any] = {"vocab_size": vocab_size, "eos_id": eos_id, "key": key}
        if specials is not None:
            self._manifest["specials"] = specials.to_json()
        self._ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._tokens = 0
        self._crc = self._mask_crc = 0
        self._masks: BinaryIO | None = None
        if self._temporary.exists():
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        self._file = open(self._temporary / TOKENS, "wb")  # noqa: SIM115  closed by finish

    def append(self, document: NDArray[Any]) -> None:
        """Add one document (ids of shape (n,), without EOS) and its EOS."""
        tokens = np.append(document, self._manifest["eos_id"])
        self.extend(tokens, np.array([len(tokens)], np.int64))

    def extend(self, tokens: NDArray[Any], lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None = None) -> None:
        """Add documents that lie behind one another in `tokens`, each ending with EOS; `lengths` count it.

        `mask` says for each token whether it is learnt; a set has it for all of its documents or for none.
        """
        ends = np.cumsum(lengths, dtype=np.int64)
        if not len(ends):
            return
        assert ends[-1] == len(tokens), "lengths do not cover the tokens"
        assert (lengths > 0).all(), "a document without EOS"
        assert (tokens[ends - 1] == self._manifest["eos_id"]).all(), "a document without EOS"
        assert tokens.min() >= 0, "a token outside the vocabulary"
        assert tokens.max() < self._manifest["vocab_size"], "a token outside the vocabulary"
        if not self._tokens and mask is not None:
            self._masks = open(self._temporary / MASK, "wb")  # noqa: SIM115  closed by finish
        assert (self._masks is None) == (mask is None), "a mask for some documents and none for others"
        if self._masks is not None and mask is not None:
            assert len(mask) == len(tokens), "a mask of another length than its tokens"
            learnt = np.ascontiguousarray(mask, np.bool_).data.cast("B")
            self._masks.write(learnt)
            self._mask_crc = zlib.crc32(learnt, self._mask_crc)
        data = np.ascontiguousarray(tokens, self.dtype).data.cast("B")
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._ends.append(ends + self._tokens)
        self._tokens += len(tokens)

    def finish(self) -> None:
        """Write index and manifest, bring everything to the disk and give the folder its name."""
        for stream in (self._file, self._masks):
            if stream is not None:
                with stream as file:
                    file.flush()
                    os.fsync(file.fileno())
        index = np.concatenate(self._ends).astype("<i8").tobytes()
        manifest = {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype.str,
            "tokens": self._tokens,
            "documents": len(index) // 8 - 1,
            **self._manifest,
            "crc32": {TOKENS: self._crc, INDEX: zlib.crc32(index)} | ({MASK: self._mask_crc} if self._masks else {}),
        }
        for name, content in ((INDEX, index), (MANIFEST, json.dumps(manifest, indent=1).encode())):
            write_and_sync(self._temporary / name, content)
        sync_folder(self._temporary)
        os.rename(self._temporary, self.folder)
        sync_folder(self.folder.parent)


def describe_damage(path: Path, what: str) -> str:
    """The sentence about a file of a prepared set that is not what it was when it was written."""
    return f"{path} cannot be used: {what}; delete {path.parent} and prepare the data again"


def describe_other_version(path: Path, version: Any, known: int) -> str:
    """The sentence about the manifest of a prepared set that another release has written."""
    remedy = f"delete {path.parent} and prepare the data again"
    return f"{path} {format_versions.describe_version_problem(version, (known,), remedy)}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            wanted = {"dtype": str, "tokens": int, "documents": int, "vocab_size": int, "eos_id": int, "key": str}
            wrong = [name for name, kind in wanted.items() if type(manifest[name]) is not kind]
            if wrong or manifest["dtype"] not in ("<u2", "<u4") or set(manifest["crc32"]) - {MASK} != {TOKENS, INDEX}:
                raise DataError(describe_damage(path, "its fields are not those of a token set"))
            return dict(manifest)
    except FileNotFoundError:
        raise DataError(f"{folder} is not a token set: it has no {MANIFEST}; prepare the data again") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(describe_damage(path, f"it is not a manifest of a token set ({error!r})")) from None
    raise DataError(describe_other_version(path, version, FORMAT_VERSION))


def _specials(folder: Path, manifest: dict[str, Any]) -> SpecialTokens | None:
    if "specials" not in manifest:
        return None
    try:
        return SpecialTokens.from_json(manifest["specials"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(describe_damage(folder / MANIFEST, f"its special tokens are none ({error!r})")) from None


def map_array(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
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


def verify_files(folder: Path, sums: Mapping[str, int]) -> None:
    """Read these files of a folder whole and compare their checksums; raises DataError."""
    for name, expected in sums.items():
        found = _checksum(folder / name)
        if found != expected:
            raise DataError(describe_damage(folder / name, f"its checksum is {found:08x}, not {expected:08x}"))


def verify_files_once(folder: Path, sums: Mapping[str, int]) -> None:
    """`verify_files`, unless these files, by size and time of change, have been verified before; raises DataError.

    A mark beside them remembers it; where it cannot be written they are read whole each time.
    """
    now = [[status.st_size, status.st_mtime_ns] for status in (os.stat(folder / name) for name in sums)]
    mark = folder / VERIFIED
    with contextlib.suppress(OSError, ValueError):
        if json.loads(mark.read_text(encoding="utf-8")) == now:
            return
    verify_files(folder, sums)
    with contextlib.suppress(OSError):
        write_atomic(mark, json.dumps(now))


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(CHECK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
