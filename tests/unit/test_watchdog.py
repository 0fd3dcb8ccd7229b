"""Who hangs, and who merely waits: the decision on any pulses, and real processes that are judged by theirs."""

import contextlib
import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.core import progress_page
from phalanx.core.errors import RunError
from phalanx.core.progress_page import PHASES, SIZE_BYTES, STEP_PHASES, WAITS, ProgressPage, RankProgress, read_progress
from phalanx.elastic.membership import messages
from phalanx.elastic.node import watchdog
from phalanx.elastic.node.watchdog import (
    FACTOR,
    WARM_STEPS,
    HangTimeouts,
    ProcessStatus,
    ProgressReport,
    StepHistory,
    Watchdog,
    find_hang,
    make_hang_timeouts,
    progress_order,
)
from phalanx.elastic.node.worker import ask_flight_recorder
from phalanx.system.exit_causes import HANG
from tests.helpers import ROOT

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
PATIENCE = HangTimeouts(floor_s=20.0, other_s=600.0)
WORKING = RankProgress(0, 7, "forward", 0, "", idle_s=1.0, steps=6, longest_s=0.5)


def beat(rank: int, **changes: Any) -> RankProgress:
    return dataclasses.replace(WORKING, rank=rank, **changes)


BEATS = st.builds(
    RankProgress,
    rank=st.just(0),
    step=st.integers(0, 5),
    phase=st.sampled_from(PHASES),
    micro_batch=st.integers(0, 3),
    waits_for=st.sampled_from(WAITS),
    idle_s=st.floats(0, 2000),
    steps=st.integers(0, 5),
    longest_s=st.floats(0, 100),
)
RANKS = st.lists(BEATS, min_size=1, max_size=5).map(
    lambda beats: [dataclasses.replace(each, rank=rank) for rank, each in enumerate(beats)]
)
SIGNS = st.builds(ProcessStatus, stopped=st.booleans(), traced=st.just(False), on_disk=st.booleans())


@calm
@given(RANKS, st.data())
def test_nobody_is_named_who_has_moved_within_the_patience(beats: list[RankProgress], data: st.DataObject) -> None:
    signs = {each.rank: data.draw(SIGNS) for each in beats}
    over = {each.rank: each.idle_s > PATIENCE.timeout_for(each, signs[each.rank]) for each in beats}
    hang = find_hang(beats, signs, len(beats), PATIENCE)
    if hang is None:
        # Then nobody who does not wait is still, and somebody is not still at all.
        still = [each for each in beats if over[each.rank] and not signs[each.rank].on_disk]
        assert all(each.waits_for and not signs[each.rank].stopped for each in still if each.phase in STEP_PHASES)
        return
    assert all(over[each.rank] for each in hang.late)
    assert sorted(each.rank for each in (*hang.late, *hang.waiting)) == [each.rank for each in beats]
    if not hang.late:
        assert all(over.values())
    # Whoever is named is behind all others that are still, or was stopped.
    for late in hang.late:
        stopped = signs[late.rank].stopped
        others = [each for each in beats if each not in hang.late and over[each.rank]]
        fair = [each for each in others if not each.waits_for and not signs[each.rank].on_disk]
        assert stopped or all(progress_order(late) <= progress_order(each) for each in fair)


@calm
@given(RANKS, st.floats(1, 5))
def test_a_hang_stays_one_and_nobody_else_is_named_for_it_later(beats: list[RankProgress], more_s: float) -> None:
    first = find_hang(beats, {}, len(beats), PATIENCE)
    later = [dataclasses.replace(each, idle_s=each.idle_s + more_s) for each in beats]
    assert first is None or find_hang(later, {}, len(beats), PATIENCE) is not None


def test_the_one_that_others_wait_for_is_named() -> None:
    waiting = [beat(rank, phase="exchange", waits_for="reduce", idle_s=30.0) for rank in (0, 2)]
    hang = find_hang([waiting[0], beat(1, idle_s=30.0), waiting[1]], {}, 3, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]
    said = hang.reason(hang.late[0])
    assert said == (
        "no progress for 30 s in forward of step 7, while ranks 0 and 2 wait in exchange of step 7 (reduce); the "
        "stacks are in the logs"
    )


