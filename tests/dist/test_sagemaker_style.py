"""A script that imports, asks for and saves what AWS's public example for that library does, where nothing that it
needs is installed: no Transformer Engine, no flash attention, no GPU."""

import re
from pathlib import Path

import pytest

from tests.dist.scripts import run_script, written
from tests.helpers import run_ranks, some

SCRIPT = """
import os
import sys
import functools
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
import transformer_engine
from transformer_engine.common.recipe import DelayedScaling, Format
from accelerate import init_empty_weights
from torch.distributed import checkpoint
from torch.distributed._shard.api import load_with_process_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.moe.moe_config import MoEConfig
from torch.sagemaker.moe.moe_layer import MoELayer
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from torch.sagemaker.utils.process_group_utils import get_global_ranks
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MixtralConfig, set_seed

kind, backend, how, folder, fp8 = sys.argv[1:]
if backend == "smddp":
    import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group(backend)
rank = dist.get_rank()
tsm.init()
torch.cuda.set_device(rank % torch.cuda.device_count())

shape = dict(vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=16, use_cache=False, tie_word_embeddings=False)
config = {
    "llama": lambda: LlamaConfig(num_key_value_heads=2, **shape),
    "neox": lambda: GPTNeoXConfig(**shape),
    "mixtral": lambda: MixtralConfig(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **shape),
}[kind]()


def built():
    set_seed(1)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
    assert model.config._attn_implementation == "sdpa"
    moe = MoEConfig(smp_moe=True, random_seed=1, moe_load_balancing="aux_loss") if kind == "mixtral" else None
    model = tsm.transform(model, config=moe)
    assert sum(isinstance(each, MoELayer) for each in model.modules()) == 2 * (kind == "mixtral")
    initer = DelayedParamIniter(model)
    mixed = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
            mixed_precision=mixed, sharding_strategy=ShardingStrategy.HYBRID_SHARD, forward_prefetch=1,
            limit_all_gathers=1, device_id=torch.cuda.current_device(), use_orig_params=how != "local",
            param_init_fn=initer.get_param_init_fn(), post_param_init_fn=initer.get_post_param_init_fn(),
            sync_module_states=False,
        )
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT, checkpoint_fn=None)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda each: isinstance(each, TransformerLayer)
    )
    model = offload_wrapper(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def make_recipe():
    return DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")


def train(model, optimizer, steps):
    recipe = early or make_recipe()
    for step in steps:
        ids = (torch.arange(2).unsqueeze(1) * 7 + step + 3 * torch.arange(16)) % 48
        with transformer_engine.pytorch.fp8_autocast(enabled=fp8 != "0", fp8_recipe=recipe):
            loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item():.6f}")


def save(model, optimizer):
    if how == "local":
        os.makedirs(folder, exist_ok=True)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": config}
        torch.save(state, os.path.join(folder, f"{rank}.pt"))
        return
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"optimizer": FSDP.optim_state_dict(model, optimizer), "model": model.state_dict(), "config": config}
    if tsm.state.ranker.get_rep_rank(rank) == 0:
        checkpoint.save_state_dict(
            state_dict=state, storage_writer=checkpoint.FileSystemWriter(place()),
            planner=checkpoint.DefaultSavePlanner(), process_group=model.process_group,
            coordinator_rank=min(get_global_ranks(model.process_group)),
        )


def place():
    return os.path.join(folder, f"tp{tsm.state.tp_rank}_ep{tsm.state.ep_rank}")


def load(model, optimizer):
    if how == "local":
        with load_with_process_group(model.process_group):
            state = torch.load(os.path.join(folder, f"{rank}.pt"))
        assert state["config"].to_dict() == config.to_dict()
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        return
    kept = ShardedOptimStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, optim_state_dict_config=kept):
        state = {"model": model.state_dict()}
        checkpoint.load_state_dict(
            state_dict=state, storage_reader=checkpoint.FileSystemReader(place()), process_group=model.process_group,
            coordinator_rank=min(get_global_ranks(model.process_group)), planner=checkpoint.DefaultLoadPlanner(),
        )
        model.load_state_dict(state["model"])
        found = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"], optimizer_key="optimizer",
            storage_reader=checkpoint.FileSystemReader(place()), process_group=model.process_group,
        )
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=found["optimizer"])
        )


early = make_recipe() if fp8 == "early" else None
model, optimizer = built()
train(model, optimizer, range(2))
save(model, optimizer)
dist.barrier()
train(model, optimizer, range(2, 4))
print("resumed")
model, optimizer = built()
load(model, optimizer)
train(model, optimizer, range(2, 4))
dist.destroy_process_group()
"""


def started(folder: Path, kind: str, backend: str, how: str, world: int, settings: str, fp8: str = "0") -> list[str]:
    arguments = [kind, backend, how, str(folder / "saved"), fp8]
    script = written(folder, SCRIPT)
    printed: list[str] = run_ranks(
        run_script, world, timeout_s=200, script=script, arguments=arguments, settings=settings
    )
    return printed


@pytest.mark.parametrize(
    ("kind", "backend", "how", "world", "settings"),
    some(
        [
            ("llama", "nccl", "local", 2, "{}"),
            ("llama", "smddp", "sharded", 4, '{"hybrid_shard_degree": 2}'),
            ("mixtral", "nccl", "sharded", 2, "{}"),
            ("neox", "smddp", "sharded", 4, '{"tensor_parallel_degree": 2}'),
            ("neox", "smddp", "sharded", 2, '{"tensor_parallel_degree": 2}'),
            ("mixtral", "smddp", "sharded", 4, '{"expert_parallel_degree": 2}'),
        ],
        0,
        4,
        5,
    ),
)
def test_it_trains_saves_and_resumes(
    tmp_path: Path, kind: str, backend: str, how: str, world: int, settings: str
) -> None:
    printed = started(tmp_path, kind, backend, how, world, settings)
    for text in printed:
        curve, resumed = (re.findall(r"loss (\S+)", part) for part in text.split("resumed"))
        assert len(curve) == 4
        assert float(curve[3]) < float(curve[0]), "it does learn"
        assert resumed == curve[2:], "as if it had not been stopped"


def test_fp8_is_in_effect_also_where_blocks_are_computed_again(tmp_path: Path) -> None:
    """With block scaling; and where the recipe is made before the model with delayed scaling, whose history both kinds
    of checkpoints bring."""
    curves = {}
    for fp8, how in (("0", "sharded"), ("1", "sharded"), ("early", "sharded"), ("early", "local")):
        folder = tmp_path / f"{fp8} {how}"
        folder.mkdir()
        (text,) = started(folder, "llama", "nccl", how, 1, "{}", fp8=fp8)
        curve, resumed = (re.findall(r"loss (\S+)", part) for part in text.split("resumed"))
        assert resumed == curve[2:]
        curves[fp8, how] = [float(loss) for loss in curve]
    plain, block, delayed, local = curves.values()
    assert delayed == local and delayed[0] == plain[0]  # in the first step nothing is rounded
    for found in (block, delayed[1:]):
        differences = [abs(a - b) for a, b in zip(found, plain[-len(found) :], strict=True)]
        assert min(differences) > 0 and max(differences) < 0.02
