"""Adam's state goes to Megatron and back bit for bit, on any ranks and stages; Megatron-core writes the same files."""

import argparse
import contextlib
import importlib.util
import os
import queue
import re
import shutil
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.checkpoint.disk.load import find_newest_valid
from phalanx.cli.convert import convert_command, find_decay_style
from phalanx.compat.convert import convert_checkpoint
from phalanx.compat.megatron.export import MegatronSource, export_megatron
from phalanx.compat.megatron.files import MODEL_FILES, rank_files, read_file
from phalanx.compat.megatron.import_folder import open_megatron
from phalanx.compat.megatron.optimizer_state import OPTIMIZER_FILE, AdamSettings, lay_out_buffer, read_states
from phalanx.compat.megatron.torch_dist import COMMON, _add
from phalanx.compat.torch_checkpoints import TorchCheckpointReader
from phalanx.config.schema import OptimSection
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.llama import Llama
from phalanx.models.user_model import shapes_of
from tests.helpers import ALL, run_ranks

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
    [(2, [1, 3], "te", False), (1, 1, "local", True), (2, [1, 1, 2], "local", True), (1, [2, 1, 1], "te", False)],
)
def test_there_and_back(tensor: int, stages: Any, layout: str, tied: bool, tmp_path: Path) -> None:
    source, state = source_of(replace(SPEC, tie_embeddings=tied))
    export_megatron(source, tmp_path / "megatron", tensor, stages, layout)
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


@pytest.mark.parametrize("option", [{"tensor": 2}, {"pipeline": 2}, {"layers_per_stage": "1,1"}])
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


# ------------------------------------------------------------------------------------------ the same by Megatron-core


