"""Files of other programs with bytes changed, cut or added: each is read as something, or refused by a sentence that
names it. And none of them runs code.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from phalanx.compat.megatron.weights import MegatronCheckpoint
from phalanx.compat.pickles import _is_covered
from phalanx.compat.sagemaker import loader
from phalanx.compat.sagemaker.files import DistributedFileSystemReader
from phalanx.core.errors import CheckpointError, ConfigError, DataError
from phalanx.data import file_formats, megatron_dataset
from tests.hostile import examples
from tests.shards import write_shard
from tests.unit.test_import_megatron import arguments, lay_out, llama
from tests.unit.test_megatron import INDEX, TOKENS, write_example

NUMBERS = (0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 2, 2**63, 2**64 - 1)


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, float, bytes]]:
    """What is done to a file, one after the other: how, where (as a part of it) and with which bytes."""
    number = st.sampled_from(NUMBERS).map(lambda value: value.to_bytes(8, "little"))
    content = st.binary(min_size=1, max_size=9) | number | number.map(lambda raw: raw[:4])
    one = st.tuples(st.sampled_from(["put", "put", "put", "cut", "add", "drop"]), st.floats(0, 1), content)
    return draw(st.lists(one, min_size=1, max_size=3))


def damaged(raw: bytes, how: list[tuple[str, float, bytes]]) -> bytes:
    for what, where, content in how:
        at = int(where * len(raw))
        if what == "put":
            raw = (raw[:at] + content + raw[at + len(content) :])[: max(len(raw), 1)]
        elif what == "cut":
            raw = raw[:at]
        elif what == "add":
            raw = raw[:at] + content + raw[at:]
        else:
            raw = raw[:at] + raw[at + len(content) :]
    return raw


def names(error: Exception, *files: str) -> None:
    """The sentence names one of these files."""
    said = str(error)
    assert any(file in said for file in files) and len(said) < 2000, said


def test_an_index_of_megatrons(tmp_path: Path) -> None:
    """Tokens come from the file or not at all: no document has fewer than its index says."""

    @examples(150)
    @given(index=damages(), tokens=damages(), which=st.sampled_from(["index", "tokens", "both"]))
    def reads(index: Any, tokens: Any, which: str) -> None:
        write_example(
            tmp_path,
            INDEX if which == "tokens" else damaged(INDEX, index),
            TOKENS if which == "index" else damaged(TOKENS, tokens),
        )
        try:
            with megatron_dataset.open_indexed_dataset(str(tmp_path / "m.idx")) as pair:
                documents = pair.read_documents(0, pair.documents)
                assert pair.split_bounds(9)[-1] == pair.documents
                lengths = np.concatenate([[0], np.cumsum(pair._lengths)])[pair._bounds]
                assert [len(ids) for ids in documents] == np.diff(lengths).tolist()
        except DataError as error:
            names(error, "m.idx", "m.bin")

    reads()


def test_a_megatron_checkpoint(tmp_path: Path) -> None:
    lay_out(tmp_path / "m", llama(), args=arguments(4, False, False))
    (file,) = (tmp_path / "m").rglob("model_optim_rng.pt")
    whole = file.read_bytes()
    MegatronCheckpoint(tmp_path / "m")

    @examples(25)
    @given(how=damages(), early=st.booleans())
    def reads(how: Any, early: bool) -> None:
        head = int(len(whole) * 0.05) if early else len(whole)
        file.write_bytes(damaged(whole[:head], how) + whole[head:])
        try:
            MegatronCheckpoint(tmp_path / "m")
        except ConfigError as error:
            names(error, "model_optim_rng.pt", str(tmp_path / "m"))

    reads()


def test_a_shard_of_masked_sequences(tmp_path: Path) -> None:
    write_shard(tmp_path / "s.hdf5", rows=6)
    whole = (tmp_path / "s.hdf5").read_bytes()

    @examples(60)
    @given(how=damages(), early=st.booleans())
    def reads(how: Any, early: bool) -> None:
        head = int(len(whole) * 0.3) if early else len(whole)
        (tmp_path / "s.hdf5").write_bytes(damaged(whole[:head], how) + whole[head:])
        try:
            for rows, columns, part in file_formats.read_shard_blocks(str(tmp_path / "s.hdf5"), 70):
                assert 0 < part <= 1 and (rows < 70).all()
                assert all(len(lengths) == len(rows) for _, lengths in columns.values())
        except DataError as error:
            names(error, "s.hdf5")

    reads()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """A checkpoint in tmp_path / "whole"; what is returned makes a state to be loaded into."""
    state = {"w": torch.arange(40.0).view(8, 5), "more": {"step": 7, "text": "x", "rng": np.arange(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
    return lambda: {"w": torch.zeros(8, 5), "more": {"step": 0, "text": "", "rng": None}}


def test_a_checkpoint_of_a_script(tmp_path: Path, saved: Callable[[], dict[str, Any]]) -> None:
    """It is read as it was written, or not at all."""

    @examples(60)
    @given(how=damages(), name=st.sampled_from([".metadata", "__0_0.distcp"]))
    def reads(how: Any, name: str) -> None:
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "one")
        (tmp_path / "one" / name).write_bytes(damaged((tmp_path / "one" / name).read_bytes(), how))
        state = saved()
        try:
            loader.load(state, checkpoint_id=tmp_path / "one")
        except CheckpointError as error:
            names(error, str(tmp_path / "one"))
        else:
            assert torch.equal(state["w"], torch.arange(40.0).view(8, 5))
            assert (state["more"]["step"], state["more"]["text"], state["more"]["rng"].tolist()) == (7, "x", [0, 1, 2])

    reads()


@pytest.mark.parametrize(
    ("chunks", "whole"),
    [
        ([(0, 8)], True), ([(0, 3), (3, 5)], True), ([(0, 3), (3, 0), (3, 5)], True), ([(0, 8), (0, 8)], True),
        ([(0, 0)], False), ([(0, 3), (2, 5)], False), ([(0, 3), (4, 5)], False), ([(-1, 9)], False), ([], False),
    ],
)  # fmt: skip
def test_chunks_have_to_be_all_of_a_tensor(chunks: list[tuple[int, int]], whole: bool) -> None:
    """Pairs of first row and number of rows, of eight rows."""
    parts = [ChunkStorageMetadata(torch.Size((begin, 0)), torch.Size((rows, 5))) for begin, rows in chunks]
    assert _is_covered(TensorStorageMetadata(TensorProperties(), torch.Size((8, 5)), parts)) == whole


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["metadata", "value"])
def test_no_code_of_a_scripts_checkpoint_is_run(
    where: str, tmp_path: Path, saved: Callable[[], dict[str, Any]]
) -> None:
    if where == "metadata":
        (tmp_path / "whole" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "made")))
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read \(it asks for posix\.mkdir"):
            DistributedFileSystemReader(tmp_path / "whole").read_metadata()
    else:
        dcp.save({"w": torch.zeros(1), "more": Runs(tmp_path / "made")}, checkpoint_id=tmp_path / "whole", no_dist=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        loader.load(
            {"w": torch.zeros(1), "more": None} if where == "value" else saved(), checkpoint_id=tmp_path / "whole"
        )
    assert not (tmp_path / "made").exists()


class Asks:
    """Is pickled as a call of getattr, as the values of an enumeration are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ShardedTensor, "_init_from_local_shards")


def test_a_local_state_of_a_script_has_no_attribute_of_anything(tmp_path: Path) -> None:
    from torch.distributed._shard.api import load_with_process_group

    import phalanx.compat.sagemaker  # noqa: F401

    torch.save({"w": torch.ones(1), "n": np.int64(3), "asks": Asks()}, tmp_path / "0.pt")
    with (
        pytest.raises(CheckpointError, match="has _init_from_local_shards of"),
        load_with_process_group(None),
    ):
        torch.load(tmp_path / "0.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "0.pt")
