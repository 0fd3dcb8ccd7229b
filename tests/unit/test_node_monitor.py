"""The monitor of a node and what heals it: findings of a simulated GPU driver, no false alarms, decisions."""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import RunError
from phalanx.health import network
from phalanx.health.findings import Severity, at_least, verdict
from phalanx.health.gpu import Gpu, GpuMemoryErrors, GpuReading
from phalanx.health.kernel_log import KernelLogLine
from phalanx.provision import monitor
from phalanx.provision.config import HealthPolicy
from phalanx.provision.healing import Heal, HealAction, Healer, find_heals, hold_back
from phalanx.provision.monitor import DriverReader, HealthJudge, NodeSample, read_simulated
from phalanx.provision.slurm_control import SlurmNodeView
from phalanx.provision.steps import NodesFailed
from tests.helpers import ALL

LINKS = {"eth0": True, "mlx5_0 port 1": True}
GPUS = tuple(
    Gpu(
        index, f"GPU-{index}", "NVIDIA H100", f"0000:{index:02x}:00", None, 80 << 30, 60 << 30, 55, 87, 650.0, 0x0,
        GpuMemoryErrors(0, 0, False, False, 0, False), 0, 16, 16, 18, 18, True,
    )
    for index in range(8)
)  # fmt: skip


def sample(gpus: tuple[Gpu, ...] = GPUS, *texts: str, links: dict[str, bool] = LINKS) -> NodeSample:
    return NodeSample(GpuReading(gpus), [KernelLogLine(100.0, text) for text in texts], links)


def one_bad(**changes: Any) -> NodeSample:
    return sample((*GPUS[:3], replace(GPUS[3], **changes), *GPUS[4:]))


def xid(number: int) -> NodeSample:
    return sample(GPUS, f"NVRM: Xid (PCI:0000:03:00): {number}, pid=1, name=python, words")


