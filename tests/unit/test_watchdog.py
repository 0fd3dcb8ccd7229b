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
from phalanx.core.progress_page import PHASES, SIZE_BYTES, STEP_PHASES, WAITS, Beat, Pulse, read
from phalanx.elastic.membership import messages
from phalanx.elastic.node.watchdog import (
    FACTOR,
    WARM_STEPS,
    Known,
    Patience,
    Signs,
    Watchdog,
    Word,
    judge,
    patience_of,
    position,
)
from phalanx.elastic.node.worker import ask_flight_recorder
from phalanx.elastic.supervisor import hang_detection
from phalanx.system.exit_causes import HANG
from tests.helpers import ROOT

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
PATIENCE = Patience(floor_s=20.0, other_s=600.0)
WORKING = Beat(0, 7, "forward", 0, "", still_s=1.0, steps=6, longest_s=0.5)


def beat(rank: int, **changes: Any) -> Beat:
    return dataclasses.replace(WORKING, rank=rank, **changes)


BEATS = st.builds(
    Beat,
    rank=st.just(0),
    step=st.integers(0, 5),
    phase=st.sampled_from(PHASES),
    micro_batch=st.integers(0, 3),
    waits_for=st.sampled_from(WAITS),
    still_s=st.floats(0, 2000),
    steps=st.integers(0, 5),
    longest_s=st.floats(0, 100),
)
RANKS = st.lists(BEATS, min_size=1, max_size=5).map(
    lambda beats: [dataclasses.replace(each, rank=rank) for rank, each in enumerate(beats)]
)
SIGNS = st.builds(Signs, stopped=st.booleans(), traced=st.just(False), on_disk=st.booleans())


@calm
@given(RANKS, st.data())
def test_nobody_is_named_who_has_moved_within_the_patience(beats: list[Beat], data: st.DataObject) -> None:
    signs = {each.rank: data.draw(SIGNS) for each in beats}
    over = {each.rank: each.still_s > PATIENCE.of(each, signs[each.rank]) for each in beats}
    hang = judge(beats, signs, len(beats), PATIENCE)
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
        assert stopped or all(position(late) <= position(each) for each in fair)


@calm
@given(RANKS, st.floats(1, 5))
def test_a_hang_stays_one_and_nobody_else_is_named_for_it_later(beats: list[Beat], more_s: float) -> None:
    first = judge(beats, {}, len(beats), PATIENCE)
    later = [dataclasses.replace(each, still_s=each.still_s + more_s) for each in beats]
    assert first is None or judge(later, {}, len(beats), PATIENCE) is not None


def test_the_one_that_others_wait_for_is_named() -> None:
    waiting = [beat(rank, phase="exchange", waits_for="reduce", still_s=30.0) for rank in (0, 2)]
    hang = judge([waiting[0], beat(1, still_s=30.0), waiting[1]], {}, 3, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]
    said = hang.reason(hang.late[0])
    assert said == (
        "nothing has changed for 30 s in forward of step 7, while ranks 0 and 2 wait in exchange of step 7 (reduce); "
        "the stacks are in the logs"
    )


def test_who_waits_for_a_rank_that_works_does_not_hang() -> None:
    waiting = beat(0, phase="exchange", waits_for="reduce", still_s=500.0)
    assert judge([waiting, beat(1, still_s=19.0)], {}, 2, PATIENCE) is None


def test_ranks_that_wait_are_not_judged_by_an_agent_that_does_not_know_the_others() -> None:
    waiting = [beat(rank, phase="exchange", waits_for="reduce", still_s=500.0) for rank in (0, 1)]
    assert judge(waiting, {}, 4, PATIENCE) is None
    hang = judge(waiting, {}, 2, PATIENCE)
    assert hang is not None
    assert hang.late == ()
    assert "all ranks have, and none is behind" in hang.reason(hang.waiting[0])


def test_of_ranks_that_all_wait_the_one_behind_is_named() -> None:
    ahead = beat(0, step=8, phase="data", waits_for="reduce", still_s=40.0)
    hang = judge([ahead, beat(1, phase="exchange", waits_for="lane", still_s=40.0)], {}, 2, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]


