"""The backend `simccl` of the simulated accelerator: its results against gloo's, and its failures against NCCL's."""

import contextlib
import datetime
import gc
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.core.placement import Placement
from tests.accelerator.device import needs_device, run_on_device
from tests.helpers import process_group

pytestmark = needs_device
RANKS = 3


def collectives(group: Any, device: Any) -> dict[str, Any]:
    """Results of every collective on small numbers, uneven parts among them."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def mine(*shape: int) -> torch.Tensor:
        return (torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32) + 10 * rank).reshape(shape)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    found: dict[str, Any] = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
        found[name] = mine(4)
        dist.all_reduce(found[name], op, group=group)
    found["broadcast"] = mine(4)
    dist.broadcast(found["broadcast"], group=group, group_src=1)
    found["reduce"] = mine(4)
    dist.reduce(found["reduce"], group=group, group_dst=1)
    found["reduce"] = found["reduce"] if rank == 1 else None
    found["all_gather"] = empty(world * 4)
    dist.all_gather_into_tensor(found["all_gather"], mine(4), group=group)
    found["in place"] = empty(world * 2)
    own = found["in place"][rank * 2 : rank * 2 + 2]
    own.copy_(mine(2))
    dist.all_gather_into_tensor(found["in place"], own, group=group)
    found["reduce_scatter"] = empty(2)
    dist.reduce_scatter_tensor(found["reduce_scatter"], mine(world * 2), group=group)
    found["uneven reduce_scatter"] = empty(rank + 1)
    dist.reduce_scatter(found["uneven reduce_scatter"], [mine(each + 1) for each in range(world)], group=group)
    found["all_to_all"] = empty(world, 2)
    dist.all_to_all_single(found["all_to_all"], mine(world, 2), group=group)
    rows = [[1, 0, 2], [0, 1, 1], [1, 1, 0]]  # from each to each
    found["uneven all_to_all"] = empty(sum(row[rank] for row in rows[:world]), 2)
    dist.all_to_all_single(
        found["uneven all_to_all"],
        mine(sum(rows[rank][:world]), 2),
        [row[rank] for row in rows[:world]],
        rows[rank][:world],
        group=group,
    )
    found["gather"] = [empty(2) for _ in range(world)] if rank == 1 else None
    dist.gather(mine(2), found["gather"], group=group, group_dst=1)
    found["scatter"] = empty(2)
    parts = [mine(2) + each for each in range(world)] if rank == 1 else None
    dist.scatter(found["scatter"], parts, group=group, group_src=1)
    found["ring"] = empty(3)
    sending = dist.isend(mine(3), group=group, group_dst=(rank + 1) % world)
    receiving = dist.irecv(found["ring"], group=group, group_src=(rank - 1) % world)
    for work in (receiving, sending):
        assert work is not None
        work.wait()
    dist.barrier(group=group)
    return {
        name: [each.tolist() for each in value]
        if isinstance(value, list)
        else value
        if value is None
        else value.tolist()
        for name, value in found.items()
    }


def both(placement: Placement) -> list[Any]:
    """Results of gloo on the host and of the backend on the device."""
    import torch.distributed as dist

    with process_group(placement, backend="cpu:gloo,sim:simccl"):
        group = dist.group.WORLD
        return [collectives(group, "cpu"), collectives(group, placement.device)]


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_every_collective_is_that_of_gloo(delay_ms: float) -> None:
    for host, device in run_on_device(both, RANKS, order="threads", delay_ms=delay_ms):
        assert device == host


def more(placement: Placement) -> dict[str, Any]:
    """What gloo has not: lists of uneven parts, an all-to-all of lists, and coalesced calls."""
    import torch
    import torch.distributed as dist

    rank, world, device = placement.rank, placement.world, placement.device
    with process_group(placement, backend="simccl"):
        gathered = [torch.zeros(each, device=device) for each in range(world)]
        dist.all_gather(gathered, torch.full((rank,), float(rank), device=device))
        exchanged = [torch.zeros(2, device=device) for _ in range(world)]
        dist.all_to_all(exchanged, [torch.full((2,), 10.0 * rank + each, device=device) for each in range(world)])
        sums = [torch.full((2,), float(rank + each), device=device) for each in range(3)]
        with dist._coalescing_manager(device=torch.device(device), async_ops=True) as manager:
            for each in sums:
                dist.all_reduce(each)
        manager.wait()
        shards = [torch.full((2,), float(rank), device=device) for _ in range(2)]
        wholes = [torch.zeros(2 * world, device=device) for _ in range(2)]
        with dist._coalescing_manager():
            for whole, shard in zip(wholes, shards, strict=True):
                dist.all_gather_into_tensor(whole, shard)
        values = {"gathered": gathered, "exchanged": exchanged, "sums": sums, "wholes": wholes}
        return {name: [each.tolist() for each in tensors] for name, tensors in values.items()}


def test_lists_of_any_sizes_and_coalesced_calls() -> None:
    for rank, found in enumerate(run_on_device(more, RANKS, order="threads", delay_ms=2)):
        assert found["gathered"] == [[], [1.0], [2.0, 2.0]]
        assert found["exchanged"] == [[10.0 * each + rank] * 2 for each in range(RANKS)]
        assert found["sums"] == [[float(3 + 3 * each)] * 2 for each in range(3)]
        assert found["wholes"] == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 2


def crossing(placement: Placement) -> list[float]:
    """Each sends to each; the ranks list their messages in unlike orders, and some are too large for buffers."""
    import torch
    import torch.distributed as dist

    rank, device = placement.rank, placement.device
    peers = [peer for peer in range(placement.world) if peer != rank]
    with process_group(placement, backend="simccl"):
        arrived = []
        for size in (3, 3 << 20):
            sent = {peer: torch.full((size,), 10.0 * rank + peer, device=device) for peer in peers}
            got = {peer: torch.zeros(size, device=device) for peer in peers}
            sends = [dist.P2POp(dist.isend, sent[peer], peer) for peer in peers]
            receives = [dist.P2POp(dist.irecv, got[peer], peer) for peer in peers]
            calls = sends + receives if rank != 1 else receives[::-1] + sends[::-1]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            arrived += [got[peer].unique().item() for peer in peers]
        return arrived


def test_messages_of_a_batch_cross_in_any_order() -> None:
    for rank, arrived in enumerate(run_on_device(crossing, RANKS, order="threads", delay_ms=2)):
        assert arrived == [10.0 * peer + rank for peer in range(RANKS) if peer != rank] * 2


# --------------------------------------------------------------------------------------------------------------- waits


def unwaited(placement: Placement, waits: bool) -> list[float]:
    """Means after ten all-reduces of ones, whose works are waited for before, or only after."""
    import torch
    import torch.distributed as dist

    with process_group(placement, backend="simccl"):
        means = []
        for _ in range(10):
            tensor = torch.ones(1000, device=placement.device)
            work = dist.all_reduce(tensor, async_op=True)
            if waits:
                work.wait()
            means.append(tensor.mean())
            torch.accelerator.current_stream().synchronize()
            work.wait()
        return [mean.item() for mean in means]


def test_a_missing_wait_is_a_wrong_number() -> None:
    for means in run_on_device(unwaited, 2, order="threads", delay_ms=50, waits=True):
        assert means == [2.0] * 10
    for means in run_on_device(unwaited, 2, order="threads", delay_ms=50, waits=False):
        assert means != [2.0] * 10


def test_several_ranks_need_threads() -> None:
    with pytest.raises(AssertionError, match="need SIM_ORDER=threads"):
        run_on_device(unwaited, 2, order="lazy", waits=True)


def fsdp(placement: Placement) -> list[Any]:
    """Losses of PyTorch's own sharded training, which has streams for its collectives, on the CPU and on the device."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.accelerator.set_device_index(placement.rank)
    found = []
    with process_group(placement, backend="cpu:gloo,sim:simccl"):
        for device in ("cpu", placement.device):
            mesh = DeviceMesh(torch.device(device).type, list(range(placement.world)))
            torch.manual_seed(0)
            layers = [
                torch.nn.Sequential(torch.nn.Linear(16, 17), torch.nn.ReLU(), torch.nn.Linear(17, 16)) for _ in "123"
            ]
            model = torch.nn.Sequential(*layers).to(device)
            for unit in (*layers, model):
                fully_shard(unit, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            losses = []
            for step in range(4):
                inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(placement.rank + 10 * step))
                loss = model(inputs.to(device)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            found.append(torch.stack(losses).tolist())
    return found


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_fsdp_on_two_ranks_is_bitwise_that_of_the_cpu(delay_ms: float) -> None:
    for host, device in run_on_device(fsdp, 2, order="threads", delay_ms=delay_ms):
        assert device == host


# -------------------------------------------------------------------------------------------------------------- groups


def bound(placement: Placement) -> list[Any]:
    """Groups below a default group that is bound to its device: two by new_group, and those of split_group."""
    import torch
    import torch.distributed as dist

    device = torch.device(placement.device)
    wait = datetime.timedelta(seconds=30)
    address = placement.store
    assert address is not None
    store = dist.TCPStore(
        address.host, address.port, placement.world, is_master=placement.rank == 0, timeout=wait,
        wait_for_workers=False, master_listen_fd=address.listen_fd,
    )  # fmt: skip
    dist.init_process_group(
        "cpu:gloo,sim:simccl",
        store=store,
        rank=placement.rank,
        world_size=placement.world,
        timeout=wait,
        device_id=device,
    )
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    sums = []
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.split_group(split_ranks=[[0, 2], [1]])]
    for group in groups:
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            tensor = torch.full((2,), 1.0 + placement.rank, device=device)
            dist.all_reduce(tensor, group=group)
            sums.append(tensor[0].item())
    dist.barrier()
    splits = backend.comm_split_count()
    dist.destroy_process_group()
    return [sums, splits]


