"""Both clocks tell what a rank worked itself, and not what it waited for one that is slower."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.system.event_times import EventTimes
from phalanx.trainer import train_rank
from phalanx.workload.clock import HostClock, UnitClock
from tests.helpers import run_ranks
from tests.numerics import runs

PAUSE_S = 0.2  # in the forward and in the backward pass of each of two blocks, on rank 1 alone


def clocked(placement: Placement, run: str, data: str) -> list[Any]:
    """Seconds of a step by the host's clock, by the units' clock, and those waited."""
    described = runs.job(run, data, {"train.steps": 3, "train.eval_sequences": 0}, placement.world)
    with runs.loop_of(runs.on_one_thread(placement), described) as loop:
        model, mesh = loop.setup.components.model, loop.setup.mesh
        units = UnitClock([unit for _, unit in model.units()], EventTimes(torch.device("cpu")))
        if placement.rank:
            for block in model.blocks():
                block.get_submodule("attention").register_forward_hook(sleep)
        found: list[Any] = []
        lap, settle = loop.clock.lap, loop.setup.components.work_split.settle
        waits = [mesh.traffic, mesh.bookkeeping]

        def both() -> float:
            seconds = lap()
            found.append([seconds, units.lap(), sum(traffic.total_wait_s for traffic in waits)])
            return seconds

        loop.clock.lap = both  # type: ignore[method-assign]

        def settled() -> tuple[bool, int]:
            units.stop()
            units.start()
            return settle()

        loop.setup.components.work_split.settle = settled  # type: ignore[method-assign]
        train_rank.run_steps(loop, loop.restore())
        return found


def sleep(block: Any, args: Any, output: torch.Tensor) -> None:
    time.sleep(PAUSE_S)
    if output.requires_grad:
        output.register_hook(lambda _: time.sleep(PAUSE_S))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    runs.write_tokens(folder)
    return folder


def test_waiting_for_a_slow_rank_is_no_work(tokens: Path, tmp_path: Path) -> None:
    quick, slow = run_ranks(clocked, 2, timeout_s=180, run=str(tmp_path), data=str(tokens))
    print(quick, slow)
    asleep = 4 * PAUSE_S
    for step in (1, 2):  # the first step also makes connections
        for clock in (0, 1):
            assert slow[step][clock] >= asleep
            assert quick[step][clock] < slow[step][clock] - asleep / 2
        assert quick[step][1] <= quick[step][0]  # the units are a part of all work
        assert slow[step][1] <= slow[step][0]
        assert quick[step][2] - quick[step - 1][2] > asleep / 2  # what it did meanwhile


def test_what_happens_between_steps_is_no_work() -> None:
    placement = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device="cpu", store=None)
    with join(placement, 10) as mesh:
        clock = HostClock([mesh.traffic, mesh.bookkeeping])
        time.sleep(0.2)
        clock.start()
        clock.lap()
        clock.stop()
        time.sleep(0.2)
        before = time.perf_counter()
        clock.start()
        begun = time.perf_counter()
        mesh.traffic.add_wait(0.1)
        time.sleep(0.15)
        ended = time.perf_counter()
        worked = clock.lap()
        assert ended - begun <= worked + 0.1 <= time.perf_counter() - before


def test_a_pass_without_gradients_is_no_step() -> None:
    unit = torch.nn.Linear(4, 4)
    clock = UnitClock([unit], EventTimes(torch.device("cpu")))
    with torch.no_grad():
        unit(torch.ones(2, 4))
    assert clock.lap() != clock.lap()  # nan: nothing was timed
    x = torch.ones(2, 4, requires_grad=True)
    unit(x).sum().backward()
    assert clock.lap() > 0
