"""Scripts that speak to an accelerator by name, where there is none."""

from pathlib import Path

import pytest
import torch

from tests.dist.scripts import run_script, written
from tests.helpers import run_ranks

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
assert dist.get_backend() == "gloo"
assert torch.cuda.device_count() == dist.get_world_size() == 2
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
torch.cuda.nvtx.range_push("forward")
torch.cuda.nvtx.range_pop()
device = torch.device("cuda", torch.cuda.current_device())
made = [
    torch.zeros(2, device="cuda"),
    torch.ones(2, device=device),
    torch.tensor([1.0], device="cuda:0"),
    torch.arange(3, device=local_rank),
    torch.randn(2).to("cuda"),
    torch.randn(2).to(device, non_blocking=True),
    torch.randn(2).to(device="cuda", dtype=torch.float64),
    torch.randn(2).to(local_rank),
    torch.randn(2).cuda(),
    torch.randn(2).cuda(local_rank, non_blocking=True),
    nn.Linear(2, 2).to("cuda").weight,
    nn.Linear(2, 2).to(device).weight,
    nn.Linear(2, 2).cuda().weight,
    nn.Linear(2, 2, device="cuda").weight,
    nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
    torch.zeros_like(torch.ones(1), device="cuda"),
]
with torch.device("cuda"):
    made.append(torch.zeros(2))
assert {each.device.type for each in made} == {"cpu"}
assert made[6].dtype == torch.float64
total = torch.ones(1).cuda()
dist.all_reduce(total, group=dist.new_group(backend="nccl"))
torch.cuda.synchronize()
x = nn.Linear(2, 2).cuda()
x(torch.ones(1, 2, device="cuda")).sum().backward()
assert x.weight.grad is not None
print(total.item())
dist.destroy_process_group()
"""


def test_what_is_sent_to_the_accelerator_stays_on_the_host(tmp_path: Path) -> None:
    script = written(tmp_path, SCRIPT)
    assert run_ranks(run_script, 2, script=script, arguments=[]) == ["2.0\n", "2.0\n"]


def test_a_script_has_its_arguments_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    script = written(tmp_path, "import sys\nfrom beside import WORD\nprint(__name__, sys.argv[1:], WORD)\n")
    assert run_ranks(run_script, 1, script=script, arguments=["--a", "b"]) == ["__main__ ['--a', 'b'] found\n"]