def test_who_waits_for_a_rank_that_works_does_not_hang() -> None:
    waiting = beat(0, phase="exchange", waits_for="reduce", idle_s=500.0)
    assert find_hang([waiting, beat(1, idle_s=19.0)], {}, 2, PATIENCE) is None


def test_ranks_that_wait_are_not_judged_by_an_agent_that_does_not_know_the_others() -> None:
    waiting = [beat(rank, phase="exchange", waits_for="reduce", idle_s=500.0) for rank in (0, 1)]
    assert find_hang(waiting, {}, 4, PATIENCE) is None
    hang = find_hang(waiting, {}, 2, PATIENCE)
    assert hang is not None
    assert hang.late == ()
    assert "like all ranks, and none is behind" in hang.reason(hang.waiting[0])


def test_of_ranks_that_all_wait_the_one_behind_is_named() -> None:
    ahead = beat(0, step=8, phase="data", waits_for="reduce", idle_s=40.0)
    hang = find_hang([ahead, beat(1, phase="exchange", waits_for="lane", idle_s=40.0)], {}, 2, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]


def test_of_hosts_that_have_run_ahead_the_one_whose_device_is_behind_is_named() -> None:
    """Rank 0 has even got less far, and waits for nothing that it knows of: it cannot queue any more."""
    ahead = beat(0, step=8, phase="forward", device_behind=(7, "exchange", 0), idle_s=30.0)
    late = beat(1, step=8, phase="exchange", waits_for="device", device_behind=(7, "backward", 1), idle_s=30.0)
    hang = find_hang([ahead, late], {}, 2, PATIENCE)
    assert hang is not None
    (blame,) = hang.assign_blame()
    assert (blame.rank, blame.step, blame.kind) == (1, 7, HANG)
    assert "30 s in backward, micro-batch 2, of step 7 on its device, while rank 0 waits in exchange" in blame.reason
    assert find_hang([ahead], {}, 2, PATIENCE) is None, "the others are not known"
    alone = find_hang([ahead], {}, 1, PATIENCE)
    assert alone is not None
    assert "in exchange of step 7 on its device;" in alone.assign_blame()[0].reason


def test_a_pulse_tells_of_the_device_until_the_host_goes_on() -> None:
    words = bytearray(SIZE_BYTES)
    told = ProgressPage(memoryview(words))  # type: ignore[arg-type]

    def behind() -> tuple[int, str, int] | None:
        found = read_progress(bytes(words), 0, 1, time.monotonic_ns())
        assert found is not None
        return found.device_behind

    told.enter_phase("forward", 3, 1)
    assert behind() is None
    told.enter_device_phase("backward", 3, 0)
    assert behind() == (3, "backward", 0)
    told.enter_device_phase("forward", 3, 1)
    assert behind() is None
    told.enter_device_phase("backward", 3, 0)
    told.enter_phase("backward", 3, 1)
    assert behind() is None


def test_a_rank_that_was_stopped_is_named_even_where_it_waits() -> None:
    beats = [beat(0, idle_s=30.0), beat(1, phase="exchange", waits_for="reduce", idle_s=30.0)]
    hang = find_hang(beats, {1: ProcessStatus(stopped=True)}, 2, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]
    assert "stopped by a signal" in hang.reason(hang.late[0])


@pytest.mark.parametrize("phase", ["starting", "restore", "checkpoint"])
def test_a_rank_that_was_stopped_beside_steps_is_not_waited_for_longer(phase: str) -> None:
    beats = [beat(0, phase=phase, steps=0, idle_s=30.0), beat(1, phase=phase, steps=0, idle_s=30.0)]
    assert find_hang(beats, {}, 2, PATIENCE) is None
    hang = find_hang(beats, {1: ProcessStatus(stopped=True)}, 2, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]


def test_nobody_is_judged_under_a_debugger() -> None:
    assert find_hang([beat(0, idle_s=3000.0)], {0: ProcessStatus(traced=True)}, 1, PATIENCE) is None


def test_who_waits_for_a_disk_does_not_hang() -> None:
    saving = beat(0, phase="checkpoint", idle_s=3000.0)
    assert find_hang([saving], {0: ProcessStatus(on_disk=True)}, 1, PATIENCE) is None
    assert find_hang([saving], {0: ProcessStatus()}, 1, PATIENCE) is not None
    assert find_hang([beat(0, idle_s=3000.0)], {0: ProcessStatus(on_disk=True)}, 1, PATIENCE) is not None