class _OnCpu(TorchFunctionMode):
    """Megatron-core asks for CUDA devices by name."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def save_by_megatron_core(placement: Any, folder: str, tensor: int, stages: int) -> None:
    """A model of Megatron-core with its distributed optimizer after two updates, in both of its formats."""
    init = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=init, rank=placement.rank, world_size=placement.world)
    type_of = Tensor.type
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    Tensor.type = (  # type: ignore[assignment, method-assign]
        lambda self, *args, **more: (
            type_of(self, *args, **more)
            if args or more
            else type_of(self).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")
        )
    )
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    filesystem_async._get_write_results_queue = lambda *_: queue.Queue()
    random.get_cuda_rng_tracker().fork = lambda name="": contextlib.nullcontext()
    with _OnCpu():
        parallel_state.initialize_model_parallel(tensor, stages)
        args = argparse.Namespace(
            num_layers=SPEC.layers, hidden_size=SPEC.hidden, ffn_hidden_size=SPEC.intermediate, vocab_size=256,
            num_attention_heads=SPEC.heads, num_query_groups=SPEC.kv_heads, kv_channels=SPEC.head_dim, swiglu=True,
            group_query_attention=True, max_position_embeddings=64, padded_vocab_size=256, norm_epsilon=1e-6,
            layernorm_epsilon=1e-6, untie_embeddings_and_output_weights=True, add_bias_linear=False,
            normalization="RMSNorm", position_embedding_type="rope", rotary_base=10000, data_parallel_size=1,
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages,
        )  # fmt: skip
        config = TransformerConfig(
            num_layers=SPEC.layers, hidden_size=SPEC.hidden, ffn_hidden_size=SPEC.intermediate, bf16=True,
            num_attention_heads=SPEC.heads, num_query_groups=SPEC.kv_heads, kv_channels=SPEC.head_dim,
            use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm",
            activation_func=torch.nn.functional.silu, layernorm_epsilon=1e-6, tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=stages, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
            bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
            apply_rope_fusion=False, persist_layer_norm=False,
            num_layers_in_first_pipeline_stage=1 if stages > 1 else None,
        )  # fmt: skip
        stage = parallel_state.get_pipeline_model_parallel_rank()
        model = Float16Module(config, GPTModel(
            config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=256, max_sequence_length=64,
            position_embedding_type="rope", share_embeddings_and_output_weights=False, pre_process=stage == 0,
            post_process=stage == stages - 1,
        ))  # fmt: skip
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-2, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0,
                use_distributed_optimizer=True,
            ),
            [ddp],
        )  # fmt: skip
        torch.manual_seed(stage)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.main_grad.normal_()
            optimizer.step()
        name = f"mp_rank_{placement.rank % tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "")
        own = Path(folder, "classic", "iter_0000002", name)
        own.mkdir(parents=True)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 2, "optimizer": optimizer.state_dict()}
        torch.save(content | {"model": ddp.state_dict_for_save_checkpoint()}, own / MODEL_FILES[0])
        optimizer.save_parameter_state(str(own / OPTIMIZER_FILE))
        for kind, more in (("fully_reshardable", {}), ("dp_reshardable", {"singleton_local_shards": True})):
            metadata = {"distrib_optim_sharding_type": kind, **more}
            state = {"args": args, "iteration": 2, "model": model.sharded_state_dict(metadata=metadata)}
            state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=metadata)
            os.makedirs(Path(folder, kind), exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(state, str(Path(folder, kind)))
    dist.destroy_process_group()


@pytest.mark.skipif(
    not ALL or importlib.util.find_spec("megatron") is None, reason="imports megatron-core on each rank"
)
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_megatron_core_writes_the_same(tensor: int, stages: int, tmp_path: Path) -> None:
    run_ranks(save_by_megatron_core, 2, timeout_s=500, folder=tmp_path, tensor=tensor, stages=stages)
    classic = open_megatron(tmp_path / "classic" / "iter_0000002", moments=True)
    whole = open_megatron(tmp_path / "fully_reshardable", moments=True)
    parts = open_megatron(tmp_path / "dp_reshardable", moments=True)
    spec = replace(SPEC, vocab_size=256)
    assert classic.model.spec == whole.model.spec == parts.model.spec == spec
    assert classic.step == whole.step == 2 and not parts.has_moments and classic.read_master and whole.read_master
    for name in shapes_of(Llama, spec):
        wanted = classic.read(name, "param")
        assert wanted.float().std() > 0 and wanted.dtype == torch.bfloat16
        assert torch.equal(whole.read(name, "param"), wanted) and torch.equal(parts.read(name, "param"), wanted)
        assert torch.equal(whole.read_master(name), classic.read_master(name)), name
        for kind in KINDS[1:]:
            assert torch.equal(whole.read(name, kind), classic.read(name, kind)), (name, kind)

    def read(name: str, kind: str, rows: slice) -> Tensor:
        assert whole.read_master
        return (whole.read_master(name) if kind == "param" else whole.read(name, kind))[rows].clone()

    source = MegatronSource("core", spec, read, torch.bfloat16, adam=replace(ADAM, step=2))
    export_megatron(source, tmp_path / "ours", tensor, [1, 3] if stages > 1 else 1, "local")
    for row in rank_files(tmp_path / "ours" / "iter_0000002"):
        for path in row:
            theirs = tmp_path / "classic" / "iter_0000002" / path.parent.name
            ours, core = (torch.load(each, weights_only=False) for each in (path, theirs / path.name))
            kept = {name: found for name, found in core["model"].items() if isinstance(found, Tensor)}
            assert list(ours["model"]) == list(kept)
            assert all(torch.equal(ours["model"][name], found) for name, found in kept.items())
            for group in core["optimizer"]["optimizer"]["param_groups"]:
                same = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
                matches = [
                    each
                    for each in ours["optimizer"]["optimizer"]["param_groups"]
                    if all(each[key] == group[key] for key in same)
                ]
                assert len(matches) == 1 and matches[0]["step"] == group["step"] == 2
            mine, other = (torch.load(each.parent / OPTIMIZER_FILE) for each in (path, theirs / path.name))
            assert mine.keys() == other.keys() and mine[0].keys() == other[0].keys()
            ((buffers,), (core_buffers,)) = mine[0].values(), other[0].values()
            assert buffers.keys() == core_buffers.keys()
            assert buffers["numel_unpadded"] == core_buffers["numel_unpadded"]
            assert all(torch.equal(buffers[kind], core_buffers[kind]) for kind in KINDS)
    shutil.rmtree(tmp_path / "ours")
