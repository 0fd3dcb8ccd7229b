"""hardware.json: what is written is read again, what is not fit is refused; limits of memory only fall."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.autotune import measure
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.launch import measure_devices
from phalanx.layout import hardware, memory_limits
from phalanx.layout.hardware import Hardware, MeasuredDevice, MeasuredLink, fit_line

SMALL = MeasuredDevice(0, 0, 0, "here", "cpu", "cpu", 2**33, 16, ((1, 0.3), (3, 0.5)), None, 2e-9)
LARGE = MeasuredDevice(1, 0, 1, "here", "gpu:0", "H200", 2**37, 64, ((1, 0.1), (3, 0.11), (9, 0.15)), 5e10)
BOTH = Hardware({"hidden": 64, "code": None}, (SMALL, LARGE), MeasuredLink(1e9, 1e-4, 3e-4))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for known in (BOTH, Hardware({}, (SMALL,), None)):
        hardware.write_hardware(tmp_path / "h.json", known)
        assert hardware.read_hardware(tmp_path / "h.json") == known


def test_a_file_from_before_bytes_were_measured_is_read(tmp_path: Path) -> None:
    tree = hardware.to_json(BOTH)
    for device in tree["devices"]:
        del device["carries_s_per_byte"]
    del tree["link"]["busy_latency_s"]
    read = hardware.from_json(json.loads(json.dumps(tree)))
    assert read.devices == (replace(SMALL, carries_s_per_byte=None), LARGE)
    assert read.link == MeasuredLink(1e9, 1e-4)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ((), [1], "it holds no table"),
        (("work",), 3, "its work is 3, not a table"),
        (("devices",), [], "it lists no devices"),
        (("devices",), None, "it lists no devices"),
        (("devices", 0), "x", "its device 0 is 'x', not a table"),
        (("devices", 1, "rank"), 0, "its devices are not in order of rank: number 1 has rank 0"),
        (("devices", 1, "most"), 0, "most of device 1 is 0, not a whole number from 1"),
        (("devices", 1, "most"), True, "most of device 1 is True, not a whole number from 1"),
        (("devices", 0, "host"), 7, "host of device 0 is 7, not a text"),
        (("devices", 0, "times"), [[1, 0.0]], "of device 0 are not pairs of rising sizes and seconds above zero"),
        (("devices", 0, "times"), [[2, 1.0], [1, 2.0]], "times of device 0 are not pairs of rising sizes"),
        (("devices", 0, "times"), [1], "the times of device 0 are not pairs"),
        (("devices", 0, "host_to_device_bytes_per_s"), -1, "_per_s of device 0 is -1, not a number above"),
        (("devices", 0, "carries_s_per_byte"), 0, "carries_s_per_byte of device 0 is 0, not a number above"),
        (("link",), [], "its link is [], not a table"),
        (("link", "latency_s"), "1", "latency_s of link is '1', not a number above zero"),
        (("link", "busy_latency_s"), -1.0, "busy_latency_s of link is -1.0, not a number above zero"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_a_sentence(tmp_path: Path, path: tuple[Any, ...], value: Any, said: str) -> None:
    tree: Any = json.loads(json.dumps(hardware.to_json(BOTH)))
    if path:
        parent = tree
        for part in path[:-1]:
            parent = parent[part]
        parent[path[-1]] = value
    file = tmp_path / "h.json"
    file.write_text(json.dumps(tree if path else value))
    with pytest.raises(ConfigError, match=rf"^the hardware file {re.escape(str(file))} cannot be used: ") as error:
        hardware.read_hardware(file)
    assert said in str(error.value)
    assert str(error.value).endswith("measure again with `phalanx hardware`, or delete the file")


@pytest.mark.parametrize("key", ["version", "work", "devices", "link", "most", "times"])
def test_a_file_that_lacks_something_is_refused(tmp_path: Path, key: str) -> None:
    tree = json.loads(json.dumps(hardware.to_json(BOTH)))
    (tree if key in tree else tree["devices"][1]).pop(key)
    (tmp_path / "h.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=rf"has no {key}|format version unknown"):
        hardware.read_hardware(tmp_path / "h.json")


def test_a_file_that_is_torn_or_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\); name one that"):
        hardware.read_hardware(file)
    hardware.write_hardware(file, BOTH)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ConfigError, match="is not JSON, so it is damaged; measure again"):
        hardware.read_hardware(file)


def test_a_file_fits_the_job_that_it_was_measured_for_and_no_other() -> None:
    assert hardware.explain_mismatch(BOTH, ["cpu", "H200"], BOTH.work) is None
    assert hardware.explain_mismatch(BOTH, ["cpu"], BOTH.work) == "it was measured with 2 ranks, and this job has 1"
    assert hardware.explain_mismatch(BOTH, ["cpu", "A100"], BOTH.work) == (
        "rank 1 was on a device called 'H200' when it was measured, and is on 'A100' now"
    )
    for work, said in (
        ({"hidden": 128, "code": None}, "hidden was 64 and is 128 now"),
        ({"hidden": 64, "code": None, "new": 1}, "new was None and is 1 now"),
        ({"hidden": 64, "code": "a.py"}, "code was None and is 'a.py' now"),
    ):
        found = hardware.explain_mismatch(BOTH, ["cpu", "H200"], work)
        assert found == f"it was measured for another piece of work: {said}"


@given(
    st.floats(0, 10),
    st.floats(1e-3, 10),
    st.lists(st.integers(1, 200), min_size=2, max_size=6, unique=True).map(sorted),
)
def test_times_on_a_line_give_that_line(fixed: float, each: float, sizes: list[int]) -> None:
    found = fit_line([(size, fixed + size * each) for size in sizes])
    assert found is not None
    assert found == pytest.approx((fixed, each), rel=1e-4, abs=1e-5 * (fixed + each * max(sizes)))


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=5))
def test_no_noise_makes_more_sequences_take_less_time(seconds: list[float]) -> None:
    found = fit_line([(3**number, took) for number, took in enumerate(seconds)])
    assert found is not None
    fixed, each = found
    assert fixed >= 0
    assert each > 0


def test_speeds_of_devices() -> None:
    assert fit_line([]) is None
    slow, fast = hardware.fit_speeds(BOTH)
    assert (slow.sequence_s, slow.fixed_s) == pytest.approx((0.1, 0.2))
    assert (slow.most, fast.most) == (16, 64)
    assert fast.fixed_s + fast.sequence_s == pytest.approx(0.1, rel=0.05)
    unknown = hardware.fit_speeds(replace(BOTH, devices=(SMALL, replace(LARGE, times=()))))
    assert unknown[0].sequence_s == unknown[1].sequence_s
    assert [speed.most for speed in unknown] == [16, 64]


def test_devices_of_one_model_that_differ_by_noise_count_as_alike() -> None:
    def pair(ratio: float) -> list[float]:
        other = replace(SMALL, rank=1, times=tuple((size, took * ratio) for size, took in SMALL.times))
        return [speed.sequence_s for speed in hardware.fit_speeds(replace(BOTH, devices=(SMALL, other)))]

    assert len(set(pair(1.05))) == 1
    one, other = pair(1.5)
    assert other == pytest.approx(1.5 * one)


# ------------------------------------------------------------------------------------------------------- out of memory


def unlike(first: float, *others: float, model: str = "one") -> Hardware:
    """Devices that take so long for a sequence."""
    devices = [
        replace(SMALL, rank=rank, model="one" if rank == 0 else model, times=((1, seconds), (4, 4 * seconds)))
        for rank, seconds in enumerate((first, *others))
    ]
    return replace(BOTH, devices=tuple(devices))


def test_devices_of_one_model_that_differ_are_measured_once_more_and_the_better_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each device: others may use the machine now here, now there."""
    turns = [unlike(0.1, 0.4, 0.1), unlike(0.3, 0.11, 0.1)]
    monkeypatch.setattr(measure, "_measure_once", lambda *args, turn: (turns[turn], None))
    said: list[str] = []
    mesh: Any = SimpleNamespace(rank=0)
    nothing: Any = None
    config: Any = SimpleNamespace(parallel=SimpleNamespace(context=1, expert=1))
    found = measure.measure_devices(config, nothing, nothing, mesh, said.append)
    assert [device.times[0] for device in found.devices] == [(1, 0.1), (1, 0.11), (1, 0.1)]
    (why,) = said
    assert why.startswith("once more, since rank 1 takes 4.0 times as long as rank 0, both of one")
    assert len({speed.sequence_s for speed in hardware.fit_speeds(found)}) == 1