def test_patience_follows_from_the_steps() -> None:
    assert PATIENCE.timeout_for(beat(0, longest_s=9.0)) == FACTOR * 9.0
    assert PATIENCE.timeout_for(beat(0, longest_s=0.1)) == 20.0
    assert PATIENCE.timeout_for(beat(0, steps=WARM_STEPS - 1)) == 600.0
    assert PATIENCE.timeout_for(beat(0, phase="evaluate")) == 600.0
    assert make_hang_timeouts("off", 600.0, False) is None
    fixed = make_hang_timeouts(3.0, 600.0, True)
    assert fixed is not None
    assert (fixed.timeout_for(beat(0, longest_s=9.0)), fixed.timeout_for(beat(0, phase="checkpoint"))) == (3.0, 600.0)


def test_the_first_steps_of_another_attempt_are_judged_by_those_of_the_one_before(tmp_path: Path) -> None:
    known, first = StepHistory(), beat(0, steps=0)
    patience = dataclasses.replace(PATIENCE, other_s=600.0)
    known.update([beat(0, steps=WARM_STEPS - 1, longest_s=30.0)])
    assert known.longest_s is None  # it was not through with them
    watchdog = Watchdog(tmp_path, 2, {}, patience, known)
    word = watchdog.make_report()
    assert word is not None and word.timeouts.timeout_for(first) == 600.0
    known.update([beat(0, longest_s=5.0), beat(1, longest_s=1.0)])
    known.update([beat(0, longest_s=2.0)])  # the first step, which compiled, is none of the last ones any more
    assert word.timeouts.timeout_for(first) == 600.0  # it is of attempts before that this is said
    word = Watchdog(tmp_path, 3, {}, patience, known).make_report()
    assert word is not None
    assert word.timeouts.timeout_for(first) == FACTOR * 5.0
    assert (
        word.timeouts.timeout_for(beat(0, longest_s=0.1)) == 20.0
        and word.timeouts.timeout_for(beat(0, phase="restore")) == 600.0
    )
    for longest_s, wanted in ((0.1, 20.0), (70.0, 600.0)):
        assert dataclasses.replace(patience, before_s=longest_s).timeout_for(first) == wanted
    assert dataclasses.replace(patience, fixed_s=3.0, before_s=0.5).timeout_for(first) == 5.0


# ------------------------------------------------------------------------------------------------------- several nodes


def said(attempt: int, *beats: RankProgress, signs: dict[int, ProcessStatus] | None = None) -> Any:
    """What an agent's word is when it has come to the leader."""
    return json.loads(json.dumps(watchdog.encode_report(attempt, ProgressReport(beats, signs or {}, PATIENCE))))


def test_what_an_agent_tells_of_its_ranks_is_heard_as_it_was() -> None:
    """And is what agents may say to each other."""
    there = RankProgress(2, 3, "forward", 0, "", 0.5, 3, 0.1, 2, False)
    word = ProgressReport(
        (there, dataclasses.replace(there, rank=3, device_behind=(3, "forward", 1))), {2: ProcessStatus(True)}, PATIENCE
    )
    told = json.loads(json.dumps(watchdog.encode_report(4, word)))
    messages.parse_message({"pulses": told})
    assert watchdog.decode_report(told) == (4, word)
    for behind in ([3, "forward"], ["forward", 3, 1], 3):
        told["beats"][1][-1] = behind
        with pytest.raises(ValueError, match="invalid message"):
            messages.parse_message({"pulses": told})


def test_of_ranks_of_several_nodes_the_one_behind_is_named() -> None:
    """Node 1 alone would have to take its own rank for the one that hangs."""
    gathering = watchdog.JobHangDetector()
    gathering.add_report(1, said(3, beat(1, phase="update", idle_s=30.0)))
    assert gathering.find_hang(3, [0, 1]) is None  # node 0 has not spoken
    gathering.add_report(0, said(3, beat(0, phase="forward", idle_s=25.0)))
    hang = gathering.find_hang(3, [0, 1])
    assert hang is not None
    (blame,) = hang.assign_blame()
    assert (blame.rank, blame.kind, blame.step) == (0, "Hang", 7)
    assert "while rank 1 waits in update of step 7" in blame.reason
    assert gathering.find_hang(3, [0, 1]) is None  # it has been said


