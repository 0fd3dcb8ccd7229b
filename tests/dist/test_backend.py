"""The backend "phalanx" of torch.distributed: every collective as gloo's, training as on gloo, an end on all ranks."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm.backend import Options, read_counters
from phalanx.core.placement import Placement, StoreAddress
from phalanx.system import accelerator
from phalanx.system.fork import fork
from tests.helpers import ALL, ROOT, free_port, process_group, run_ranks

FAR_S = 60  # the groups' timeout: what raises much earlier did not wait for it


def joined(placement: Placement, hosts: str) -> Any:
    return process_group(placement, FAR_S, "phalanx", Options(host=hosts[placement.rank]))


# ---------------------------------------------------------------------------------------------------------- collectives


def everything(placement: Placement, group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    """All that a group can do, with drawn shapes, types and roots; what came out of it."""
    rank, world, draw = placement.rank, placement.world, random.Random(seed)
    mine = torch.Generator().manual_seed(seed * 100 + rank)
    root, rows, columns = draw.randrange(world), draw.choice([1, 3, 200]), draw.choice([1, 5, 301])
    dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8])

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randint(0, 5, shape, generator=mine).to(dtype)

    out: list[torch.Tensor] = []

    def keep(result: torch.Tensor) -> torch.Tensor:
        out.append(result)
        return result

    def room(count: int) -> list[torch.Tensor]:
        return [keep(torch.zeros(rows, columns, dtype=dtype)) for _ in range(count)]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        dist.all_reduce(keep(tensor(rows, columns)), op=op, group=group)
    if dtype.is_floating_point:
        dist.all_reduce(keep(tensor(rows, columns)), op=dist.ReduceOp.AVG, group=group)
        dist.all_reduce(keep(tensor(7).bfloat16()), group=group)
    else:
        dist.all_reduce(keep(tensor(rows, columns)), op=dist.ReduceOp.BXOR, group=group)
    late = [dist.all_reduce(keep(tensor(11)), group=group, async_op=True) for _ in range(6)]
    dist.all_reduce_coalesced([keep(tensor(3)), keep(tensor(rows, 2))], group=group)
    dist.broadcast(keep(tensor(rows, columns)), group_src=root, group=group)
    reduced = tensor(rows, columns)
    dist.reduce(reduced, group_dst=root, group=group)
    keep(reduced if rank == root else torch.zeros(1))  # elsewhere gloo leaves anything
    dist.all_gather(room(world), tensor(rows, columns), group=group)
    dist.all_gather_into_tensor(
        keep(torch.zeros(world * rows, columns, dtype=dtype)), tensor(rows, columns), group=group
    )
    dist.gather(tensor(rows, columns), room(world) if rank == root else None, group_dst=root, group=group)
    dist.scatter(room(1)[0], [tensor(rows, columns) for _ in range(world)] if rank == root else None, group_src=root,
                 group=group)  # fmt: skip
    dist.reduce_scatter(room(1)[0], [tensor(rows, columns) for _ in range(world)], group=group)
    dist.reduce_scatter_tensor(room(1)[0], tensor(world * rows, columns), group=group)
    dist.all_to_all_single(keep(torch.zeros(world * 2, columns, dtype=dtype)), tensor(world * 2, columns), group=group)
    sizes = [[(a * 3 + b + seed) % 4 for b in range(world)] for a in range(world)]  # rows from a to b
    arriving = [sizes[a][rank] for a in range(world)]
    dist.all_to_all_single(keep(torch.zeros(sum(arriving), 3, dtype=dtype)), tensor(sum(sizes[rank]), 3), arriving,
                           sizes[rank], group=group)  # fmt: skip
    ahead, behind = (rank + 1) % world, (rank - 1) % world
    messages = [dist.P2POp(dist.isend, tensor(rows, columns), group=group, group_peer=ahead, tag=3),
                dist.P2POp(dist.irecv, room(1)[0], group=group, group_peer=behind, tag=3)]  # fmt: skip
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    dist.barrier(group=group)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 9}, group=group)
    assert objects == [{"rank": other, "text": "x" * other * 9} for other in range(world)]
    for work in late:
        work.wait()
    return out


def compared(placement: Placement, hosts: str) -> int:
    """Draws on both backends; how many tensors they agree on."""
    with joined(placement, hosts):
        gloo, ours_group = dist.new_group(backend="gloo"), dist.new_group()
        count = 0
        for seed in range(6 if ALL else 3):
            theirs = everything(placement, gloo, seed)
            ours = everything(placement, ours_group, seed)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
            count += len(ours)
    return count


@pytest.mark.parametrize("hosts", ["aba", "aabb"])
def test_every_collective_agrees_with_gloo(hosts: str) -> None:
    assert min(run_ranks(compared, len(hosts), hosts=hosts)) > (150 if ALL else 70)


def more(placement: Placement) -> None:
    """What gloo cannot do, or does wrong."""
    rank, world = placement.rank, placement.world
    with joined(placement, "abb"):
        gathered = [torch.zeros(other) for other in range(world)]
        dist.all_gather(gathered, torch.full((rank,), float(rank)))  # lists of unequal sizes
        assert [part.tolist() for part in gathered] == [[float(other)] * other for other in range(world)]
        strided = torch.arange(8.0)[::2]
        dist.all_reduce(strided)
        assert strided.tolist() == [0.0, 6.0, 12.0, 18.0]
        with torch.inference_mode():
            flags = torch.tensor([rank == 1, False])
            dist.all_reduce(flags)
        assert flags.tolist() == [True, False]
        scaled = torch.full((world,), 1.0)
        part = torch.zeros(1)
        dist.reduce_scatter_tensor(part, scaled, op=dist._make_nccl_premul_sum(0.5))
        assert part.item() == 0.5 * world
        small = torch.arange(4.0).to(torch.float8_e4m3fn)
        dist.broadcast(small, src=0)
        with pytest.raises(ValueError, match=r"not defined for torch\.float8_e4m3fn; convert the tensor"):
            dist.all_reduce(small)
        with pytest.raises(ValueError, match=r"AVG is not defined for torch\.int64"):
            dist.all_reduce(torch.ones(3, dtype=torch.int64), op=dist.ReduceOp.AVG)
        with pytest.raises(ValueError, match="needs room for them"):
            dist.distributed_c10d._get_default_group().all_gather_single(torch.zeros(5), torch.zeros(2))
        with pytest.raises(TypeError, match="only groups of the backend phalanx"):
            read_counters(dist.new_group(backend="gloo"))
        with dist._coalescing_manager():
            ones = [torch.ones(2), torch.ones(3)]
            for each in ones:
                dist.all_reduce(each)
        assert [each.tolist() for each in ones] == [[3.0] * 2, [3.0] * 3]
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.barrier(group=pair)
            dist.destroy_process_group(pair)
            with pytest.raises(RuntimeError, match="this process group was destroyed"):
                pair.allreduce([torch.ones(1)])
        with pytest.raises(TypeError, match="pg_options of the backend phalanx are"):
            dist.new_group(backend="phalanx", pg_options="two nodes")


def test_what_gloo_cannot_do_and_what_is_refused() -> None:
    run_ranks(more, 3)


def counted(placement: Placement) -> list[Any]:
    with joined(placement, "abab"):
        dist.all_reduce(torch.ones(1000))
        pair = dist.new_group([0, 2])
        if placement.rank in (0, 2):
            dist.all_reduce(torch.ones(1000), group=pair)
            found = read_counters(pair)
            assert [found.form, found.within_bytes, found.between_bytes] == ["direct", 4000, 0]
        found = read_counters()
        return [found.form, found.within_bytes, found.between_bytes]


def test_bytes_are_counted_by_link() -> None:
    found = run_ranks(counted, 4)
    assert [each[0] for each in found] == ["two-level"] * 4
    assert [sum(each[1] for each in found), sum(each[2] for each in found)] == [16000, 8000]


# ------------------------------------------------------------------------------------------------------------- training


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 7))


def by_ddp(net: torch.nn.Sequential, group: dist.ProcessGroup) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=1)
    return wrapped, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)


def by_fsdp(net: torch.nn.Sequential, group: dist.ProcessGroup) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def losses(wrap: Callable[..., Any], rank: int, group: dist.ProcessGroup) -> list[float]:
    net, optimizer = wrap(model(), group)
    data = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(5):
        loss = net(torch.randn(4, 13, generator=data)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained(placement: Placement) -> list[list[list[float]]]:
    with joined(placement, "aab"):
        groups = [dist.new_group(backend="gloo"), dist.new_group()]
        return [[losses(wrap, placement.rank, group) for group in groups] for wrap in (by_ddp, by_fsdp)]


def test_ddp_zero_and_fsdp2_train_as_on_gloo() -> None:
    for of_rank in run_ranks(trained, 3):
        for gloo, ours in of_rank:
            assert ours == pytest.approx(gloo, rel=1e-5)
            assert gloo[0] != gloo[-1]


def meshed(placement: Placement) -> list[Any]:
    """Hybrid sharding over a mesh of groups that torch makes itself."""
    with joined(placement, "abab"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        net = model()
        fully_shard(net, mesh=mesh)
        net(torch.ones(2, 13) * placement.rank).sum().backward()
        forms = [read_counters(mesh.get_group(name)).form for name in ("replicate", "shard")]
        weight: Any = net[0].weight
        return [forms, weight.grad.full_tensor().sum().item()]


def test_groups_of_a_mesh_know_the_nodes_too() -> None:
    found = run_ranks(meshed, 4)
    assert [forms for forms, _ in found] == [["direct", "ring"]] * 4  # round-robin ranks: shards cross, replicas do not
    assert len({gradient for _, gradient in found}) == 1


# ------------------------------------------------------------------------------------------------------------- failures


def streaming(placement: Placement, way: str, folder: Path) -> int:
    """One of four ranks in a stream of collectives, of which rank 2 goes away while rank 3 is busy with something else.

    Leaves what was raised, and when.
    """
    said = folder / str(placement.rank)
    with joined(placement, "abab"):
        tensor = torch.ones(100_000)
        for step in range(1000):
            if step == 10 and placement.rank == 2:
                said.write_text(json.dumps([time.time(), way]))
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if way == "ended":
                    os._exit(0)
                return 0  # it leaves in order
            if step == 10 and placement.rank == 3:
                time.sleep(5)
            try:
                dist.all_reduce(tensor)
            except dist.DistBackendError as error:
                said.write_text(json.dumps([time.time(), str(error)]))
                with pytest.raises(dist.DistBackendError):  # the group is of no more use, and says so at once
                    dist.all_reduce(tensor)
                return 0
    return 1


def watched(placement: Placement, way: str, folder: str) -> list[Any]:
    """Four ranks as children of this process: how they ended, and what they left."""
    listener = socket.create_server(("127.0.0.1", 0))
    fd, port = listener.fileno(), listener.getsockname()[1]
    children = []
    for rank in range(4):
        store = StoreAddress("127.0.0.1", port, listen_fd=fd if rank == 0 else None)
        place = replace(placement, rank=rank, world=4, store=store)
        children.append(fork(lambda place=place: streaming(place, way, Path(folder)), keep=[fd]))  # type: ignore[misc]
    listener.close()
    ends = [os.waitpid(pid, 0)[1] for pid, _ in children]
    return [ends, [json.loads(Path(folder, str(rank)).read_text()) for rank in range(4)]]


@pytest.mark.parametrize("way", ["killed", "ended", "left"])
def test_one_that_goes_away_ends_the_group_on_all(way: str, tmp_path: Path) -> None:
    ((ends, said),) = run_ranks(watched, 1, way=way, folder=tmp_path)
    assert [end for rank, end in enumerate(ends) if rank != 2] == [0, 0, 0]
    gone, busy = said[2][0], said[3][0]
    for when, words in said[:2]:
        # They wait for rank 3 as well, which lives and has seen nothing: not for its return, far less for the timeout.
        assert gone <= when < busy < gone + FAR_S / 2
        assert "rank 2 of 4 " + ("has left" if way == "left" else "was lost or failed") in words or way == "left"


class Native:
    """Stands for an accelerator's own group: what waits in it does so until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        assert not self.aborted.is_set(), "once"
        self.aborted.set()


