"""Megatron-core's own files beside ours: it writes the same, and reads what is written here."""

import argparse
import contextlib
import importlib.util
import os
import queue
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.compat.megatron.export import MegatronSource, export_megatron
from phalanx.compat.megatron.files import MODEL_FILES, rank_files
from phalanx.compat.megatron.import_folder import open_megatron
from phalanx.compat.megatron.optimizer_state import OPTIMIZER_FILE
from phalanx.compat.torch_checkpoints import TorchCheckpointReader
from phalanx.models.llama import Llama
from phalanx.models.user_model import shapes_of
from tests.helpers import ALL, run_ranks
from tests.unit.test_megatron_optimizer import ADAM, KINDS, SPEC


class _OnCpu(TorchFunctionMode):
    """Megatron-core asks for CUDA devices by name."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


STACKED = {
    "distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}  # fmt: skip


def save_by_megatron_core(
    placement: Any, folder: str, tensor: int, stages: int, ours: str = "", into: str = "classic"
) -> None:
    """A model of Megatron-core with its distributed optimizer after two updates, in its formats; or what its reader
    takes from the distributed checkpoint `ours`, in the classic one."""
    init = f"file://{folder}/{into}-meeting"
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
        for _ in range(0 if ours else 2):
            for parameter in model.parameters():
                parameter.main_grad.normal_()
            optimizer.step()
        if ours:
            for parameter in model.parameters():
                parameter.data.zero_()
            asked = {"model": model.sharded_state_dict(metadata=STACKED)}
            asked["optimizer"] = optimizer.sharded_state_dict(asked["model"], is_loading=True, metadata=STACKED)
            loaded = dist_checkpointing.load(asked, ours)
            assert loaded["content_metadata"] == STACKED and loaded["iteration"] == 2
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        name = f"mp_rank_{placement.rank % tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "")
        own = Path(folder, into, "iter_0000002", name)
        own.mkdir(parents=True)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 2, "optimizer": optimizer.state_dict()}
        torch.save(content | {"model": ddp.state_dict_for_save_checkpoint()}, own / MODEL_FILES[0])
        optimizer.save_parameter_state(str(own / OPTIMIZER_FILE))
        numbered = {"singleton_local_shards": True}
        kinds = ("fully_reshardable", numbered), ("dp_reshardable", numbered), ("stacked", STACKED)
        for kind, more in () if ours else kinds:
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
    export_megatron(source, tmp_path / "dist", ckpt_format="torch_dist")
    ours, theirs = (TorchCheckpointReader(tmp_path / each) for each in ("dist/iter_0000002", "stacked"))
    ours_known, theirs_known = ours.known.state_dict_metadata, theirs.known.state_dict_metadata
    assert theirs_known.keys() <= ours_known.keys()
    assert all("_extra_state" in key for key in ours_known.keys() - theirs_known.keys())  # of Transformer Engine
    for key, about in ours.tensors().items():
        other = theirs.tensors()[key]
        assert (about.size, about.properties.dtype) == (other.size, other.properties.dtype), key
        assert torch.equal(ours.load(key), theirs.load(key)), key
    more = {"ours": str(tmp_path / "dist" / "iter_0000002"), "into": "again"}
    run_ranks(save_by_megatron_core, 2, timeout_s=500, folder=tmp_path, tensor=tensor, stages=stages, **more)
    again = open_megatron(tmp_path / "again" / "iter_0000002", moments=True)
    assert again.read_master
    for name in shapes_of(Llama, spec):
        assert torch.equal(again.read_master(name), classic.read_master(name)), name
        for kind in KINDS:
            assert torch.equal(again.read(name, kind), classic.read(name, kind)), (name, kind)
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
