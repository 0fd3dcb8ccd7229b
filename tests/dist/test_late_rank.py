"""What ranks exchange is read when the last of them has given its part, and not before: rank 1 is always late."""

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.backend import Options
from phalanx.comm.collectives import Traffic, all_gather
from phalanx.comm.compression import CODECS, Codec
from phalanx.comm.mesh import Axis, Mesh, join
from phalanx.comm.p2p import P2PChannel
from phalanx.comm.uneven_collectives import _make_replica_sum
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.engine.fsdp2 import _as_asked
from phalanx.engine.schedule import TransferSchedule
from phalanx.engine.sharded_update import StepBarrier, StepConsensus
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.comm_schedule import StepTimings
from phalanx.layout.tensor_shards import TensorShard
from phalanx.optim import gradients
from phalanx.parallel.hf_state import Rank0Weights, gather_tensor
from phalanx.parallel.tensor_collectives import _all_gather, _run_exchange
from tests.helpers import process_group, run_ranks

LATE_S = 0.1


def exchanges(mesh: Mesh) -> dict[str, Callable[[], Any]]:
    """What this rank gives, of 1 and 2; each makes the same on both."""
    axis, traffic, mine = Axis(mesh.control, (0, 1), mesh.rank), Traffic(), torch.tensor([1.0 + mesh.rank])
    messages = P2PChannel(mesh.control, mesh.device, traffic, max_in_flight=1)

    def copies(codec: Codec | None = None) -> list[float]:
        tensor = mine.clone()
        _make_replica_sum(mesh.control, traffic, mesh.topology, codec)(tensor)
        return tensor.tolist()

    def fully_shard() -> list[float]:
        out = torch.zeros(2)
        _as_asked(all_gather(out, mine.clone(), mesh.control, traffic), async_op=False)
        return out.tolist()

    return {
        "agreement": lambda: StepConsensus(mine.item(), [], [], set(), mesh.control, traffic).finish()[0].tolist(),
        "weight": lambda: gradients.TotalWeight(1 + mesh.rank, mesh.control, traffic).get(),
        "squares": lambda: gradients.sum_over_model(mine, axis, traffic).tolist(),
        "sum": lambda: _run_exchange(mine, "sum", axis, traffic).tolist(),
        "scatter": lambda: _run_exchange(mine * torch.ones(1, 2, 1), "scatter", axis, traffic).flatten().tolist(),
        "gather": lambda: _all_gather(mine, axis, traffic).flatten().tolist(),
        "fully_shard": fully_shard,
        "whole": lambda: gather_tensor(
            mine, TensorShard((2,), 0, mesh.rank, mesh.rank + 1), axis, everywhere=True
        ).tolist(),
        "copies": copies,
        "coded copies": lambda: copies(CODECS["bf16"]),
        "message": lambda: messages.exchange(mine, 1 - mesh.rank).item() + mine.item(),
    }


def late(placement: Placement) -> dict[str, Any]:
    found = {}
    with join(placement, 20) as mesh:
        for name, exchange in exchanges(mesh).items():
            mesh.sum([0.0])
            time.sleep(LATE_S * mesh.rank)
            found[name] = exchange()
    return found


def test_an_exchange_is_over_when_the_last_rank_has_given_its_part() -> None:
    wanted: dict[str, Any] = {"agreement": 3.0, "weight": 3, "message": 3.0}
    wanted |= {name: [3.0] for name in ("squares", "sum", "scatter", "copies", "coded copies")}
    wanted |= {name: [1.0, 2.0] for name in ("gather", "fully_shard", "whole")}
    assert run_ranks(late, 2) == [wanted] * 2


def several_at_once(placement: Placement) -> list[float]:
    """Through the backend that scripts have: two tensors that are gathered by one call."""
    with process_group(placement, 20, "phalanx", Options(host="one")):
        out = [torch.zeros(2) for _ in range(2)]
        time.sleep(LATE_S * placement.rank)
        with dist._coalescing_manager():
            for number, each in enumerate(out):
                dist.all_gather_into_tensor(each, torch.tensor([number + 10.0 * placement.rank]))
        return [value for each in out for value in each.tolist()]


def test_a_call_for_several_tensors_waits_for_all_of_them() -> None:
    assert run_ranks(several_at_once, 2) == [[0.0, 10.0, 1.0, 11.0]] * 2


def unlike_models(placement: Placement) -> str:
    with join(placement, 20) as mesh:
        time.sleep(LATE_S * mesh.rank)
        try:
            Rank0Weights(torch.nn.Linear(2, 2 + mesh.rank), mesh.device, None)
        except ConfigError as error:
            return str(error)
        return ""


def test_each_rank_hears_that_models_are_unlike() -> None:
    first, second = run_ranks(unlike_models, 2)
    assert first == second
    assert "the same model" in first


def schedule(placement: Placement) -> list[float]:
    """What a rank makes the order of transfers of, where each has taken as long as its number."""
    made: list[StepTimings] = []
    table, mine = object.__new__(TransferSchedule), 1.0 + placement.rank
    with join(placement, 20) as mesh:
        table._mesh, table._traffic, table._notices = mesh, Traffic(), deque()
        table._sharding, table._has_root, table._parts, table._orders = ShardingSpec(), False, 1, {1: None}  # type: ignore[dict-item]
        table._units = [SimpleNamespace(trained_buckets=[], buckets=[])]  # type: ignore[list-item]
        table._precision = SimpleNamespace(master=torch.float32, transport=torch.float32)  # type: ignore[assignment]
        table._routes = SimpleNamespace(reduce_bytes=lambda _: 4, gather_bytes=lambda _: 4)  # type: ignore[assignment]
        table.pass_timer = SimpleNamespace(median_seconds=lambda: [mine, mine])

        def make_timings(passes: list[float], *others: Any) -> tuple[StepTimings, float]:
            made.append(StepTimings((passes[0],), (passes[1],), (1e-3,), (1e-3,), (0.0,)))
            return made[0], 1.0

        timer = SimpleNamespace(update_seconds=lambda: [mine], restart_s=lambda: 0.0, make_timings=make_timings)
        table._link_timer = timer  # type: ignore[assignment]
        mesh.sum([0.0])
        time.sleep(LATE_S * mesh.rank)
        table.make_orders(3)
    return [made[0].forward_s[0], made[0].backward_s[0]]


def test_all_ranks_make_the_order_of_the_slowest_ones_times() -> None:
    assert run_ranks(schedule, 2) == [[2.0, 2.0]] * 2


def ready_to_update(placement: Placement) -> float:
    """How long a rank waits, before it updates, for the other to be through with the step before."""
    with join(placement, 20) as mesh:
        barrier = StepBarrier(mesh, Traffic(), lambda: None)
        barrier.end_step()
        mesh.sum([0.0])
        begun = time.perf_counter()
        time.sleep(LATE_S * mesh.rank)
        barrier.wait_for_ranks()
        return time.perf_counter() - begun


def test_no_rank_updates_before_all_are_through_with_the_step_before() -> None:
    assert min(run_ranks(ready_to_update, 2)) >= 0.9 * LATE_S