def waiting_on_a_device(placement: Placement) -> float:
    """Seconds for which a rank waits in its accelerator's own group after another one has failed."""
    native, device = Native(), torch.device("meta")
    accelerator.hardware_id = lambda device, host: f"device {placement.rank}"
    accelerator.make_native_group = lambda *arguments: native  # type: ignore[assignment]
    with joined(placement, "aab"):
        time.sleep(0.3 * placement.rank)  # the first call waits for that of the others
        group: Any = dist.distributed_c10d._get_default_group()
        assert group._thread.device_group(device, range(3)) is native
        dist.barrier()
        start = time.monotonic()
        if placement.rank == 1:
            group.abort()
        assert native.aborted.wait(FAR_S)
        with pytest.raises(dist.DistBackendError):
            group._thread.device_group(device, range(3))
        return time.monotonic() - start


def test_who_waits_in_an_accelerators_own_group_is_let_go() -> None:
    assert max(run_ranks(waiting_on_a_device, 3)) < 2.0


SCRIPT = """
import phalanx.comm, torch, torch.distributed as dist
dist.init_process_group(backend='cpu:phalanx')
ranks = torch.tensor([float(dist.get_rank())])
dist.all_reduce(ranks)
print(ranks.item(), dist.get_backend())
"""


def beside_a_script(placement: Placement, port: int) -> list[Any]:
    """The script on two ranks: in a fresh Python, of which its exit code and output are returned, and here."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    fresh = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=os.environ | common | {"RANK": "1"}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.environ |= common | {"RANK": "0"}
    names: dict[str, Any] = {}
    exec(SCRIPT, names)  # noqa: S102
    said, errors = fresh.communicate(timeout=100)
    return [fresh.returncode, said, errors, names["ranks"].item()]


def test_a_script_of_anyone() -> None:
    """As a user writes it: torch's own environment variables, no word of hosts, nothing destroyed at the end."""
    [[code, said, errors, here]] = run_ranks(beside_a_script, 1, port=free_port())
    assert (code, said, here) == (0, "1.0 cpu:phalanx\n", 1.0), errors


def on_a_future(placement: Placement) -> list[float]:
    """A collective that begins when another ends, and is waited for there, as torch's compressing hooks do."""
    with process_group(placement, FAR_S, "phalanx", Options(host="one")):
        work = dist.all_reduce(torch.ones(3), async_op=True)

        def again(future: Any) -> torch.Tensor:
            (first,) = future.value() if isinstance(future.value(), list) else [future.value()]
            dist.all_reduce(first, async_op=True).get_future().wait()
            return first.mul_(2.0)

        then: Any = work.get_future().then(again)
        return list(then.wait().tolist())


def test_what_hangs_on_a_future_may_wait_for_another_collective() -> None:
    assert run_ranks(on_a_future, 2) == [[8.0] * 3] * 2