def test_ranks_of_several_nodes_that_wait_for_one_another_are_found() -> None:
    gathering = watchdog.JobHangDetector()
    for node in (0, 1):
        gathering.add_report(node, said(1, beat(node, phase="exchange", waits_for="reduce", idle_s=30.0)))
    hang = gathering.find_hang(1, [0, 1])
    assert hang is not None
    assert [blame.kind for blame in hang.assign_blame()] == ["Deadlock"]


def test_a_rank_that_was_stopped_on_another_node_is_named() -> None:
    gathering = watchdog.JobHangDetector()
    waiting = {"phase": "exchange", "waits_for": "reduce", "idle_s": 30.0}
    gathering.add_report(0, said(1, beat(0, **waiting)))
    gathering.add_report(1, said(1, beat(1, **waiting), signs={1: ProcessStatus(stopped=True)}))
    hang = gathering.find_hang(1, [0, 1])
    assert hang is not None
    assert [(blame.rank, "stopped by a signal" in blame.reason) for blame in hang.assign_blame()] == [(1, True)]


def test_of_several_nodes_that_which_knows_of_no_attempt_before_counts() -> None:
    words = [
        ProgressReport((beat(rank, steps=0, idle_s=100.0),), {}, dataclasses.replace(PATIENCE, before_s=5.0))
        for rank in (0, 1)
    ]
    hangs_of = []
    for spare in (False, True):
        gathering = watchdog.JobHangDetector()
        for node, word in enumerate(words):
            new = dataclasses.replace(word, timeouts=PATIENCE) if spare and node == 1 else word
            gathering.add_report(node, json.loads(json.dumps(watchdog.encode_report(2, new))))
        hangs_of.append(gathering.find_hang(2, [0, 1]))
    assert hangs_of[0] is not None and hangs_of[1] is None


@pytest.mark.parametrize("why", ["another attempt", "old words", "a node that works"])
def test_nobody_is_named_by_what_says_nothing_of_now(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = watchdog.JobHangDetector()
    gathering.add_report(0, said(2, beat(0, phase="exchange", waits_for="reduce", idle_s=30.0)))
    gathering.add_report(1, said(2, beat(1, idle_s=1.0 if why == "a node that works" else 30.0)))
    if why == "another attempt":
        gathering.add_report(0, said(1, beat(0, idle_s=30.0)))  # which comes late
        assert gathering.find_hang(1, [0, 1]) is None
        assert gathering.find_hang(3, [0, 1]) is None
        return
    if why == "old words":
        later = time.monotonic() + 2 * watchdog.STALE_S
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: later)
    assert gathering.find_hang(2, [0, 1]) is None


# ---------------------------------------------------------------------------------------------------------------- pulse


def test_a_pulse_is_read_as_it_was_written(tmp_path: Path) -> None:
    mine = progress_page.open_progress_page(str(tmp_path), 3, 2)
    mine.enter_phase("forward", 9, 4)
    mine.set_largest_micro_batch(6)
    with mine.waiting_for("lane"):
        found = progress_page.read_progress(
            progress_page.progress_page_path(tmp_path, 3).read_bytes(), 3, 2, time.monotonic_ns()
        )
    assert found is not None
    assert (found.step, found.phase, found.micro_batch, found.waits_for) == (9, "forward", 4, "lane")
    assert found.largest == 6
    assert 0 <= found.idle_s < 30
    assert stat.S_IMODE(progress_page.progress_page_path(tmp_path, 3).stat().st_mode) == 0o600


def test_a_pulse_of_another_attempt_says_nothing(tmp_path: Path) -> None:
    progress_page.open_progress_page(str(tmp_path), 0, 1).enter_phase("forward", 9)
    assert progress_page.read_progress(progress_page.progress_page_path(tmp_path, 0).read_bytes(), 0, 2, 0) is None


@calm
@given(st.binary(max_size=100))
def test_any_bytes_are_a_pulse_or_none(content: bytes) -> None:
    assert (
        progress_page.read_progress(content, 0, 1, 0) is None
    )  # none of them begins with the word that says what it is


