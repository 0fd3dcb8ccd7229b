"""A plain FSDP loop that saves and goes on from what it has saved; nothing in it is Phalanx's.

    phalanx run --nproc 2 examples/fsdp_loop.py CHECKPOINTS                 # two ranks
    torchrun --nproc-per-node 2 examples/fsdp_loop.py CHECKPOINTS           # the same

Started on several nodes (docs/launching.md), it is started again when a node is lost. It needs no more for that than
any script that is to be resumed: all nodes see CHECKPOINTS, and it begins with the newest whole one. Any number of
ranks may do so.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, GLOBAL_BATCH = 64, 3, 24


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole: what is written last makes it so."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, default=None)


def batch(step: int, rank: int, world: int, device: torch.device) -> torch.Tensor:
    """A rank's samples of a step: of all ranks together the same, however many there are."""
    draws = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=draws)[rank::world].to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(f"rank {rank} of {world} starts, after {restarts} restarts", flush=True)

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu" if accelerator is None else f"{accelerator.type}:{os.environ['LOCAL_RANK']}")
    if accelerator is not None:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).to(device)
    mesh = init_device_mesh(device.type, (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    first = 1
    if (found := newest(options.checkpoints)) is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=found)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = int(found.name.removeprefix("step-")) + 1
        if rank == 0:
            print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, options.steps + 1):
        samples = batch(step, rank, world, device)
        loss = (model(samples) - samples.roll(1, dims=1)).pow(2).sum() * world / (GLOBAL_BATCH * WIDTH)
        loss.backward()  # FSDP takes the mean over ranks
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.pause)
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)
        if step % options.every == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=options.checkpoints / f"step-{step:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
