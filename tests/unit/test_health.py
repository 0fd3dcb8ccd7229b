"""The checks of a node without accelerators on the real thing, made small or bad; carrying checks out; their files."""

import ctypes
import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import append_line
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.health import checks
from phalanx.health import host as host_health
from phalanx.health.dcgm import parse_dcgmi_diag
from phalanx.health.findings import (
    DeviceInfo,
    Finding,
    Severity,
    at_least,
    finding_from_json,
    is_usable,
    unique_sentences,
    verdict,
)
from phalanx.health.gpu import Gpu, GpuReading
from phalanx.launch import health_check
from phalanx.system import cpus
from phalanx.system.fork import fork_call
from tests.helpers import run_ranks

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
Told = list[tuple[str, str]]


def told(findings: list[Finding]) -> Told:
    assert all(finding.sentence for finding in findings)
    return [(finding.check, str(finding.severity)) for finding in findings]


# ------------------------------------------------------------------------------------------------------------- findings


def test_the_verdict_is_the_worst_and_what_is_unknown_is_no_worse_than_well() -> None:
    found = [Finding("a", severity, f"about {severity}") for severity in Severity]
    assert verdict(found) == Severity.ISOLATE
    assert verdict(found[:2]) == Severity.OK
    assert verdict(found[:1]) == verdict([]) == Severity.UNKNOWN
    assert [is_usable(severity) for severity in Severity] == [True] * 3 + [False] * 3
    assert [each.severity for each in at_least(found, Severity.RESET)] == ["isolate", "reboot", "reset"]
    assert unique_sentences([found[0], found[0], found[1]]) == ["about unknown", "about ok"]
    assert [finding_from_json(each.to_json()) for each in found] == found