def test_groups_below_a_bound_one_are_its_splits() -> None:
    assert run_on_device(bound, RANKS, order="threads", delay_ms=2) == [
        [[3.0, 4.0], 3],
        [[3.0, 5.0, 2.0], 3],
        [[5.0, 4.0], 3],
    ]


# ------------------------------------------------------------------------------------------------------------ failures


def alone(placement: Placement, ends_by: str) -> list[Any]:
    """What rank 0 is told of a collective to which rank 1 does not come, by its wait, a synchronisation, a second wait
    and another collective; what the group says of itself, and how long the first wait took."""
    import torch
    import torch.distributed as dist

    with process_group(placement, timeout_s=60, backend="cpu:gloo,sim:simccl"):
        group: Any = dist.group.WORLD
        backend = group._get_backend(torch.device("sim"))
        if ends_by == "timeout":
            backend._set_default_timeout(datetime.timedelta(seconds=1))
        store = dist.distributed_c10d._get_default_store()
        if placement.rank == 1:
            store.wait(["told"], datetime.timedelta(seconds=30))
            return []
        tensor = torch.ones(1000, device=placement.device)
        begun = time.monotonic()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        seconds = time.monotonic() - begun
        if ends_by == "abort":
            group.abort()
        calls: list[Callable[[], Any]] = [torch.accelerator.synchronize, work.wait, lambda: dist.all_reduce(tensor)]
        said = []
        for call in calls:
            try:
                call()
                said.append("")
            except dist.DistBackendError as error:
                said.append(str(error))
        store.set("told", "")
        return [said, str(backend.get_error()), seconds]


