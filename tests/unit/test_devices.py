"""What is shown of each device: its share, how busy it was, what an even split would have cost."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Rich

from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.layout import balance, hardware
from phalanx.layout.hardware import Hardware, MeasuredDevice
from phalanx.report import devices, event_text, html, tables
from phalanx.report.console import Console, render_run_summary
from phalanx.report.devices import DeviceStep
from phalanx.report.history import read_run_history


def record(step: int, shares: list[int] | None, busy_s: list[float] | None, step_s: float = 1.0) -> dict[str, Any]:
    base = {"step": step, "attempt": 1, "loss": 2.0, "step_s": step_s, "tokens_per_s": 100.0, "time": 1000.0 + step}
    return base | {"shares": shares, "busy_s": busy_s}


MIXED = [record(step, [24, 8], [0.96, 0.8]) for step in range(1, 5)]


def test_an_even_split_would_have_waited_for_the_device_that_needs_longest_for_a_sequence() -> None:
    # Rank 1 needs 0.1 s for a sequence: 16 of them take 1.6 s, and 0.04 s of the step were nobody's work.
    assert DeviceStep((24, 8), (0.96, 0.8), 1.0).even_s({}) == pytest.approx(1.64)
    # With equal shares it is the step itself.
    assert DeviceStep((16, 16), (0.5, 0.9), 1.0).even_s({}) == pytest.approx(1.0)
    # A rank without a share has still run one sequence that counts for nothing. Two thirds of that are what a
    # micro-batch takes by itself, as was measured: two take 0.4 s.
    assert DeviceStep((4, 0), (0.4, 0.3), 0.4).even_s({1: (0.04, 0.02)}) == pytest.approx(0.4)
    assert DeviceStep((24, 8), (0.96, 0.8), 1.0).even_s({1: (0.4, 0.05)}) == pytest.approx(1.24)
    # Two micro-batches take 0.8 s by themselves, and six sequences 0.3 s more.
    assert DeviceStep((8, 4), (1.2, 1.0), 1.2, parts=2).even_s(dict.fromkeys((0, 1), (0.4, 0.05))) == pytest.approx(1.1)
    # Each with its own number of micro-batches, of one sequence: rank 1 would run four instead of two.
    assert DeviceStep((6, 2), (0.6, 0.6), 0.7, 6, parts_by_rank=(6, 2)).even_s({1: (0.1, 0.2)}) == pytest.approx(1.3)
    # Of two, as rank 0 has them, it would run two, which take 0.04 s by themselves and 0.32 s for four sequences.
    assert DeviceStep((8, 0), (0.8, 0.1), 0.9, 4, parts_by_rank=(4, 1)).even_s({1: (0.02, 0.08)}) == pytest.approx(0.5)
    # Work that lies a little before or behind its step makes an even split neither longer nor shorter.
    assert DeviceStep((16, 16), (0.5, 1.1), 1.0).even_s({}) == pytest.approx(1.0)


def test_a_record_names_micro_batches_of_all_ranks_or_of_each() -> None:
    alike, own = record(1, [6, 2], [0.6, 0.6]) | {"parts": 6}, record(1, [6, 2], [0.6, 0.6]) | {"parts": [6, 2]}
    assert devices.parse_device_step(alike) == DeviceStep((6, 2), (0.6, 0.6), 1.0, 6)
    assert devices.parse_device_step(own) == DeviceStep((6, 2), (0.6, 0.6), 1.0, 6, (6, 2))


def test_copies_of_a_model_that_several_ranks_hold_are_called_so() -> None:
    found = devices.summarize_devices([record(1, [4, 0], [0.9, 0.3])], dict.fromkeys(range(4), "cpu"), {1: (0.1, 0.1)})
    assert found is not None
    assert found.even_s is None, "what was measured was of a rank"
    assert shown(devices.render_device_table(found)).split()[:2] == ["copy", "device"]
    assert [device.name for device in found.devices] == ["cpu", "cpu"]


def test_of_a_device_that_had_no_share_and_was_not_measured_nothing_is_said() -> None:
    assert DeviceStep((12, 0), (0.9, 0.3), 1.0).even_s({}) is None
    found = devices.summarize_devices([record(step, [12, 0], [0.9, 0.3]) for step in (1, 2)], {})
    assert found is not None
    assert (found.even_s, found.verdict) == (None, "")
    assert "even split" not in shown(devices.render_device_table(found)) + devices.render_device_card(found)[0]
    # A step in which it had one tells what all of them would have taken.
    some = devices.summarize_devices([MIXED[0], record(2, [10, 2], [0.9, 0.4]), record(3, [12, 0], [0.9, 0.3])], {})
    assert some is not None
    assert some.even_s == pytest.approx(1.3)


def test_nobody_is_shown_as_busy_for_longer_than_a_step() -> None:
    over = record(1, [3, 3], [1.2, 0.6])
    found = devices.summarize_devices([over], {})
    assert found is not None
    assert [device.busy for device in found.devices] == [1.0, 0.6]
    step = devices.parse_device_step(over)
    assert step is not None
    assert devices.format_shares([step]) == "shares 3+3, busy 100/60 %"
    assert devices.device_columns([over], 2)["busy_0"] == [1.0]


def test_line_and_table_mean_the_same_by_busy_and_leave_out_ranks_that_are_gone() -> None:
    """Steps of two ranks before one of three say nothing of the ranks that there are now."""
    found = [record(1, [8, 8], [0.1, 0.1]), record(2, [4, 4, 8], [0.1, 0.1, 0.1])]
    newest = [record(3, [8, 8], [0.9, 0.5]), record(4, [10, 6], [0.9, 0.4]), record(5, [10, 6], [0.6, 0.6])]
    summary = devices.summarize_devices([*found, *newest], {})
    assert summary is not None and summary.steps == 2  # of the three the first is left out
    assert [round(device.busy, 2) for device in summary.devices] == [0.75, 0.5]
    steps = [step for each in [*found, *newest] if (step := devices.parse_device_step(each)) is not None]
    assert devices.format_shares(steps[:-2]) == "shares 8+8, busy 90/50 %"
    assert devices.format_shares(steps[:1] + steps[-2:]) == "shares 10+6, busy 53/37 %"
    assert devices.format_shares(steps[1:2] + steps[-2:]) == "shares 10+6, busy 75/50 %"


def test_devices_that_were_not_measured_are_called_as_the_start_found_them(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert devices.read_device_names(paths) == {}
    append_line(paths.events, {"kind": EventKind.RUN_STARTED, "models": ["cpu", "T4"]})
    assert devices.read_device_names(paths) == {0: "cpu", 1: "T4"}
    times = ((1, 0.1),)
    measured = [
        MeasuredDevice(rank, 0, rank, "here", "cpu", model, 1, 1, times, None) for rank, model in enumerate("ab")
    ]
    hardware.write_hardware(paths.hardware, Hardware({}, tuple(measured), None))
    assert (devices.read_device_names(paths), devices.read_device_lines(paths)) == (
        {0: "cpu", 1: "T4"},
        {},
    )  # others were measured
    append_line(paths.events, {"kind": EventKind.RUN_STARTED, "models": ["a", "b"]})
    assert (devices.read_device_names(paths), len(devices.read_device_lines(paths))) == ({0: "a", 1: "b"}, 2)


def test_a_summary_leaves_out_the_first_step_and_steps_of_other_worlds() -> None:
    first = record(1, [16, 16], [30.0, 30.0], 60.0)
    found = devices.summarize_devices([record(1, [32], [1.0]), first, *MIXED, record(9, None, None)], {1: "slow"})
    assert found is not None
    assert (found.step_s, found.even_s) == pytest.approx((1.0, 1.64))
    fast, slow = found.devices
    assert (fast.last_share, slow.last_share, fast.name, slow.name) == (24, 8, "", "slow")
    assert (fast.share, fast.busy, fast.sequences_per_s) == pytest.approx((0.75, 0.96, 25.0))
    assert (slow.share, slow.busy, slow.sequences_per_s) == pytest.approx((0.25, 0.8, 10.0))
    assert found.verdict == "an even split would have taken 1.64 times as long: 1.6 s a step instead of 1.0 s"
    nearly = devices.summarize_devices([record(1, [51, 49], [1.0, 1.08], 1.1)], {})
    assert nearly is not None
    assert nearly.verdict == "an even split would have taken 1.02 times as long as the 1.1 s of a step"
    alike = devices.summarize_devices([record(1, [8, 8], [0.9, 0.9])], {})
    assert alike is not None
    assert alike.verdict == "an even split would have been as fast: 1.0 s a step"
    wrong = devices.summarize_devices([record(1, [2, 10], [0.2, 1.0])], {})  # of two like ranks
    assert wrong is not None
    assert wrong.verdict == "an even split would have been faster: 600 ms a step instead of 1.0 s"


@pytest.mark.parametrize(
    "broken",
    [
        {"shares": None}, {"busy_s": None}, {"shares": [1]}, {"shares": [1, -1]}, {"shares": [0, 0]},
        {"shares": ["1", 2]}, {"busy_s": [1.0, "x"]}, {"busy_s": [1.0, -1.0]}, {"busy_s": 3}, {"step_s": 0},
        {"step_s": None}, {"shares": [True, 2]},
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_says_nothing(broken: dict[str, Any]) -> None:
    assert devices.parse_device_step(MIXED[0]) is not None
    assert devices.parse_device_step(MIXED[0] | broken) is None
    assert devices.summarize_devices([MIXED[0] | broken], {}) is None


def shown(renderable: Any) -> str:
    stream = io.StringIO()
    Rich(file=stream, width=160).print(renderable)
    return stream.getvalue()


def test_the_console_shows_shares_while_it_runs_and_a_table_at_the_end(tmp_path: Path) -> None:
    stream, paths = io.StringIO(), RunPaths(tmp_path)
    with Console(4, "run", stream) as console:
        for each in MIXED:
            console.on_step(each)
            append_line(paths.metrics, each)
    assert "shares 24+8, busy 96/80 %" in stream.getvalue()
    device = MeasuredDevice(0, 0, 0, "here", "cpu", "quick", 1, 32, ((1, 0.04),), None)
    other = MeasuredDevice(1, 1, 0, "there", "cpu", "slow", 1, 32, ((1, 0.1),), None)
    hardware.write_hardware(paths.hardware, Hardware({}, (device, other), None))
    lines = shown(render_run_summary(paths)).splitlines()
    (fast,) = [line for line in lines if "quick on here" in line]
    (slow,) = [line for line in lines if "slow on there" in line]
    assert fast.split() == ["0", "quick", "on", "here", "24", "75.0", "%", "96", "%", "4", "%", "25"]
    assert slow.split() == ["1", "slow", "on", "there", "8", "25.0", "%", "80", "%", "20", "%", "10"]
    assert any("1.64 times as long" in line for line in lines)
    slower = replace(other, times=((1, 0.45), (5, 0.65)))  # of which 0.4 s are what a micro-batch takes by itself
    hardware.write_hardware(paths.hardware, Hardware({}, (device, slower), None))
    assert "1.24 times as long" in shown(render_run_summary(paths))
    paths.hardware.write_text("torn")
    assert "quick" not in shown(render_run_summary(paths))


def test_the_table_of_what_was_measured_fits_a_narrow_terminal() -> None:
    times = ((1, 0.04), (3, 0.1), (9, 0.2), (27, 0.5))
    known = Hardware(
        {"positions": 256},
        (
            MeasuredDevice(0, 0, 0, "here", "cuda:0", "NVIDIA H100 80GB HBM3", 80 * 2**30, 16, times, 5e10),
            MeasuredDevice(1, 0, 1, "here", "cuda:1", "Tesla T4", 15 * 2**30, 16, times[:1], 5e9),
        ),
        None,
    )
    stream = io.StringIO()
    Rich(file=stream, width=80).print(tables.render_hardware_table(known, balance.Division((9, 7), 1)))
    found = stream.getvalue().replace("…", "(cut)").split()
    for word in ("device", "memory", "largest", "micro-", "batch", "sequences", "second", "best", "host", "share"):
        assert word in found, word
    stream.seek(0)
    Rich(file=stream, width=80).print(tables.render_hardware_table(known, balance.Division((9, 2), 9, (9, 2))))
    assert "of a step in 2 to 9 micro-batches" in " ".join(stream.getvalue().split())
    for word in ("cuda:0", "NVIDIA", "H100", "HBM3", "80", "1:6.4k", "9:11.5k", "27:13.8k", "46.6", "54", "T4", "25"):
        assert word in found, word


def test_one_rank_is_shown_as_before(tmp_path: Path) -> None:
    stream, paths = io.StringIO(), RunPaths(tmp_path)
    alone = record(1, [8], [0.9])
    with Console(1, "run", stream) as console:
        console.on_step(alone)
    append_line(paths.metrics, alone)
    assert "shares" not in stream.getvalue()
    assert "busy" not in shown(render_run_summary(paths))
    assert "Devices" not in html.write_report(paths).read_text()
    assert not {"shares", "busy"} & {chart["id"] for chart in html.report_payload(read_run_history(paths))["charts"]}


def test_the_report_has_a_table_and_curves_of_the_devices(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for each in [*MIXED, record(5, [20, 12], [0.9, 0.95])]:
        append_line(paths.metrics, each)
    drawn = html.report_payload(read_run_history(paths))
    charts = {chart["id"]: chart for chart in drawn["charts"]}
    assert [trace["column"] for trace in charts["shares"]["traces"]] == ["share_0", "share_1"]
    assert [trace["name"] for trace in charts["busy"]["traces"]] == ["rank 0", "rank 1"]
    assert drawn["kept"]["share_0"] == [0.75, 0.75, 0.75, 0.75, 0.625]
    assert drawn["kept"]["busy_1"] == [0.8, 0.8, 0.8, 0.8, 0.95]
    text = html.write_report(paths).read_text()
    assert "<h3>Devices<span>of 4 steps on these ranks; an even split would have taken" in text
    assert json.dumps([0.75] * 4)[1:-1].replace(" ", "") in text


def test_what_several_ranks_hold_together_is_called_a_copy(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for each in MIXED:
        append_line(paths.metrics, each)
    for attempt, world in ((1, 4), (2, 1)):  # then one rank goes on, of which no step tells
        started = {"kind": EventKind.RUN_STARTED, "models": ["cpu"] * world, "world": world, "attempt": attempt}
        append_line(paths.events, started | {"time": float(attempt)})
    paths.config.write_text("parallel: {tensor: 2, pipeline: 1}")
    charts = {chart["id"]: chart for chart in html.report_payload(read_run_history(paths))["charts"]}
    for name in ("shares", "busy"):
        assert [trace["name"] for trace in charts[name]["traces"]] == ["copy 0", "copy 1"]
    text = html.write_report(paths).read_text()
    assert "<th>copy</th>" in text
    assert "<span>tensor 2</span>" in text


def test_of_many_ranks_the_extremes_are_drawn(tmp_path: Path) -> None:
    ranks = 20
    many = [record(step, list(range(1, ranks + 1)), [0.5 + 0.01 * rank for rank in range(ranks)]) for step in (1, 2)]
    found = devices.device_columns([*many, record(3, None, None)], devices.world_size_of(many))
    assert found["share_least"] == [pytest.approx(1 / 210, rel=1e-5)] * 2 + [None]
    assert found["busy_greatest"] == [0.69, 0.69, None]
    assert [column for _, column, _ in devices.device_traces(ranks)[1]] == [
        "busy_least",
        "busy_median",
        "busy_greatest",
    ]
    assert (
        devices.format_shares([DeviceStep(tuple(range(1, 21)), tuple([0.5] * 20), 1.0)])
        == "shares 1 to 20, busy 50 to 50 %"
    )
    whole = devices.summarize_devices(many, {})
    assert whole is not None
    assert len(devices.render_device_card(whole)[0].split("<tr>")) == 1 + 1 + 16
    assert "16 of 20 ranks" in devices.render_device_card(whole)[0]


def test_sentences_of_what_was_measured() -> None:
    rows = [{"rank": rank, "model": "T4", "most": 4, "sequences_per_s": 10.0 * (rank + 1)} for rank in range(2)]
    event = {"kind": EventKind.MEASURED, "devices": rows, "seconds": 1.25}
    assert (
        event_text.describe_event(event) == "devices measured in 1.2 s: sequences/s of rank 0 (T4) 10, rank 1 (T4) 20"
    )
    rows += [
        {"rank": rank, "model": "T4", "most": 4, "sequences_per_s": None if rank == 3 else 15.0} for rank in range(2, 7)
    ]
    assert event_text.describe_event(event | {"devices": rows}).endswith(
        "sequences/s of rank 0 (T4) 10, rank 1 (T4) 20, the slowest and the fastest of 6"
    )
    assert event_text.describe_event({"kind": EventKind.MEASURED}) == "devices measured"
    assert event_text.describe_event({"kind": EventKind.MEASURING, "reason": "nothing was known"}) == (
        "measuring the devices: nothing was known"
    )
    shared = {
        "kind": EventKind.WORK_SPLIT,
        "step": 1,
        "shares": [24, 8],
        "parts": 2,
        "why": "as the devices were measured",
    }
    assert event_text.describe_event(shared) == (
        "batch split from step 1 on: 24+8 in 2 micro-batches each (as the devices were measured)"
    )
    assert event_text.describe_event(shared | {"parts": [12, 8]}) == (
        "batch split from step 1 on: 24+8 in 12+8 micro-batches (as the devices were measured)"
    )
    many = {"shares": list(range(1, 11)), "parts": list(range(1, 11))}
    assert event_text.describe_event(shared | many).startswith(
        "batch split from step 1 on: 1 to 10 in 1 to 10 micro-batches (as"
    )
    times = {
        "kind": EventKind.WORK_REBALANCED,
        "step": 9,
        "parts": 1,
        "why": "rank 1 is slower",
        "before_s": 2.0,
        "after_s": 1.25,
    }
    assert event_text.describe_event(times | {"shares": list(range(1, 11))}) == (
        "batch rebalanced from step 9 on: 1 to 10 (rank 1 is slower); predicted step 1.2 s, was 2.0 s"
    )
    assert event_text.describe_event({"kind": EventKind.WORK_SPLIT, "step": 3}) == "batch split from step 3 on"
    assert event_text.describe_event({"kind": EventKind.MEMORY_LIMITED, "most": {"1": 4}}) == (
        "micro-batch limited after out of memory: rank 1 at most 4"
    )