def test_a_node_whose_hardware_broke_asks_for_a_spare(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    full = Finding("disk", Severity.RESET, "the run folder cannot be written")
    lost = Finding("gpu lost", Severity.REBOOT, "GPU 3 is lost; reboot the node")
    health_check.request_replacement(paths, [lost])  # there is no run
    append_line(paths.events, {"kind": "run_started"})
    health_check.request_replacement(paths, [full, Finding("ecc", Severity.WATCH, "an error was corrected")])
    assert node_requests.read_requests(paths) == []
    health_check.request_replacement(paths, [full, lost, Finding("ecc", Severity.RESET, "an error was not")])
    (asked,) = node_requests.read_requests(paths)
    assert (asked.node, asked.wanted, asked.by) == (
        socket.gethostname(),
        NodeRequestKind.REPLACE,
        node_requests.BY_HEALTH,
    )
    assert asked.reason == "GPU 3 is lost; reboot the node; an error was not"


def test_a_device_that_was_wrong_twice_is_told_at_each_start(tmp_path: Path) -> None:
    paths, device = RunPaths(tmp_path), DeviceInfo("fast:0", "Fast 9", True, "GPU-1a")
    row = {"rank": 0, "certain": True, "host": socket.gethostname(), "device": "Fast 9", "identity": "1a"}
    append_line(paths.suspects, row)
    for other in ({"certain": False}, {"host": "elsewhere"}, {"identity": "2b"}):
        append_line(paths.suspects, row | other)
    assert health_check.find_suspected_devices(paths, [device]) == []
    append_line(paths.suspects, row)
    (found,) = health_check.find_suspected_devices(paths, [device])
    assert (found.severity, found.value, found.where) == (Severity.WATCH, 2, "1a")
    assert found.sentence.startswith("Fast 9 (1a) held wrong parameters 2 times in this run")
    assert health_check.find_suspected_devices(paths, [DeviceInfo("fast:1", "Fast 9", True, "GPU-2b")]) == []


# -------------------------------------------------------------------------------------------- on this machine, made bad


def test_a_good_folder_and_one_with_little_room(tmp_path: Path) -> None:
    assert told(host_health.check_disk(tmp_path / "not" / "yet", room_bytes=1)) == [("disk", "ok")]
    assert told(host_health.check_disk(tmp_path, room_bytes=1 << 60)) == [("disk", "watch")]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing() -> None:
    assert run_ranks(_full, 1)[0] == [["disk", "reset"], ["shared memory", "reset"], ["clock", "unknown"]]


def _full(placement: Placement) -> Told:
    """Files may have a few bytes only, as when the disk is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    place = Path("/tmp")
    return told(host_health.check_disk(place) + host_health.check_shared_memory(place) + host_health.check_clock(place))


@ROOT_ONLY
def test_file_systems_that_are_too_small() -> None:
    small, full, read_only = run_ranks(_tiny_mounts, 1)[0]
    if small == "not allowed":
        pytest.skip("this container may not mount")
    assert small == [["shared memory", "watch"]]
    assert full == [["disk", "reset"]]
    assert read_only == [["disk", "reset"]]


def _tiny_mounts(placement: Placement) -> list[Told | str]:
    """A tmpfs of 64 MiB as a container's /dev/shm, the same filled up, and one that is read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, read_only = 0x00020000, 1 << 18 | 1 << 14, 1 | 32
    if libc.unshare(new_namespace) != 0 or libc.mount(b"none", b"/", None, private, None) != 0:
        return ["not allowed"] * 3
    place = Path(os.environ.get("TMPDIR", "/tmp")) / f"phalanx-mount-{os.getpid()}"
    place.mkdir()
    try:
        assert libc.mount(b"none", bytes(place), b"tmpfs", 0, b"size=64m") == 0
        found: list[Told | str] = [told(host_health.check_shared_memory(place))]
        with open(place / "filler", "wb", buffering=0) as file:
            while True:
                try:
                    file.write(b"x" * 2**20)
                except OSError:
                    break
        found.append(told(host_health.check_disk(place)))
        assert libc.mount(b"none", bytes(place), None, read_only, None) == 0
        return [*found, told(host_health.check_disk(place))]
    finally:
        libc.umount2(bytes(place), 2)
        place.rmdir()


def test_limits_that_are_too_low(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    assert run_ranks(_limited, 1, cards=str(tmp_path))[0] == [
        ["open files", "watch"], ["locked memory", "watch"], ["open files", "reset"], ["locked memory", "watch"],
        ["limits", "ok"],
    ]  # fmt: skip


def _limited(placement: Placement, cards: str) -> Told:
    found = []
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
    for files in (512, 128):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, 4096))
        found += told(host_health.check_limits(Path(cards)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    return found + told(host_health.check_limits(Path(cards) / "none"))


def test_a_clock_that_is_off(tmp_path: Path) -> None:
    assert told(host_health.check_clock(tmp_path)) == [("clock", "ok")]
    assert host_health.judge_clock_skew(1.9, "node 1").severity == Severity.OK
    behind = host_health.judge_clock_skew(12.0, "node 1")
    assert behind.severity == Severity.WATCH
    assert "12.0 s behind that of node 1" in behind.sentence
    assert "12.0 s ahead of that of node 1" in host_health.judge_clock_skew(-12.0, "node 1").sentence
    assert host_health.judge_clock_skew(-400.0, "node 1").severity == Severity.RESET


def test_memory_by_what_the_kernel_counts(tmp_path: Path) -> None:
    assert told(host_health.check_memory())[0][0] in ("memory", "memory errors")  # the real one can be read
    meminfo, edac = tmp_path / "meminfo", tmp_path / "mc"
    (edac / "mc0").mkdir(parents=True)
    meminfo.write_text("MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n")
    assert told(host_health.check_memory(meminfo, edac)) == [("memory", "ok")]
    (edac / "mc0" / "ce_count").write_text("7\n")
    (edac / "mc0" / "ue_count").write_text("0\n")
    assert told(host_health.check_memory(meminfo, edac)) == [("memory errors", "watch")]
    (edac / "mc0" / "ue_count").write_text("1\n")
    assert ("memory errors", "isolate") in told(host_health.check_memory(meminfo, edac))
    meminfo.write_text("MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 500000 kB\nHardwareCorrupted: 4 kB\n")
    assert told(host_health.check_memory(meminfo, tmp_path)) == [("memory", "watch"), ("memory errors", "watch")]


def test_processors_that_are_not_really_there(tmp_path: Path) -> None:
    assert host_health.check_cpus()[0].check == "processors"  # the real one can be read
    own = tmp_path / "own"
    own.write_text("0::/jobs/one\n")
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    assert told(host_health.check_cpus(4, tmp_path, own)) == [("processors", "ok")]
    (tmp_path / "jobs" / "cpu.max").write_text("150000 100000\n")  # a group above
    (tmp_path / "jobs" / "one" / "cpu.max").write_text("max 100000\n")
    found = host_health.check_cpus(4, tmp_path, own)
    assert (found[0].severity, found[0].value) == (Severity.WATCH, 1.5)
    assert cpus.count_cpus(tmp_path, own) == 1  # whole ones: a rank with more threads would wait for itself
    assert told(host_health.check_cpus(1, tmp_path, own)) == [("processors", "ok")]
    assert told(host_health.check_cpus(1, tmp_path, own, expected=2)) == [("processors", "watch")]
    own.write_text("3:cpu,cpuacct:/jobs\n")  # the older kind
    (tmp_path / "cpu" / "jobs").mkdir(parents=True)
    (tmp_path / "cpu" / "jobs" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "jobs" / "cpu.cfs_period_us").write_text("100000\n")
    assert host_health.check_cpus(2, tmp_path, own)[0].value == 0.5
    assert cpus.count_cpus(tmp_path, own) == 1
    (tmp_path / "cpu" / "jobs" / "cpu.cfs_quota_us").write_text("-1\n")
    assert (
        cpus.count_cpus(tmp_path, own) == cpus.count_cpus(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))
    )


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("cpu", os.SCHED_OTHER, os.SCHED_BATCH),
        ("cuda", os.SCHED_OTHER, os.SCHED_OTHER),
        ("cpu", os.SCHED_IDLE, os.SCHED_IDLE),
    ],
)
def test_threads_of_cpu_ranks_do_not_preempt_who_wakes_them(device: str, before: int, after: int) -> None:
    def policy() -> int:  # which is a thread's own
        os.sched_setscheduler(0, before, os.sched_param(0))
        cpus.use_batch_scheduling(device)
        return os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(policy).result() == after


