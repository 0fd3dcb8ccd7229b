"""Hybrid sharding: each copy of the model is sharded over two GPUs; the smddp backend moves it."""

# The backend, by its two lines.
import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import torch
import torch.distributed as dist

dist.init_process_group(backend="smddp")

import torch.sagemaker as tsm  # noqa: E402

tsm.init({"hybrid_shard_degree": 2, "fsdp_cache_flush_warnings": True})

from small import STEPS, batch, llama_config  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402
from torch.sagemaker.grad_norm import clip_grad_norm_  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402


def main() -> None:
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    model = FSDP(
        AutoModelForCausalLM.from_config(llama_config()),
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        device_id=torch.cuda.current_device(),
    )
    if rank == 0:
        replicas = tsm.state.ranker.get_rep_groups()
        print(f"each of {world // model.world_size} copies on {model.world_size} ranks; the same shard: {replicas[0]}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        input_ids = batch(step, rank, world).cuda()
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
