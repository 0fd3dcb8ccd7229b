"""Scripts that speak to an accelerator by name, where there is none."""

import importlib.util
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
    nn.Linear(2, 2).to(local_rank).weight,
    nn.Linear(2, 2).to(device=local_rank, dtype=torch.bfloat16).weight,
    nn.Linear(2, 2).cuda().weight,
    nn.Linear(2, 2, device="cuda").weight,
    nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
    torch.zeros_like(torch.ones(1), device="cuda"),
    torch.ones(2).pin_memory(),
    torch.empty(2, pin_memory=True),
    torch.cuda.FloatTensor([1.0]),
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


STEERED = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
side = torch.cuda.Stream()
before.record()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.device(local_rank), torch.cuda.stream(side):
    model = DistributedDataParallel(nn.Linear(2, 1).to(local_rank), device_ids=[local_rank], output_device=local_rank)
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
after.record()
torch.cuda.synchronize()
assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
assert 0 < before.elapsed_time(after) < 60000
free, total = torch.cuda.mem_get_info()
assert 0 < free < total
assert "no accelerator" in torch.cuda.memory_summary()
torch.cuda.memory.empty_cache()
torch.cuda.memory.reset_peak_memory_stats()
torch.cuda.reset_max_memory_cached()
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
torch.set_default_device("cuda")
assert torch.zeros(1).device.type == "cpu"
torch.set_default_device(None)
path = sys.argv[1] + str(local_rank)
torch.save({"weight": model.module.weight, "step": 3}, path)
for place in ("cuda", f"cuda:{local_rank}", torch.device("cuda", 0), {"cpu": "cuda:0"}, None,
              lambda storage, _: storage.cuda(local_rank)):
    found = torch.load(path, map_location=place)
    assert found["weight"].device.type == "cpu" and torch.equal(found["weight"], model.module.weight)
print("done")
dist.destroy_process_group()
"""


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="it is installed")
def test_a_script_that_wants_more_of_transformer_engine_is_told_what_there_is(tmp_path: Path) -> None:
    script = written(tmp_path, "import transformer_engine.pytorch as te\nte.GroupedLinear\n")
    with pytest.raises(AssertionError, match=r"transformer_engine.*not installed.*migrating.md lists"):
        run_ranks(run_script, 1, script=script, arguments=[])
    script = written(
        tmp_path,
        "import transformer_engine.pytorch as te\nte.fp8_autocast(False)\n"
        "print('without' if not isinstance(1, (te.Linear, te.LayerNormLinear, te.LayerNormMLP)) else 1)\n",
    )
    assert run_ranks(run_script, 1, script=script, arguments=[]) == ["without\n"]
    other = written(tmp_path, "import no_such_module_anywhere\n")
    with pytest.raises(AssertionError, match="No module named 'no_such_module_anywhere'"):
        run_ranks(run_script, 1, script=other, arguments=[])


def test_what_steers_the_accelerator_has_no_effect_or_the_hosts(tmp_path: Path) -> None:
    script = written(tmp_path, STEERED)
    assert run_ranks(run_script, 2, script=script, arguments=[str(tmp_path / "saved")]) == ["done\n"] * 2


def test_what_is_sent_to_the_accelerator_stays_on_the_host(tmp_path: Path) -> None:
    script = written(tmp_path, SCRIPT)
    assert run_ranks(run_script, 2, script=script, arguments=[]) == ["2.0\n", "2.0\n"]


def test_a_script_has_its_arguments_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    script = written(tmp_path, "import sys\nfrom beside import WORD\nprint(__name__, sys.argv[1:], WORD)\n")
    assert run_ranks(run_script, 1, script=script, arguments=["--a", "b"]) == ["__main__ ['--a', 'b'] found\n"]
