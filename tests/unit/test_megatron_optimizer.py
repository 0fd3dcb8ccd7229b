"""Adam's state goes to Megatron and back bit for bit, on any ranks and stages."""

import argparse
import re
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from torch import Tensor

from phalanx.checkpoint.disk.load import find_newest_valid
from phalanx.cli.convert import Format, convert_command, find_decay_style
from phalanx.compat.convert import convert_checkpoint
from phalanx.compat.megatron.export import MegatronSource, export_megatron
from phalanx.compat.megatron.files import rank_files, read_file
from phalanx.compat.megatron.import_folder import open_megatron
from phalanx.compat.megatron.optimizer_state import OPTIMIZER_FILE, AdamSettings, lay_out_buffer, read_states
from phalanx.compat.megatron.torch_dist import COMMON, _add
from phalanx.compat.torch_checkpoints import TorchCheckpointReader
from phalanx.config.schema import OptimSection
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.llama import Llama
from phalanx.models.user_model import shapes_of

SPEC = ModelSpec(
    vocab_size=200, hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=64, norm_eps=1e-6
)
ADAM = AdamSettings(
    step=7, lr=1e-3, min_lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decay_style="cosine",
    done=112, warmup=32, decay=1600,
)  # fmt: skip
KINDS = ("param", "exp_avg", "exp_avg_sq")


def source_of(spec: ModelSpec) -> tuple[MegatronSource, dict[tuple[str, str], Tensor]]:
    """Random masters and moments."""
    torch.manual_seed(0)
    shapes = shapes_of(Llama, spec)
    state = {(name, kind): torch.randn(shape) for name, shape in shapes.items() for kind in KINDS}

    def read(name: str, kind: str, rows: slice) -> Tensor:
        return state[name, kind][rows].clone()

    return MegatronSource("random", spec, read, torch.bfloat16, adam=ADAM), state


@pytest.mark.parametrize(
    ("tensor", "stages", "layout", "tied"),
    [(2, [1, 3], "te", False), (1, 1, "local", True), (2, [1, 1, 2], "local", True), (1, [2, 1, 1], "te", False),
     (1, 1, "torch_dist", True), (1, 1, "torch_dist", False)],
)  # fmt: skip
def test_there_and_back(tensor: int, stages: Any, layout: str, tied: bool, tmp_path: Path) -> None:
    source, state = source_of(replace(SPEC, tie_embeddings=tied))
    named = ("te", layout) if layout == "torch_dist" else (layout,)
    export_megatron(source, tmp_path / "megatron", tensor, stages, *named)
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "7"
    found = open_megatron(tmp_path / "megatron", moments=True)
    assert found.has_moments and found.step == 7 and found.model.spec == source.spec and found.read_master
    for (name, kind), wanted in state.items():
        if kind == "param":
            assert torch.equal(found.read_master(name), wanted), name
            assert torch.equal(found.read(name, kind), wanted.bfloat16()), name
        else:
            assert torch.equal(found.read(name, kind), wanted), (name, kind)
    convert_checkpoint(tmp_path / "megatron", tmp_path / "run", config=None, to_run=True)
    checkpoint = find_newest_valid(tmp_path / "run" / "checkpoints", None, lambda kind, details: None)
    assert checkpoint is not None and checkpoint.header["step"] == 7
    for (name, kind), wanted in state.items():
        held = torch.empty(wanted.numel())
        checkpoint.read_into(name, kind, 0, held.numel(), held)
        assert torch.equal(held.view_as(wanted), wanted), (name, kind)


def test_no_more_than_a_file_of_a_distributed_checkpoint_is_held(tmp_path: Path) -> None:
    source, state = source_of(SPEC)
    given: list[tuple[tuple[str, str], weakref.ref[Tensor]]] = []

    def read(name: str, kind: str, rows: slice) -> Tensor:
        found = source.read(name, kind, rows)
        layer = re.match(r"layers\.\d+", name)
        own = layer[0] if layer else name, kind
        held = {other for other, each in given if each() is not None}
        assert len(held - {own}) <= 1, (own, held)  # the last file's, until the next begins
        given.append((own, weakref.ref(found)))
        return found

    export_megatron(replace(source, read=read), tmp_path / "megatron", ckpt_format="torch_dist")
    assert len(given) == len(state) * 4 / 3  # as weights and as the three kinds


def test_no_more_than_a_file_and_what_a_part_is_cut_from_is_held(tmp_path: Path) -> None:
    source, state = source_of(SPEC)
    given: list[weakref.ref[Tensor]] = []
    elements: dict[str, int] = defaultdict(int)

    def read(name: str, kind: str, rows: slice) -> Tensor:
        assert sum(each() is not None for each in given) <= 3, name  # queries, keys and values
        found = source.read(name, kind, rows)
        elements[name] += found.numel()
        given.append(weakref.ref(found))
        return found

    export_megatron(replace(source, read=read), tmp_path / "megatron", 2, 1)
    assert len(given) == 2 * 4 * len(state) / 3  # by two ranks, as weights and as the three kinds
    for name, count in elements.items():  # rows are read by the rank that has them, columns with their whole matrix
        divided = not name.endswith((".o.weight", ".down.weight", "norm.weight"))
        assert count == 4 * state[name, "param"].numel() * (1 if divided else 2), name