def test_of_hosts_that_have_run_ahead_the_one_whose_device_is_behind_is_named() -> None:
    """Rank 0 has even got less far, and waits for nothing that it knows of: it cannot queue any more."""
    ahead = beat(0, step=8, phase="forward", behind=(7, "exchange", 0), still_s=30.0)
    late = beat(1, step=8, phase="exchange", waits_for="device", behind=(7, "backward", 1), still_s=30.0)
    hang = judge([ahead, late], {}, 2, PATIENCE)
    assert hang is not None
    (blame,) = hang.blamed()
    assert (blame.rank, blame.step, blame.kind) == (1, 7, HANG)
    assert "30 s in backward, micro-batch 2, of step 7 on its device, while rank 0 waits in exchange" in blame.reason
    assert judge([ahead], {}, 2, PATIENCE) is None, "the others are not known"
    alone = judge([ahead], {}, 1, PATIENCE)
    assert alone is not None
    assert "in exchange of step 7 on its device;" in alone.blamed()[0].reason


def test_a_pulse_tells_of_the_device_until_the_host_goes_on() -> None:
    words = bytearray(SIZE_BYTES)
    told = Pulse(memoryview(words))  # type: ignore[arg-type]

    def behind() -> tuple[int, str, int] | None:
        found = read(bytes(words), 0, 1, time.monotonic_ns())
        assert found is not None
        return found.behind

    told.at("forward", 3, 1)
    assert behind() is None
    told.device_at("backward", 3, 0)
    assert behind() == (3, "backward", 0)
    told.device_at("forward", 3, 1)
    assert behind() is None
    told.device_at("backward", 3, 0)
    told.at("backward", 3, 1)
    assert behind() is None


def test_a_rank_that_was_stopped_is_named_even_where_it_waits() -> None:
    beats = [beat(0, still_s=30.0), beat(1, phase="exchange", waits_for="reduce", still_s=30.0)]
    hang = judge(beats, {1: Signs(stopped=True)}, 2, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]
    assert "stopped by a signal" in hang.reason(hang.late[0])


@pytest.mark.parametrize("phase", ["starting", "restore", "checkpoint"])
def test_a_rank_that_was_stopped_beside_steps_is_not_waited_for_longer(phase: str) -> None:
    beats = [beat(0, phase=phase, steps=0, still_s=30.0), beat(1, phase=phase, steps=0, still_s=30.0)]
    assert judge(beats, {}, 2, PATIENCE) is None
    hang = judge(beats, {1: Signs(stopped=True)}, 2, PATIENCE)
    assert hang is not None
    assert [late.rank for late in hang.late] == [1]


def test_nobody_is_judged_under_a_debugger() -> None:
    assert judge([beat(0, still_s=3000.0)], {0: Signs(traced=True)}, 1, PATIENCE) is None


def test_who_waits_for_a_disk_does_not_hang() -> None:
    saving = beat(0, phase="checkpoint", still_s=3000.0)
    assert judge([saving], {0: Signs(on_disk=True)}, 1, PATIENCE) is None
    assert judge([saving], {0: Signs()}, 1, PATIENCE) is not None
    assert judge([beat(0, still_s=3000.0)], {0: Signs(on_disk=True)}, 1, PATIENCE) is not None


def test_patience_follows_from_the_steps() -> None:
    assert PATIENCE.of(beat(0, longest_s=9.0)) == FACTOR * 9.0
    assert PATIENCE.of(beat(0, longest_s=0.1)) == 20.0
    assert PATIENCE.of(beat(0, steps=WARM_STEPS - 1)) == 600.0
    assert PATIENCE.of(beat(0, phase="evaluate")) == 600.0
    assert patience_of("off", 600.0, False) is None
    fixed = patience_of(3.0, 600.0, True)
    assert fixed is not None
    assert (fixed.of(beat(0, longest_s=9.0)), fixed.of(beat(0, phase="checkpoint"))) == (3.0, 600.0)


def test_the_first_steps_of_another_attempt_are_judged_by_those_of_the_one_before(tmp_path: Path) -> None:
    known, first = Known(), beat(0, steps=0)
    patience = dataclasses.replace(PATIENCE, other_s=600.0)
    known.see([beat(0, steps=WARM_STEPS - 1, longest_s=30.0)])
    assert known.longest_s is None  # it was not through with them
    watchdog = Watchdog(tmp_path, 2, {}, patience, known)
    word = watchdog.look()
    assert word is not None and word.patience.of(first) == 600.0
    known.see([beat(0, longest_s=5.0), beat(1, longest_s=1.0)])
    known.see([beat(0, longest_s=2.0)])  # the first step, which compiled, is none of the last ones any more
    assert word.patience.of(first) == 600.0  # it is of attempts before that this is said
    word = Watchdog(tmp_path, 3, {}, patience, known).look()
    assert word is not None
    assert word.patience.of(first) == FACTOR * 5.0
    assert word.patience.of(beat(0, longest_s=0.1)) == 20.0 and word.patience.of(beat(0, phase="restore")) == 600.0
    for longest_s, wanted in ((0.1, 20.0), (70.0, 600.0)):
        assert dataclasses.replace(patience, before_s=longest_s).of(first) == wanted
    assert dataclasses.replace(patience, fixed_s=3.0, before_s=0.5).of(first) == 5.0


