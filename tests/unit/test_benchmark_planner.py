"""The planner judged on this machine in miniature, and the borrowed lab: they run what is planned, and report it."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import borrowed_lab, harness, lab, planner_here
from benchmarks.planner_here import PICKED, Size, drawn, held_by, least, plan_of, used
from benchmarks.throttle import MEMORY_ROOT, ROOTS, remove_stale, throttle
from phalanx.core.placement import Placement
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.device_catalog import DEVICE_KINDS
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.memory import DeviceMemory
from phalanx.planner.plan import Plan
from tests.helpers import ALL, ROOT, run_ranks

MODEL = {"hidden": 32, "layers": 3, "heads": 2, "intermediate": 64, "vocabulary": 300, "seq_len": 16,
         "global_batch": 14}  # fmt: skip
TINY = Size(
    cores=(0.4, 0.8), model=MODEL, layouts=(PICKED,), surveys=1, turns=1, warm=1, steps=2, configurations=1, largest=1
)
GIB = 2**30
LAB = borrowed_lab.Size(
    cores=(0.8, 0.4), memory=(4 * GIB, 2 * GIB), model={**MODEL, "global_batch": 12}, turns=1, steps=2
)


class Mute(borrowed_lab.Teller):
    """Says nothing."""

    def say(self, text: Any) -> None: ...


def here(placement: Placement) -> list[Any]:
    rows, checks = planner_here.measure(TINY, ["time", "memory"])
    return [harness.result("planner here", {}, rows, checks)]


def borrowed(placement: Placement) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows, checks, found = borrowed_lab.story(LAB, Path(folder), Mute())
        borrowed_lab.draw(found, Path(folder, "picture.html"))
        return [harness.result("borrowed lab", {}, rows, checks), Path(folder, "picture.html").stat().st_size]


needs_nodes = pytest.mark.skipif(lab.why_not() is not None, reason="needs network namespaces and control groups")


@needs_nodes
@pytest.mark.skipif(not ALL, reason="it takes half a minute of slowed-down cores: `make test-all` runs it")
def test_runs_what_is_planned_and_compares_steps_and_bytes() -> None:
    ((outcome,),) = run_ranks(here, 1, timeout_s=280)
    *timed, held = outcome["rows"]
    assert [row["layout"] for row in timed if "layout" in row] == [PICKED]
    assert timed[-1]["measured, s"] > 0 and timed[-1]["predicted, s"] > 0
    assert sum(row["alike"] for row in timed[:-1]) == 4
    assert held["held, MiB"] > held["without a model, MiB"] > 50 and held["fits"] is True
    assert [check["target"] for check in outcome["checks"]] == [0.15, 1.05, 0.03, 0]


@needs_nodes
@pytest.mark.skipif(not ALL, reason="it takes half a minute of slowed-down cores: `make test-all` tells it")
def test_the_lab_tells_its_story_to_the_end() -> None:
    ((outcome, picture),) = run_ranks(borrowed, 1, timeout_s=280)
    ways = [row["trained by"] for row in outcome["rows"] if "trained by" in row]
    assert ways == [borrowed_lab.ALONE, borrowed_lab.EQUAL, borrowed_lab.SMALL, borrowed_lab.PLANNED]
    nodes = [row for row in outcome["rows"] if "node" in row]
    assert sum(row["sequences"] for row in nodes) == 12
    assert [check["target"] for check in outcome["checks"]] == [1.0, 0.97]
    assert picture > 1000


def test_fifty_unlike_configurations_that_the_recipe_allows(tmp_path: Path) -> None:
    found = drawn(50, 5)
    assert len({(str(each.shape), each.world, each.words) for each in found}) == 50
    assert {"parallel.tensor=2", "parallel.pipeline=2", "parallel.zero=3", "optim.double_buffer=true"} <= {
        word for each in found for word in each.words
    }
    for each in found[:6]:
        plan, _ = plan_of(tmp_path, each)
        assert plan.devices == each.world and plan.estimate.fits
        for rank in range(each.world):
            limited = _limited(held_by(plan, rank), least(held_by(plan, rank)))
            assert limited.free_bytes >= 0
            assert _limited(limited, round(0.99 * limited.kind.memory_bytes)).free_bytes < 0
            assert used(limited) == pytest.approx(used(held_by(plan, rank)))


def _limited(held: DeviceMemory, most: int) -> DeviceMemory:
    """The same on a device with so much memory."""
    slack = (held.parts["reserved"] - held.kind.reserved_bytes) / held.kind.memory_bytes
    parts = {**held.parts, "reserved": held.kind.reserved_bytes + slack * most}
    return replace(held, kind=replace(held.kind, memory_bytes=most), parts=parts)


def test_nodes_are_found_in_the_order_of_a_plan() -> None:
    slow, fast = (replace(DEVICE_KINDS["CPU"], name=name) for name in ("slow", "fast"))
    cluster, nodes = ClusterSpec((NodeGroup(1, 2, slow), NodeGroup(2, 2, fast))), [lab.Node((0.5, 0.5))] * 3

    def order(used: ClusterSpec, devices: int) -> list[tuple[int, int]]:
        return planner_here.ranks_of(Plan(LayoutChoice(devices=devices), None, used), cluster, nodes)  # type: ignore[arg-type]

    assert order(cluster, 6) == [(0, 2), (1, 2), (2, 2)]
    assert order(replace(cluster, groups=tuple(reversed(cluster.groups))), 6) == [(1, 2), (2, 2), (0, 2)]
    assert order(ClusterSpec((NodeGroup(2, 2, fast),)), 3) == [(1, 2), (2, 1)]
    cluster = ClusterSpec(
        (NodeGroup(1, 1, slow), NodeGroup(1, 1, fast), NodeGroup(2, 2, fast))
    )  # two of one node, measured unlike
    assert order(cluster, 6) == [(0, 2), (1, 2), (2, 2)]


def swell(placement: Placement) -> list[int]:
    """The signal that ends a child which takes more than it may, and how many the kernel says that it has killed."""
    with throttle(1) as limits:
        limits.limit_memory(0, 48 * 2**20)
        if (pid := os.fork()) == 0:
            limits.enter(0)
            os._exit(len(b"x" * (96 * 2**20)) & 1)
        return [os.WTERMSIG(os.waitpid(pid, 0)[1]), limits.memory_kills(0)]


@needs_nodes
def test_who_takes_more_memory_than_allowed_is_killed_and_counted() -> None:
    assert run_ranks(swell, 1) == [[signal.SIGKILL, 1]]


LIMITED = """
import time
from benchmarks.throttle import throttle

with throttle(1, by_groups=True) as limits:
    print("limited", flush=True)
    time.sleep(60)
"""


@needs_nodes
def test_control_groups_go_when_the_process_is_told_to_end_and_a_dead_ones_with_the_next() -> None:
    child = subprocess.Popen([sys.executable, "-c", LIMITED], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == "limited\n"
    made = [folder for root in (*ROOTS, MEMORY_ROOT) for folder in root.glob(f"phalanx-{child.pid}")]
    assert made and all((folder / "rank-0").exists() for folder in made)
    child.terminate()
    assert child.wait(30) == 128 + signal.SIGTERM
    assert not any(folder.exists() for folder in made)
    (made[0] / "rank-0").mkdir(parents=True)  # as one leaves it that is killed
    remove_stale()
    assert not made[0].exists()
