"""Saves beside the training, sharded and local, goes on from there, and writes the whole model at the end.

phalanx run --nproc 4 examples/sagemaker/checkpoint_and_resume.py FOLDER [sharded|local] [STOP AFTER]
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from small import STEPS, batch, llama_config
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.sagemaker import state
from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from torch.sagemaker.utils.process_group_utils import get_global_ranks
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"
KIND = sys.argv[2] if len(sys.argv) > 2 else "sharded"
STOP = int(sys.argv[3]) if len(sys.argv) > 3 else STEPS


def replication_group():
    """The ranks that hold the same shard as this one."""
    mine = None
    for ranks in state.ranker.get_rep_groups():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group, min(ranks)
    return mine


def save_sharded(model, optimizer, step, group, coordinator):
    maybe_finalize_async_calls(blocking=True, process_group=group)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "total_steps": step,
        }
    if state.ranker.get_rep_rank(dist.get_rank()) == 0:
        folder = os.path.join(FOLDER, f"tp{state.tp_rank}_ep{state.ep_rank}")
        async_save(state_dict, checkpoint_id=folder, process_group=group, coordinator_rank=coordinator)


def load_sharded(model, optimizer, group, coordinator):
    reader = DistributedFileSystemReader(os.path.join(FOLDER, f"tp{state.tp_rank}_ep{state.ep_rank}"))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {"model": model.state_dict(), "total_steps": 0}
        load(state_dict, storage_reader=reader, process_group=group, coordinator_rank=coordinator)
        model.load_state_dict(state_dict["model"])
        optim_state = load_sharded_optimizer_state_dict(
            model_state_dict=state_dict["model"],
            optimizer_key="optimizer",
            storage_reader=reader,
            process_group=group,
        )
        flat = FSDP.optim_state_dict_to_load(model, optimizer, optim_state["optimizer"], group=model.process_group)
        optimizer.load_state_dict(flat)
    return state_dict["total_steps"]


def local_state(model, optimizer, step):
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "total_steps": step}


def local_folder(model):
    return os.path.join(FOLDER, f"tp{state.tp_rank}_ep{state.ep_rank}_fsdp{model.rank}")


def main() -> None:
    dist.init_process_group("nccl")
    tsm.init({"hybrid_shard_degree": 2})
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = FSDP(
        AutoModelForCausalLM.from_config(llama_config()),
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if KIND == "sharded":
        group, coordinator = model.process_group, min(get_global_ranks(model.process_group))
    else:
        group, coordinator = replication_group()
    first = 0
    if os.path.exists(FOLDER):
        if KIND == "sharded":
            first = load_sharded(model, optimizer, group, coordinator)
        else:
            init_optim_state(optimizer, skip_empty_param=True)
            state_dict = local_state(model, optimizer, 0)
            load(
                state_dict=state_dict,
                process_group=group,
                coordinator_rank=coordinator,
                storage_reader=DistributedFileSystemReader(local_folder(model)),
            )
            first = state_dict["total_steps"]
    for step in range(first, STOP):
        input_ids = batch(step, rank, world).to("cuda")
        loss = model(input_ids=input_ids, labels=input_ids)["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
        if step == STOP - 1 and KIND == "sharded":
            save_sharded(model, optimizer, step + 1, group, coordinator)
        elif step == STOP - 1:
            maybe_finalize_async_calls(blocking=True, process_group=group)
            async_save(
                local_state(model, optimizer, step + 1),
                checkpoint_id=local_folder(model),
                process_group=group,
                coordinator_rank=coordinator,
            )
    maybe_finalize_async_calls(blocking=True, process_group=group)
    if STOP == STEPS:
        with FSDP.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True, offload_to_cpu=True, translate_on_save=True),
        ):
            state_dict = model.state_dict()
        if rank == 0:
            # This name is needed for from_pretrained to work.
            torch.save(state_dict, os.path.join(FOLDER, "pytorch_model.bin"))
            llama_config().save_pretrained(FOLDER)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