def test_a_schedule_has_megatrons_name_or_is_refused(tmp_path: Path) -> None:
    names = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
    for own, theirs in names.items():
        assert find_decay_style(OptimSection(schedule=own), tmp_path) == theirs
    assert find_decay_style(OptimSection(schedule="polynomial", power=1.0), tmp_path) == "linear"
    with pytest.raises(ConfigError, match=r"schedule polynomial, which Megatron does not have; export its weights"):
        find_decay_style(OptimSection(schedule="polynomial", power=2.0), tmp_path)


@pytest.mark.parametrize(
    "option", [{"tensor": 2}, {"pipeline": 2}, {"layers_per_stage": "1,1"}, {"ckpt_format": Format.torch_dist}]
)
def test_ranks_are_for_megatron_alone(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are for --to megatron; remove them, or add that"):
        convert_command(tmp_path / "a", tmp_path / "b", **option)


def test_buckets_do_not_matter_for_multiples_of_the_alignment() -> None:
    even = [("a", 128), ("b", 64), ("c", 640)]
    assert lay_out_buffer(even) == lay_out_buffer(even, ("a", "c"), bucket_elements=100)
    assert lay_out_buffer(even) == ({"c": 0, "b": 640, "a": 704}, 832)
    odd = [("a", 70), ("b", 33)]
    assert lay_out_buffer(odd) == ({"b": 0, "a": 64}, 134)
    assert lay_out_buffer(odd, bucket_elements=33) == ({"b": 0, "a": 33}, 103)
    assert lay_out_buffer(odd, alignment=1) == ({"b": 0, "a": 33}, 103)


def test_state_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    source, _ = source_of(SPEC)
    export_megatron(source, tmp_path / "megatron", 1, 2)
    path = rank_files(tmp_path / "megatron" / "iter_0000007")[1][0].parent / OPTIMIZER_FILE
    content = torch.load(path, weights_only=True)
    (buffers,) = content[0].values()

    def refusal() -> str:
        with pytest.raises(ConfigError) as caught:
            convert_checkpoint(tmp_path / "megatron", tmp_path / "run", config=None, to_run=True)
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    buffers["param"][100] += 1
    torch.save(content, path)
    assert "that are not the parameters of the model beside it in any layout" in refusal()
    torch.save({0: {"exp_avg": torch.ones(2)}}, path)
    assert "in a layout that is not known here" in refusal()
    path.unlink()
    assert "holds no Adam state for every parameter" in refusal()
    convert_checkpoint(tmp_path / "megatron", tmp_path / "hf", config=None)  # the weights need none of it
    with pytest.raises(ConfigError, match="has even stages and weights alone"):
        export_megatron(replace(source, spec=replace(SPEC, kv_heads=4)), tmp_path / "out", 1, 1, "megatron-llama")
    with pytest.raises(ConfigError, match="--layers-per-stage 1,2 is of 3; give each stage one or more, 4 in all"):
        export_megatron(source, tmp_path / "out", 1, [1, 2])


def write_torch_dist(classic: Path, folder: Path, master: str) -> None:
    """The same checkpoint, of one rank, as Megatron-core's distributed one."""
    path = rank_files(classic)[0][0]
    file = read_file(path)
    states = read_states(path, file.chunks, file.args or {})
    assert states is not None
    named = {f"optimizer.state.{master if kind == 'param' else kind}.": states[kind][0] for kind in KINDS}
    saved: dict[str, Any] = {}
    for prefix, tensors in (("", file.chunks[0]), *named.items()):
        layers: dict[str, list[Tensor]] = {}
        for name, lazy in tensors.items():
            found, layer = lazy.load().clone(), re.fullmatch(r"decoder\.layers\.\d+\.(.+)", name)
            if layer is None:
                saved[prefix + name] = found
            elif name.endswith("linear_fc1.weight"):
                saved |= zip((f"{prefix}{name}_w", f"{prefix}{name}_v"), found.chunk(2), strict=True)
            else:
                layers.setdefault(layer[1], []).append(found)
        saved |= {f"{prefix}decoder.layers.{name}": torch.stack(each) for name, each in layers.items()}
    dist_checkpoint.save(saved, checkpoint_id=folder, no_dist=True)
    torch.save({"args": argparse.Namespace(**(file.args or {})), "iteration": file.iteration}, folder / COMMON)


@pytest.mark.parametrize("master", ["param", "fp32_param"])
def test_a_distributed_checkpoint_has_the_same_and_is_read_once(
    master: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, state = source_of(SPEC)
    export_megatron(source, tmp_path / "megatron", 1, 1, "local")
    write_torch_dist(tmp_path / "megatron" / "iter_0000007", tmp_path / "dist", master)
    found = open_megatron(tmp_path / "dist", moments=True)
    assert found.has_moments and found.step == 7 and found.model.spec == SPEC and found.read_master
    for (name, kind), wanted in state.items():
        assert torch.equal(found.read_master(name) if kind == "param" else found.read(name, kind), wanted), name
    read, pieces = TorchCheckpointReader.load, list[tuple[Any, ...]]()

    def count(self: TorchCheckpointReader, *which: Any) -> Tensor:
        pieces.append(which)
        return read(self, *which)

    monkeypatch.setattr(TorchCheckpointReader, "load", count)
    convert_checkpoint(tmp_path / "dist", tmp_path / "hf", config=None)
    assert len(pieces) == len(set(pieces)) == 3 + 7 * SPEC.layers
    with pytest.raises(ConfigError, match="a model of 999999999 layers"):
        _add(read, "decoder.layers.x", "decoder.layers.x", argparse.Namespace(
            size=(999999999,), properties=argparse.Namespace(dtype=torch.float32)), {})  # fmt: skip