# ------------------------------------------------------------------------------------------------------- several nodes


def said(attempt: int, *beats: Beat, signs: dict[int, Signs] | None = None) -> Any:
    """What an agent's word is when it has come to the leader."""
    return json.loads(json.dumps(hang_detection.to_message(attempt, Word(beats, signs or {}, PATIENCE))))


def test_what_an_agent_tells_of_its_ranks_is_heard_as_it_was() -> None:
    """And is what agents may say to each other."""
    there = Beat(2, 3, "forward", 0, "", 0.5, 3, 0.1, 2, False)
    word = Word((there, dataclasses.replace(there, rank=3, behind=(3, "forward", 1))), {2: Signs(True)}, PATIENCE)
    told = json.loads(json.dumps(hang_detection.to_message(4, word)))
    assert messages.problem({"pulses": told}) is None
    assert hang_detection.of_message(told) == (4, word)
    for behind in ([3, "forward"], ["forward", 3, 1], 3):
        told["beats"][1][-1] = behind
        assert messages.problem({"pulses": told}) is not None


def test_of_ranks_of_several_nodes_the_one_behind_is_named() -> None:
    """Node 1 alone would have to take its own rank for the one that hangs."""
    gathering = hang_detection.Gathering()
    gathering.hear(1, said(3, beat(1, phase="update", still_s=30.0)))
    assert gathering.judge(3, [0, 1]) is None  # node 0 has not spoken
    gathering.hear(0, said(3, beat(0, phase="forward", still_s=25.0)))
    hang = gathering.judge(3, [0, 1])
    assert hang is not None
    (blame,) = hang.blamed()
    assert (blame.rank, blame.kind, blame.step) == (0, "Hang", 7)
    assert "while rank 1 waits in update of step 7" in blame.reason
    assert gathering.judge(3, [0, 1]) is None  # it has been said


def test_ranks_of_several_nodes_that_wait_for_one_another_are_found() -> None:
    gathering = hang_detection.Gathering()
    for node in (0, 1):
        gathering.hear(node, said(1, beat(node, phase="exchange", waits_for="reduce", still_s=30.0)))
    hang = gathering.judge(1, [0, 1])
    assert hang is not None
    assert [blame.kind for blame in hang.blamed()] == ["Deadlock"]


def test_a_rank_that_was_stopped_on_another_node_is_named() -> None:
    gathering = hang_detection.Gathering()
    waiting = {"phase": "exchange", "waits_for": "reduce", "still_s": 30.0}
    gathering.hear(0, said(1, beat(0, **waiting)))
    gathering.hear(1, said(1, beat(1, **waiting), signs={1: Signs(stopped=True)}))
    hang = gathering.judge(1, [0, 1])
    assert hang is not None
    assert [(blame.rank, "stopped by a signal" in blame.reason) for blame in hang.blamed()] == [(1, True)]


def test_of_several_nodes_that_which_knows_of_no_attempt_before_counts() -> None:
    words = [
        Word((beat(rank, steps=0, still_s=100.0),), {}, dataclasses.replace(PATIENCE, before_s=5.0)) for rank in (0, 1)
    ]
    hangs_of = []
    for spare in (False, True):
        gathering = hang_detection.Gathering()
        for node, word in enumerate(words):
            new = dataclasses.replace(word, patience=PATIENCE) if spare and node == 1 else word
            gathering.hear(node, json.loads(json.dumps(hang_detection.to_message(2, new))))
        hangs_of.append(gathering.judge(2, [0, 1]))
    assert hangs_of[0] is not None and hangs_of[1] is None


