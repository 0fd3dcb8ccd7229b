"""Tensor parallelism beside sharding: one line transforms the model, FSDP shards what each slice holds."""

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from small import STEPS, batch, llama_config
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from transformers import AutoModelForCausalLM


def main() -> None:
    tsm.init({"tensor_parallel_degree": 2, "random_seed": 12345})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config())
    model = tsm.transform(model)
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({TransformerLayer}),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The ranks of a tensor parallel group see the same sequences.
    data_rank, data_size = tsm.state.rank // tsm.state.tp_size, tsm.state.world_size // tsm.state.tp_size
    for step in range(STEPS):
        input_ids = batch(step, data_rank, data_size).to("cuda")
        loss = model(input_ids=input_ids, labels=input_ids)["loss"]
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(mean := loss.detach() / tsm.state.world_size)
        if tsm.state.rank == 0:
            print(f"step {step} loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