CASES: dict[str, tuple[NodeSample, Severity]] = {
    "uncorrectable ecc": (one_bad(errors=GpuMemoryErrors(uncorrected=1), recovery=1), Severity.RESET),
    "correctable ecc": (one_bad(errors=GpuMemoryErrors(corrected=5000)), Severity.WATCH),
    "remap failed": (one_bad(errors=GpuMemoryErrors(remap_failed=True)), Severity.ISOLATE),
    "remap pending": (one_bad(errors=GpuMemoryErrors(remap_pending=True)), Severity.WATCH),
    "xid 48": (replace(xid(48), gpus=GpuReading(tuple(replace(gpu, recovery=1) for gpu in GPUS))), Severity.RESET),
    "xid 63": (xid(63), Severity.WATCH),
    "xid 74": (replace(xid(74), gpus=GpuReading(tuple(replace(gpu, recovery=None) for gpu in GPUS))), Severity.RESET),
    "xid 79": (replace(xid(79), gpus=GpuReading(tuple(replace(gpu, recovery=None) for gpu in GPUS))), Severity.REBOOT),
    "thermal throttling": (one_bad(throttles=0x40), Severity.WATCH),
    "power throttling": (one_bad(throttles=0x80), Severity.WATCH),
    "nvlink down": (one_bad(links_up=17), Severity.RESET),
    "missing device": (sample(GPUS[:-1]), Severity.REBOOT),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_of_a_gpu_is_found_in_the_next_sample_with_its_severity(case: str) -> None:
    judge = HealthJudge()
    assert verdict(judge.judge(sample(), 100.0)) == Severity.OK
    faulty, severity = CASES[case]
    assert verdict(judge.judge(faulty, 101.0)) == severity


def test_a_driver_that_hangs_at_the_first_sample_is_no_healthy_node() -> None:
    judge = HealthJudge()
    hangs = NodeSample(GpuReading(problem="the driver did not answer", severity=Severity.REBOOT), [], LINKS)
    assert verdict(judge.judge(hangs, 100.0)) == Severity.REBOOT and judge.baseline is None
    assert verdict(judge.judge(sample(), 101.0)) == Severity.OK
    assert verdict(judge.judge(sample(GPUS[:-1]), 102.0)) == Severity.REBOOT
    without = HealthJudge()
    without.judge(NodeSample(GpuReading(problem="there is no driver"), [], LINKS), 100.0)
    assert without.baseline == {"gpus": [], "links": LINKS}


def test_a_thousand_healthy_samples_of_a_busy_node_find_nothing() -> None:
    judge, draw = HealthJudge(), random.Random(1)
    lines = ("usb 1-1: new device", "eth0: link becomes ready", "NVRM: loading module", "audit: type=1400")
    for number in range(10_000 if ALL else 1_000):
        gpus = tuple(
            replace(
                gpu,
                temperature_c=draw.randrange(30, 84),
                memory_used_bytes=draw.randrange(80 << 30),
                throttles=draw.choice((0x0, 0x1, 0x4, 0x5)),
                errors=replace(gpu.errors, corrected=draw.randrange(50)),
                persistence=draw.random() < 0.5,
            )
            for gpu in (GPUS[number % 8], GPUS[(number + 1) % 8])
        )
        others = tuple(gpu for gpu in GPUS if gpu.index not in {each.index for each in gpus})
        found = judge.judge(sample((*others, *gpus), draw.choice(lines)), 100.0 + number)
        assert at_least(found, Severity.WATCH) == []


def test_network_links_against_the_first_sample(tmp_path: Path) -> None:
    judge = HealthJudge()
    judge.judge(sample(links={"eth0": True, "eth1": False}), 100.0)
    assert verdict(judge.judge(sample(links={"eth0": False, "eth1": False}), 101.0)) == Severity.RESET
    assert verdict(judge.judge(sample(links={"eth1": False}), 102.0)) == Severity.REBOOT
    assert verdict(judge.judge(sample(links={"eth0": True, "eth1": False}), 103.0)) == Severity.OK
    for name, carrier in (("lo", "1"), ("eth0", "1"), ("docker0", "0"), ("eth1", "0")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "carrier").write_text(carrier)
    for name in ("eth0", "eth1"):
        (tmp_path / "net" / name / "device").mkdir()
    port = tmp_path / "rdma" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    found = network.read_links(tmp_path / "net", tmp_path / "rdma")
    assert found == {"eth0": True, "eth1": False, "mlx5_0 port 1": True}


def test_a_simulated_node(tmp_path: Path) -> None:
    file = tmp_path / "simulated.json"
    file.write_text(
        json.dumps({"gpus": [{"index": 0, "uuid": "a", "errors": {"remap_failed": True}}], "kernel": ["x"]})
    )
    reading, lines = read_simulated(file)
    assert (reading.gpus[0].errors.remap_failed, lines) == (True, ["x"])


def test_a_driver_is_read_in_a_child() -> None:
    """In a process of its own, since only one without further threads forks."""
    program = "from tests.unit.test_node_monitor import read_drivers; read_drivers()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def read_drivers() -> None:
    reader = DriverReader(lambda: GpuReading(GPUS, driver="570"))
    try:
        assert reader.read() == reader.read() == GpuReading(GPUS, driver="570")
    finally:
        reader.close()
    dead = DriverReader(_die)
    assert dead.read().severity == Severity.REBOOT
    hangs = DriverReader(_hang)
    assert "did not answer" in str(hangs.read(0.3).problem)
    print("read")


def _die() -> GpuReading:
    raise SystemExit(9)


def _hang() -> GpuReading:
    time.sleep(60)
    return GpuReading()


# ------------------------------------------------------------------------------------------------------------- healing


def views(**states: tuple[str, str]) -> dict[str, SlurmNodeView]:
    return {name: SlurmNodeView(name, *state) for name, state in states.items()}


@pytest.mark.parametrize(
    ("state", "reason", "action"),
    [
        ("drained", "phalanx reset: GPU 3 had an error", HealAction.RESET),
        ("drained", "phalanx reboot: Xid 79", HealAction.REBOOT),
        ("drained", "phalanx isolate: no spare rows", HealAction.REPLACE),
        ("draining", "phalanx isolate: no spare rows", None),  # jobs still run there
        ("drained", "phalanx watch: hot", None),
        ("drained", "maintenance", None),
        ("fail", "Action:Replace", HealAction.REPLACE),
        ("down", "Action:Reboot", HealAction.REBOOT),
        ("failing", "Action:Replace", None),
        ("fail", "action:replace", None),  # HyperPod takes it exactly
        ("down*", "Not responding", HealAction.REJOIN),
        ("idle", "none", None),
    ],
)
def test_what_slurm_says_of_a_node_becomes_an_action(state: str, reason: str, action: HealAction | None) -> None:
    found = find_heals(views(a=(state, reason)), ())
    assert [heal.action for heal in found] == ([] if action is None else [action])
    assert [heal.requested for heal in found] == ([] if action is None else [reason.startswith("Action:")])


def test_a_dead_machine_is_replaced_and_what_did_not_help_is_followed_by_more() -> None:
    assert find_heals(views(a=("down*", "")), {"a"})[0].action == HealAction.REPLACE
    sick = views(a=("drained", "phalanx reset: ecc"))
    history = [(0.0, Heal("a", HealAction.RESET, ""))]
    assert find_heals(sick, (), history, 10.0)[0].action == HealAction.REBOOT
    assert (
        find_heals(sick, (), [*history, (5.0, Heal("a", HealAction.REBOOT, ""))], 10.0)[0].action == HealAction.REPLACE
    )
    assert find_heals(sick, (), history, 3700.0)[0].action == HealAction.RESET
    assert find_heals(sick, (), [(0.0, Heal("b", HealAction.RESET, ""))], 10.0)[0].action == HealAction.RESET


class FakeCluster:
    """Nodes whose healing is written down."""

    def __init__(self, **states: tuple[str, str]) -> None:
        self.views, self.done = views(**states), list[tuple[str, HealAction]]()
        self.fails = False

    def look(self) -> tuple[dict[str, SlurmNodeView], set[str]]:
        return self.views, set()

    def carry_out(self, heal: Heal) -> None:
        if self.fails:
            raise RunError("busy")
        self.done.append((heal.node, heal.action))


@pytest.mark.parametrize("policy", list(HealthPolicy))
@pytest.mark.parametrize("yes", [True, False])
def test_policies(policy: HealthPolicy, yes: bool) -> None:
    cluster = FakeCluster(
        a=("drained", "phalanx reboot: x"), b=("fail", "Action:Replace"), c=("idle", ""), d=("idle", "")
    )
    told: list[tuple[str, str]] = []
    healer = Healer(cluster, policy, lambda node, text: told.append((node, text)), lambda heal: yes)
    healer.look(0.0)
    acts = policy == HealthPolicy.AUTOMATIC or (policy == HealthPolicy.ASK and yes)
    assert cluster.done == [("a", HealAction.REBOOT)] * acts + [("b", HealAction.REPLACE)]
    if policy == HealthPolicy.TELL:
        assert ("a", "unhealthy (phalanx reboot: x); should: reboot it") in told
        healer.look(1.0)
        assert [node for node, _ in told].count("a") == 1


def test_many_sick_nodes_at_once_are_left_alone_and_a_failed_healing_is_tried_again() -> None:
    sick = [Heal(name, HealAction.REPLACE, "") for name in "abc"]
    assert hold_back(sick, 4) is not None and hold_back(sick, 6) is None and hold_back(sick[:1], 1) is None
    cluster = FakeCluster(**dict.fromkeys("abc", ("drained", "phalanx reboot: x")), d=("idle", ""))
    told: list[str] = []
    healer = Healer(cluster, HealthPolicy.AUTOMATIC, lambda node, text: told.append(text), lambda heal: True)
    assert healer.look(0.0) == healer.look(1.0) == [] and len(told) == 1
    cluster.views = views(a=("drained", "phalanx reboot: x"), d=("idle", ""))
    cluster.fails = True
    assert healer.look(2.0) == []
    cluster.fails = False
    assert [heal.action for heal in healer.look(3.0)] == [HealAction.REBOOT]


def test_a_healing_is_noted_though_another_node_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look follows it with a stronger action; a node that itself failed is tried again."""
    cluster = FakeCluster(a=("drained", "phalanx reset: x"), b=("idle", ""), c=("idle", ""))
    told: list[str] = []
    healer = Healer(cluster, HealthPolicy.AUTOMATIC, lambda node, text: told.append(text), lambda heal: True)

    def fail(heal: Heal) -> None:
        raise NodesFailed(f"{failed} has a full disk", [failed])

    monkeypatch.setattr(cluster, "carry_out", fail)
    failed = "a"
    assert healer.look(0.0) == []
    failed = "b"
    assert [heal.action for heal in healer.look(1.0)] == [HealAction.RESET]
    assert [heal.action for heal in healer.look(2.0)] == [HealAction.REBOOT]
    assert told.count("a is healed, but other nodes are not: b has a full disk") == 1


def test_a_cluster_that_cannot_be_inspected_is_told_once_and_healed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(a=("drained", "phalanx reboot: x"), b=("idle", ""))
    told: list[str] = []
    healer = Healer(cluster, HealthPolicy.AUTOMATIC, lambda node, text: told.append(text), lambda heal: True)

    def fail() -> Any:
        raise RunError("head-1 does not run")

    for at in (0.0, 10.0):
        with monkeypatch.context() as away:
            away.setattr(cluster, "look", fail)
            assert healer.look(at) == healer.look(at + 1) == []
        assert len(healer.look(at + 2)) == 1
    assert told.count("the cluster cannot be inspected: head-1 does not run") == 2


def test_a_full_disk_does_not_end_the_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name in ("STATUS_FILE", "BASELINE_FILE"):
        monkeypatch.setattr(monitor, name, tmp_path / "file" / name)
    monkeypatch.setattr(monitor.checks, "run_checks", lambda checks: [])
    watched = monitor.NodeMonitor("w-1")
    monkeypatch.setattr(watched, "_sample", lambda now_s: sample())
    assert at_least(watched.look(), Severity.RESET) == []
    watched.close()
