import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import DataError
from phalanx.data import record_files
from phalanx.data.record_files import RecordFile, RecordFileWriter, copy_records

Record = dict[str, list[int]]


def write(folder: Path, records: list[Record], facts: dict[str, Any] | None = None) -> RecordFile:
    writer = RecordFileWriter(folder, {"a": "<u2", "b": "<i4"}, facts or {"labels": ["x", "y"]})
    for record in records:
        writer.append(record)
    writer.finish()
    return RecordFile(folder)


RECORDS = st.lists(
    st.fixed_dictionaries(
        {"a": st.lists(st.integers(0, 65535), max_size=5), "b": st.lists(st.integers(-9, 2**31 - 1), max_size=3)}
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(records=RECORDS)
def test_records_come_back(records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> None:
    columns = write(tmp_path_factory.mktemp("columns") / "set", records)
    columns.verify_once()
    assert columns.count == len(records)
    assert columns.values == sum(len(record["a"]) for record in records)
    found = [
        {name: values.tolist() for name, values in columns.record(number).items()} for number in range(columns.count)
    ]
    assert found == records
    assert columns.lengths("b").tolist() == [len(record["b"]) for record in records]


def test_sets_are_joined_with_other_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(tmp_path / "one", [{"a": [1, 2], "b": [0]}, {"a": [], "b": [1]}])
    other = write(tmp_path / "other", [{"a": [7], "b": [1, -1]}])
    writer = RecordFileWriter(tmp_path / "both", one.types, one.facts)
    monkeypatch.setattr(record_files, "COPY_RECORDS", 1)
    copy_records(writer, one, {})
    copy_records(writer, other, {"b": np.array([5, 6, -1])})
    writer.finish()
    both = RecordFile(tmp_path / "both")
    assert [both.record(number)["a"].tolist() for number in range(3)] == [[1, 2], [], [7]]
    assert [both.record(number)["b"].tolist() for number in range(3)] == [[0], [1], [6, -1]]
    assert both.checksum != one.checksum


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write(folder, [{"a": [1, 2, 3], "b": [4]}] * 5)

    def broken(name: str, change: bytes | None, message: str) -> None:
        whole = (folder / name).read_bytes()
        if change is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(change)
        with pytest.raises(DataError, match=message):
            RecordFile(folder).verify_once()
        (folder / name).write_bytes(whole)

    broken("a.bin", None, r"a\.bin cannot be used: it is missing; delete .* and prepare the data again")
    broken("a.bin", b"\0" * 29, r"a\.bin cannot be used: it has 29 bytes, its manifest says 30")
    broken("a.bin", b"\1" * 30, r"a\.bin cannot be used: its checksum is")
    broken("b.index.bin", b"\0" * 48, r"b\.index\.bin cannot be used: its offsets do not end at the 5 values")
    broken("manifest.json", b"{", r"manifest\.json cannot be used: it is not a manifest")
    broken("manifest.json", b"{}", r"it is not a manifest")
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in ("columns_version", "format_version"):
        later = json.dumps(manifest | {key: 9}).encode()
        broken("manifest.json", later, "is of format version 9, which a later .* reads 1 and 2")
    broken("manifest.json", json.dumps(manifest | {"records": "5"}).encode(), "it does not have the fields")
    with pytest.raises(DataError, match=r"is not a set of records"):
        RecordFile(tmp_path)


def test_records_of_version_1_are_read(tmp_path: Path) -> None:
    new = write(tmp_path / "set", [{"a": [1, 2], "b": [0]}])
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    del manifest["format_version"]
    (tmp_path / "set" / "manifest.json").write_text(json.dumps({"columns_version": 1, **manifest}))
    old = RecordFile(tmp_path / "set")
    old.verify()
    assert (old.checksum, old.facts, old.types) == (new.checksum, new.facts, new.types)


def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    writer = RecordFileWriter(tmp_path / "set", {"a": "<u1"}, {})
    writer.append({"a": [1]})
    assert not (tmp_path / "set").exists()
    assert write(tmp_path / "set", []).count == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