@pytest.mark.parametrize("known", [unlike(0.1, 0.12), unlike(0.1, 0.4, model="another"), unlike(0.1)])
def test_what_differs_by_noise_or_by_model_is_not_measured_again(known: Hardware) -> None:
    assert hardware.describe_uneven_devices(known) is None


def test_of_two_measurements_each_figure_is_the_better() -> None:
    one, other = unlike(0.1), unlike(0.2)
    more = replace(other.devices[0], most=7, times=((1, 0.2), (9, 1.0)), host_to_device_bytes_per_s=5.0)
    less = replace(one.devices[0], most=5, carries_s_per_byte=1e-9)
    one = replace(one, devices=(less,), link=MeasuredLink(10.0, 1.0))
    other = replace(other, devices=(more,), link=MeasuredLink(9.0, 0.1))
    (found,) = hardware.merge_fastest(one, other).devices
    assert found.times == ((1, 0.1), (4, 0.4), (9, 1.0)) and found.most == 7
    assert (found.host_to_device_bytes_per_s, found.carries_s_per_byte) == (5.0, 1e-9)
    assert hardware.merge_fastest(one, other).link == MeasuredLink(10.0, 1.0)


def test_a_limit_only_falls_and_is_noticed_once(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    lowered = memory_limits.watch_limits(paths)
    assert memory_limits.read_micro_batch_limits(paths) == {}
    assert not lowered()
    assert memory_limits.record_out_of_memory(paths, 1, 7) == 3
    assert memory_limits.read_micro_batch_limits(paths) == {1: 3}
    assert lowered()
    assert not lowered()
    memory_limits.record_out_of_memory(paths, 1, 3)
    assert memory_limits.read_micro_batch_limits(paths) == {1: 1}
    assert lowered()
    memory_limits.record_out_of_memory(paths, 0, 100)
    assert memory_limits.read_micro_batch_limits(paths) == {0: 50, 1: 1}
    assert lowered()


def test_a_limit_is_of_its_device(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for rank, device in enumerate(("small", "small", "")):
        memory_limits.record_out_of_memory(paths, rank, 8, device)
    memory_limits.drop_stale_limits(paths, ["small", "large", "small"])
    assert memory_limits.read_micro_batch_limits(paths) == {0: 4, 2: 4}
    memory_limits.drop_stale_limits(paths, ["small"])
    assert memory_limits.read_micro_batch_limits(paths) == {0: 4}


def test_a_limit_that_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    memory_limits.record_out_of_memory(paths, 0, 8)
    for text in ("", "[]", '{"rank": 0}', '{"rank": 0, "most": 0}', '{"rank": 0, "most": "4"}'):
        paths.memory_limit(0).write_text(text)
        assert memory_limits.read_micro_batch_limits(paths) == {}


@pytest.mark.parametrize(
    ("leads", "code", "words"), [(0, 0, "node 0 wrote the file"), (1, 1, "was lost; measure again")]
)
def test_what_was_measured_is_lost_with_node_0(
    leads: int, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the other nodes are done then."""
    monkeypatch.setattr(measure_devices, "run_agent", lambda *_: 0)
    circle = SimpleNamespace(me=SimpleNamespace(node=leads))
    peer: Any = SimpleNamespace(is_leader=True, over=(0, "the run is done"), membership=circle, close=lambda: None)
    assert measure_devices._run(peer) == code
    assert peer.over[0] == code and peer.over[1].endswith(words)