@pytest.mark.parametrize("why", ["another attempt", "old words", "a node that works"])
def test_nobody_is_named_by_what_says_nothing_of_now(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = hang_detection.Gathering()
    gathering.hear(0, said(2, beat(0, phase="exchange", waits_for="reduce", still_s=30.0)))
    gathering.hear(1, said(2, beat(1, still_s=1.0 if why == "a node that works" else 30.0)))
    if why == "another attempt":
        gathering.hear(0, said(1, beat(0, still_s=30.0)))  # which comes late
        assert gathering.judge(1, [0, 1]) is None
        assert gathering.judge(3, [0, 1]) is None
        return
    if why == "old words":
        later = time.monotonic() + 2 * hang_detection.STALE_S
        monkeypatch.setattr(hang_detection.time, "monotonic", lambda: later)
    assert gathering.judge(2, [0, 1]) is None


# ---------------------------------------------------------------------------------------------------------------- pulse


def test_a_pulse_is_read_as_it_was_written(tmp_path: Path) -> None:
    mine = progress_page.opened(str(tmp_path), 3, 2)
    mine.at("forward", 9, 4)
    mine.runs(6)
    with mine.waiting("lane"):
        found = progress_page.read(progress_page.file_of(tmp_path, 3).read_bytes(), 3, 2, time.monotonic_ns())
    assert found is not None
    assert (found.step, found.phase, found.micro_batch, found.waits_for) == (9, "forward", 4, "lane")
    assert found.largest == 6
    assert 0 <= found.still_s < 30
    assert stat.S_IMODE(progress_page.file_of(tmp_path, 3).stat().st_mode) == 0o600


def test_a_pulse_of_another_attempt_says_nothing(tmp_path: Path) -> None:
    progress_page.opened(str(tmp_path), 0, 1).at("forward", 9)
    assert progress_page.read(progress_page.file_of(tmp_path, 0).read_bytes(), 0, 2, 0) is None


@calm
@given(st.binary(max_size=100))
def test_any_bytes_are_a_pulse_or_none(content: bytes) -> None:
    assert progress_page.read(content, 0, 1, 0) is None  # none of them begins with the word that says what it is


def test_the_longest_of_the_last_steps_is_told(tmp_path: Path) -> None:
    mine = progress_page.opened(str(tmp_path), 0, 1)
    for step, pause_s in enumerate((0.05, 0.0, 0.0), 1):
        mine.at("data", step)
        time.sleep(pause_s)
    mine.at("evaluate", 3)
    time.sleep(0.1)  # which is no part of a step
    mine.at("data", 4)
    found = progress_page.read(progress_page.file_of(tmp_path, 0).read_bytes(), 0, 1, time.monotonic_ns())
    assert found is not None
    assert found.steps == 3
    assert found.longest_s >= 0.05


def test_a_pulse_that_finds_no_room_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be made in shared memory"):
        progress_page.opened(str(tmp_path / "nowhere"), 0, 1)
    (tmp_path / "pulse-00000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError):
        progress_page.opened(str(tmp_path), 0, 1)
    assert not (tmp_path / "elsewhere").exists()


def test_an_agent_that_has_overslept_judges_nobody(tmp_path: Path) -> None:
    mine = progress_page.opened(str(tmp_path), 0, 1)
    mine.at("data", 1)
    dog = Watchdog(tmp_path, 1, {0: os.getpid()}, Patience(0.0, 0.0))
    dog._looked -= 3.0  # as if it had not been served since
    time.sleep(0.01)
    assert dog.look() is None
    dog._next = dog._calm_until = 0.0
    word = dog.look()
    assert word is not None
    assert word.judged() is not None


# ------------------------------------------------------------------------------------------------------------ processes


def run_job(worker: str, world: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.unit.watched_jobs", worker, str(world), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines and "code" in lines[-1], done.stderr
    return lines[-1]["code"], lines[:-1]


def test_a_rank_that_hangs_is_named_and_all_are_started_again(tmp_path: Path) -> None:
    code, events = run_job("hangs", 3, tmp_path)
    assert code == 0
    assert [event["kind"] for event in events] == ["attempt_started", "worker_died", "restarted", "attempt_started"]
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
    for folder in (tmp_path / "first", tmp_path / "second", tmp_path / "third"):
        folder.mkdir()
        code, _ = run_job("asks_the_recorder", 1, folder)
        assert code == 0
        assert (folder / "records").read_text() == str(folder / "run/logs/attempt-001/flight-rank-")
        if (folder / "asked").exists():  # a rank that a busy machine did not let run in time is killed before it reads
            break
    assert (folder / "asked").read_bytes() == b"1\n"


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
