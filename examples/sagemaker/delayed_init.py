"""Delayed initialisation: the model is made without memory, and each part gets its values when FSDP shards it."""

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from small import STEPS, batch, neox_config
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.utils import utils as tsm_utils
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer


def main() -> None:
    dist.init_process_group("nccl")
    tsm.init({"hybrid_shard_degree": 4, "random_seed": 12345})
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(neox_config())
    delayed_initer = DelayedParamIniter(model)
    with delayed_initer.validate_params_and_buffers_inited(), tsm_utils.timeit(True, "FSDP constructor", rank):
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({GPTNeoXLayer}),
            device_id=torch.cuda.current_device(),
            param_init_fn=delayed_initer.get_param_init_fn(),
            post_param_init_fn=delayed_initer.get_post_param_init_fn(),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        input_ids = batch(step, rank, world).to("cuda")
        loss = model(input_ids=input_ids, labels=input_ids)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