def test_the_hosts_own_name_can_be_looked_up() -> None:
    assert host_health.check_hostname()[0].check == "name"


# --------------------------------------------------------------------------------------------------------- carrying out


def test_a_check_that_hangs_is_cut_off_and_named_and_the_others_go_on() -> None:
    found = run_ranks(_one_hangs, 1)[0]
    assert found["checks"] == [
        ["before", "ok"], ["slow disk", "reset"], ["between", "ok"], ["broken", "unknown"], ["killed", "unknown"],
        ["after", "ok"],
    ]  # fmt: skip
    assert "slow disk: no answer within 0.3 s" in found["sentences"][1]
    assert "ValueError: no such thing" in found["sentences"][3]
    assert "its process died" in found["sentences"][4]
    assert found["children"] == []


def _one_hangs(placement: Placement) -> dict[str, list]:
    def well(name: str) -> checks.HealthCheck:
        return checks.HealthCheck(name, lambda: [Finding(name, Severity.OK, "well")], 20, Severity.REBOOT)

    def hang() -> list[Finding]:
        time.sleep(60)
        return []

    def fail() -> list[Finding]:
        raise ValueError("no such thing")

    def die() -> list[Finding]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return []

    found = checks.run_checks(
        [
            well("before"),
            checks.HealthCheck("slow disk", hang, 0.3, Severity.RESET),
            well("between"),
            checks.HealthCheck("broken", fail, 20, Severity.RESET),
            checks.HealthCheck("killed", die, 20, Severity.RESET),
            well("after"),
        ]
    )
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"checks": told(found), "sentences": [each.sentence for each in found], "children": children}


def test_gpus_and_the_kernels_log_belong_together(tmp_path: Path) -> None:
    found = run_ranks(_with_a_sick_gpu, 1, folder=str(tmp_path))[0]
    assert ["recovery action", "reset"] in found["all"]
    assert [check for check, _ in found["all"]][-1] != "gpus"
    assert ["gpus", "ok"] in found["only the other"]
    assert ["gpu count", "reboot"] in found["expected"]
    assert ["gpus", "reboot"] in found["hung"]
    assert not any(check.startswith("gpu") for check, _ in found["none"])
    assert found["quick"] == found["none"]


def _with_a_sick_gpu(placement: Placement, folder: str) -> dict[str, Told]:
    place = Path(folder)
    gpus = (Gpu(0, "GPU-0", "one", "0000:3b:00", recovery=1), Gpu(1, "GPU-1", "two", "0000:5e:00"))

    def ask() -> GpuReading:
        return GpuReading(gpus)

    def hang() -> GpuReading:
        time.sleep(60)
        return GpuReading()

    three = fork_call(lambda: checks.collect_baseline(lambda: GpuReading((*gpus, Gpu(2, "GPU-2")))), timeout_s=20)
    found = {
        "all": told(checks.run_health_checks(checks.HealthScope(place), ask)),
        "only the other": told(checks.run_health_checks(checks.HealthScope(place, ["GPU-1"]), ask)),
        "expected": told(checks.run_health_checks(checks.HealthScope(place, expected=three), ask)),
        "none": told(checks.run_health_checks(checks.HealthScope(place, [], network=False), hang)),
        "quick": told(checks.run_quick_checks(place, [])),
    }
    checks.GPUS_S = 0.3
    return found | {"hung": told(checks.run_health_checks(checks.HealthScope(place), hang))}


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_baseline_is_read_as_it_was_written_and_anything_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "baseline.json"
    tree = {"version": 1, "host": "n1", "cpus": 8, "gpus": [{"uuid": "GPU-0", "name": "one", "bus": "0000:3b:00"}]}
    checks.write_json(file, tree)
    assert checks.read_baseline(file) == tree
    for text in ("", "[]", "{}", '{"version": 1, "cpus": 2, "gpus": [1]}', '{"version": 9, "cpus": 2, "gpus": []}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--save-baseline"):
            checks.read_baseline(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        checks.read_baseline(tmp_path / "none.json")


def test_the_diagnosis_of_nvidias_gpu_manager() -> None:
    test = '{"name": "Memory", "results": [{"gpu_id": "0", "status": "%s", "info": "page retired"}]}'
    report = '{"DCGM GPU Diagnostic": {"test_categories": [{"category": "Hardware", "tests": [%s]}]}}'
    assert told(parse_dcgmi_diag(report % (test % "Pass"))) == [("dcgmi diag", "ok")]
    assert told(parse_dcgmi_diag("some noise\n" + report % (test % "Warn"))) == [("dcgmi diag", "watch")]
    failed = parse_dcgmi_diag(report % (test % "Fail"))
    assert told(failed) == [("dcgmi diag", "reset")]
    assert "Memory ended with fail on GPU 0: page retired" in failed[0].sentence
    assert told(parse_dcgmi_diag("", "Error: cannot connect")) == [("dcgmi diag", "unknown")]
    assert told(parse_dcgmi_diag('{"body": 3}')) == [("dcgmi diag", "unknown")]
