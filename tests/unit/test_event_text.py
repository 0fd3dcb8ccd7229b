import json
import math
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.records import EventKind
from phalanx.report import event_text, formats

ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
DETAILS = ("step", "loss", "pids", "pid", "rank", "signal", "exit_code", "bytes", "seconds", "reason", "world", "key")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            {"kind": "worker_died", "rank": 1, "pid": 42, "signal": 9},
            "rank 1 (pid 42) was killed by SIGKILL after step 7",
        ),
        (
            {"kind": "worker_died", "rank": 1, "pid": 42, "signal": 9, "host": "gpu2"},
            "rank 1 on gpu2 (pid 42) was killed by SIGKILL after step 7",
        ),
        ({"kind": "node_joined", "node": 1, "host": "gpu2", "ranks": 2}, "node 1 (gpu2) joined with 2 ranks"),
        ({"kind": "node_joined", "node": 1, "ranks": 1}, "node 1 joined with 1 rank"),
        (
            {"kind": "node_lost", "node": 1, "host": "gpu2", "reason": "it closed the connection"},
            "node 1 (gpu2) was lost: it closed the connection",
        ),
        ({"kind": "worker_died", "rank": 0, "exit_code": 11}, "rank 0 ran out of memory (exit code 11) after step 7"),
        ({"kind": "worker_died", "rank": 0, "exit_code": 3}, "rank 0 ended with exit code 3 after step 7"),
        (
            {"kind": "worker_died", "rank": 1, "signal": "SIGKILL", "step": None, "reason": "killed by SIGKILL"},
            "rank 1 was killed by SIGKILL after step 7",
        ),
        (
            {
                "kind": "worker_died",
                "rank": 1,
                "exit_code": 3,
                "reason": "ended with exit code 3 and no exception; see x",
            },
            "rank 1 ended with exit code 3 after step 7: no exception; see x",
        ),
        ({"kind": "checkpoint_saved", "step": 5, "already_there": True}, "checkpoint of step 5 exists already"),
        ({"kind": "resumed", "step": 50}, "resumed from the checkpoint of step 50"),
        ({"kind": "resumed", "step": 50, "memory": True}, "resumed from step 50, kept in memory"),
        ({"kind": "gave_up", "reason": "3 attempts have failed"}, "no further restart: 3 attempts have failed"),
        (
            {"kind": "checkpoint_saved", "step": 5, "bytes": 2**20, "seconds": 0.25},
            "checkpoint of step 5 saved (1 MiB in 250 ms)",
        ),
        ({"kind": "evaluated", "step": 4, "loss": 2.0}, "held-out loss 2.0000, perplexity 7.4 after step 4"),
        (
            {"kind": "evaluated", "step": 4, "set": "held_out", "loss": 2},
            "held-out loss 2.0000, perplexity 7.4 after step 4",
        ),
        ({"kind": "evaluated", "step": 4, "set": "math", "loss": 2.0}, "math loss 2.0000, perplexity 7.4 after step 4"),
        ({"kind": "finished", "step": 200, "seconds": 185}, "finished after step 200, 3 min 05 s"),
        ({"kind": "attempt_started", "attempt": 2, "pids": {"0": 8}}, "attempt 2 started with 1 rank (pid 8)"),
        (
            {"kind": "comm_schedule_changed", "step": 3, "bytes_per_s": 2.0**20},
            "new communication schedule from step 3 on, for a link of 1 MiB/s",
        ),
        (
            {"kind": "comm_schedule_changed", "step": 3, "bytes_per_s": None},
            "new communication schedule from step 3 on, for the measured times",
        ),
        ({"kind": "of_a_later_version", "time": 1, "weight": 3}, "of_a_later_version, weight 3"),
    ],
)
def test_events_in_plain_words(event: dict[str, Any], expected: str) -> None:
    assert event_text.describe_event(event, after_step=7) == expected


@given(
    kind=st.sampled_from([str(kind) for kind in EventKind]) | st.text(),
    details=st.dictionaries(st.sampled_from(DETAILS), ANYTHING),
)
def test_any_event_gives_a_sentence_and_a_mark(kind: str, details: dict[str, Any]) -> None:
    assert event_text.describe_event({"kind": kind, **details})
    assert event_text.event_mark(kind).ascii.isascii()


def test_every_kind_has_a_mark_and_words_of_its_own() -> None:
    sentences = {event_text.describe_event({"kind": str(kind), "attempt": 1}) for kind in EventKind}
    assert len(sentences) == len(EventKind)
    assert not {str(kind) for kind in EventKind if "_" in kind} & sentences
    assert {event_text.event_mark(kind).tone for kind in EventKind} == {"bad", "warn", "good", "info", "quiet"}


@pytest.mark.parametrize("value", [9, "9", "SIGKILL", signal.SIGKILL])
def test_a_signal_is_named_however_it_was_written(value: object) -> None:
    assert formats.signal_name(value) == "SIGKILL"


@given(st.floats(min_value=0, max_value=999 * 86400))  # a thousand days may well begin with 1000
def test_durations_never_show_sixty_of_a_unit(value: float) -> None:
    text = formats.format_seconds(value)
    assert " 60 " not in f" {text} ".replace(" 60 d ", " ")  # of days there may be any number
    assert not text.startswith("1000")


@given(st.floats(min_value=0, max_value=1e14))
def test_short_numbers_are_near_the_value(value: float) -> None:
    text = formats.format_count(value)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert math.isclose(float(text.rstrip("kMBT")) * scale, value, rel_tol=0.006)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "3", True, [1]])
def test_what_is_no_finite_number_is_none(value: object) -> None:
    assert formats.finite_number({"loss": value}, "loss") is None


def test_numbers_of_any_size() -> None:
    assert formats.format_perplexity(1e9) == "over 1e8"
    assert formats.format_bytes(79.6 * 2**30) == "79.6 GiB"
    assert formats.format_seconds(59.97) == "1 min 00 s"
    assert formats.format_clock(3661) == "1:01:01"
    assert json.dumps(formats.finite_number({"n": 10**6}, "n")) == "1000000"