def test_the_longest_of_the_last_steps_is_told(tmp_path: Path) -> None:
    mine = progress_page.open_progress_page(str(tmp_path), 0, 1)
    for step, pause_s in enumerate((0.05, 0.0, 0.0), 1):
        mine.enter_phase("data", step)
        time.sleep(pause_s)
    mine.enter_phase("evaluate", 3)
    time.sleep(0.1)  # which is no part of a step
    mine.enter_phase("data", 4)
    found = progress_page.read_progress(
        progress_page.progress_page_path(tmp_path, 0).read_bytes(), 0, 1, time.monotonic_ns()
    )
    assert found is not None
    assert found.steps == 3
    assert found.longest_s >= 0.05


def test_a_pulse_that_finds_no_room_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be made in shared memory"):
        progress_page.open_progress_page(str(tmp_path / "nowhere"), 0, 1)
    (tmp_path / "pulse-00000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError):
        progress_page.open_progress_page(str(tmp_path), 0, 1)
    assert not (tmp_path / "elsewhere").exists()


def test_an_agent_that_has_overslept_judges_nobody(tmp_path: Path) -> None:
    mine = progress_page.open_progress_page(str(tmp_path), 0, 1)
    mine.enter_phase("data", 1)
    dog = Watchdog(tmp_path, 1, {0: os.getpid()}, HangTimeouts(0.0, 0.0))
    dog._looked -= 3.0  # as if it had not been served since
    time.sleep(0.01)
    assert dog.make_report() is None
    dog._next = dog._calm_until = 0.0
    word = dog.make_report()
    assert word is not None
    assert word.find_hang() is not None


# ------------------------------------------------------------------------------------------------------------ processes


def run_job(worker: str, world: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    code, events, _ = run_asked_job(worker, world, folder)
    return code, events


def run_asked_job(worker: str, world: int, folder: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, events and what rank 0's flight recorder was asked."""
    command = [sys.executable, "-m", "tests.unit.watched_jobs", worker, str(world), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines and "code" in lines[-1], done.stderr
    return lines[-1]["code"], lines[:-1], lines[-1]["asked"]


def test_a_rank_that_hangs_is_named_and_all_are_started_again(tmp_path: Path) -> None:
    code, events = run_job("hangs", 3, tmp_path)
    assert code == 0
    kinds = ["attempt_started", "worker_died", "restarted", "incident", "attempt_started"]
    assert [event["kind"] for event in events] == kinds
    assert (events[1]["rank"], events[1]["type"], events[1]["step"]) == (1, "Hang", 4)
    assert "in forward of step 4, while ranks 0 and 2 wait in exchange of step 4 (reduce)" in events[1]["reason"]
    for rank in range(3):
        log = (tmp_path / f"run/logs/attempt-001/rank-{rank:05d}.log").read_text()
        assert "watched_jobs.py" in log, "the stacks of all ranks are in their logs"


def test_a_rank_that_was_stopped_is_named(tmp_path: Path) -> None:
    code, events = run_job("freezes", 2, tmp_path)
    assert code == 0
    assert events[1]["rank"] == 0
    assert "stopped by a signal" in events[1]["reason"]


def test_ranks_that_wait_for_one_another_are_started_again(tmp_path: Path) -> None:
    code, events = run_job("deadlock", 2, tmp_path)
    assert code == 0
    assert (events[1]["kind"], events[1]["type"]) == ("worker_died", "Deadlock")


@pytest.mark.parametrize("worker", ["slow_but_alive", "beside_steps"])
def test_no_false_alarm(worker: str, tmp_path: Path) -> None:
    code, events = run_job(worker, 2, tmp_path)
    assert code == 0
    assert [event["kind"] for event in events] == ["attempt_started"]


def test_the_flight_recorder_is_asked_for_what_it_has(tmp_path: Path) -> None:
    code, _, asked = run_asked_job("asks_the_recorder", 1, tmp_path)
    assert (code, asked) == (0, "1\n")
    told = [str(tmp_path / "run/logs/attempt-001/flight-rank-"), str(tmp_path / "shared/flight-")]
    assert (tmp_path / "records").read_text().splitlines() == told


def test_a_rank_that_does_not_read_what_its_flight_recorder_is_asked_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flight-0.pipe")
    reader = os.open(tmp_path / "flight-0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "flight-0.pipe", os.O_WRONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(1))
        ask_flight_recorder(tmp_path, 0)
    finally:
        os.close(reader)
        os.close(writer)