TOO_LONG = (
    r"\[Rank 0\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=1, OpType=ALLREDUCE, NumelIn=1000, "
    r"NumelOut=1000, Timeout\(ms\)=1000\) ran for \d+ milliseconds before timing out\."
)


def test_an_abort_ends_what_hangs() -> None:
    (synchronised, waited, called), error_type, seconds = run_on_device(alone, 2, order="threads", ends_by="abort")[0]
    assert synchronised == ""
    assert waited == called == "NCCL communicator was aborted on rank 0."
    assert error_type == "ErrorType.SUCCESS"
    assert seconds < 30  # a wait holds the stream, not the host


def test_a_timeout_is_told_later() -> None:
    (synchronised, waited, called), error_type, _ = run_on_device(
        alone, 2, order="threads", watchdog=False, ends_by="timeout"
    )[0]
    assert synchronised == ""
    for said in (waited, called):
        assert re.fullmatch(TOO_LONG, said), said
    assert error_type == "ErrorType.TIMEOUT"


def test_the_watchdog_ends_the_process() -> None:
    with pytest.raises(AssertionError) as failed:
        run_on_device(stuck, 2, order="threads")
    text = str(failed.value)
    assert "rank 0: killed by SIGABRT" in text, text
    for words in (
        TOO_LONG,
        r"To avoid data inconsistency, we are taking the entire process down\.",
        r"Process group watchdog thread terminated with exception: \[Rank 0\] Watchdog caught",
    ):
        assert re.search(words, text), text


def stuck(placement: Placement) -> None:
    """Rank 0 waits on the host for a collective to which rank 1 does not come."""
    import torch
    import torch.distributed as dist

    with process_group(placement, backend="simccl"):
        group: Any = dist.group.WORLD
        group._get_backend(torch.device("sim"))._set_default_timeout(datetime.timedelta(seconds=1))
        if placement.rank == 0:
            dist.all_reduce(torch.ones(1000, device=placement.device))
            torch.accelerator.synchronize()
        time.sleep(30)


def lost(placement: Placement) -> list[Any]:
    """What rank 0 is told of a collective after rank 1 has closed its connections, and what the group says of it."""
    import torch
    import torch.distributed as dist

    with process_group(placement, backend="simccl"):
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        if placement.rank == 0:
            work = dist.all_reduce(torch.ones(1000, device=placement.device), async_op=True)
            torch.accelerator.synchronize()
            with pytest.raises(dist.DistBackendError) as failed:
                work.wait()
            group: Any = dist.group.WORLD
            return [str(failed.value), str(group._get_backend(torch.device("sim")).get_error())]
    gc.collect()  # with the group its connections
    with contextlib.suppress(dist.DistError):  # rank 0 ends with its store
        store.wait(["never"], datetime.timedelta(seconds=30))
    return []


def test_a_lost_peer_is_an_asynchronous_error() -> None:
    said, error_type = run_on_device(lost, 2, order="threads", watchdog=False)[0]
    assert said.startswith("NCCL error: remote process exited or there was a network error"), said
    assert error_type == "ErrorType.REMOTE_ERROR"
