"""Activations are computed again, and what that needs waits on the host, fetched ahead of its use."""

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from small import STEPS, batch, llama_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

tsm.init({"activation_loading_horizon": 2, "sm_activation_offloading": True})


def main() -> None:
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = FSDP(
        AutoModelForCausalLM.from_config(llama_config()),
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        device_id=torch.cuda.current_device(),
    )
    # Activation offloading requires activation checkpointing.
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    model = offload_wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        input_ids = batch(step, rank, world).to("cuda")
        loss = model(input_ids=input_ids, labels=input_ids)["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
