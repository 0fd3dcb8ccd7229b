"""What a trace is turned into, and which steps may be looked into."""

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import load
from phalanx.core.errors import ConfigError
from phalanx.system.trace import phase
from phalanx.trainer.profile import OUTSIDE, phase_seconds, summarize_allocations, top_operators


def span(category: str, name: str, start: float, stop: float) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": stop - start, "tid": 1}


def memory(now: float, amount: int) -> dict[str, Any]:
    return {"cat": "cpu_instant_event", "name": "[memory]", "ts": now, "tid": 1, "args": {"Bytes": amount}}


def test_allocations_go_to_the_innermost_phase_and_operator() -> None:
    found = summarize_allocations(
        [
            memory(2, 100),
            span("user_annotation", "phalanx.forward", 1, 10),
            span("user_annotation", "phalanx.gather", 3, 5),
            span("user_annotation", "somebody else's", 0, 20),
            span("cpu_op", "aten::linear", 1.5, 9),
            span("cpu_op", "aten::mm", 4, 5),
            memory(4.5, 40),
            memory(6, -100),
            memory(11, 7),
        ]
    )
    assert found["peak_bytes"] == 140
    assert found["kept_bytes"] == 47
    assert found["phases"] == {
        "forward": {"allocated_bytes": 100, "kept_bytes": 0, "peak_bytes": 100},
        "gather": {"allocated_bytes": 40, "kept_bytes": 40, "peak_bytes": 140},
        OUTSIDE: {"allocated_bytes": 7, "kept_bytes": 7, "peak_bytes": 47},
    }
    assert found["operators"] == {
        "aten::linear": {"allocated_bytes": 100, "allocations": 1},
        "aten::mm": {"allocated_bytes": 40, "allocations": 1},
        "no operator": {"allocated_bytes": 7, "allocations": 1},
    }


@given(amounts=st.lists(st.integers(-1000, 1000), max_size=30), names=st.lists(st.sampled_from("ab"), max_size=5))
def test_no_byte_is_lost_or_counted_twice(amounts: list[int], names: list[str]) -> None:
    spans = [span("user_annotation", f"phalanx.{name}", place, 40 - place) for place, name in enumerate(names)]
    found = summarize_allocations(spans + [memory(place + 0.5, amount) for place, amount in enumerate(amounts)])
    assert sum(row["kept_bytes"] for row in found["phases"].values()) == sum(amounts) == found["kept_bytes"]
    assert sum(row["allocated_bytes"] for row in found["phases"].values()) == sum(n for n in amounts if n > 0)
    assert found["peak_bytes"] == max(0, *(sum(amounts[: end + 1]) for end in range(len(amounts)))) if amounts else True


def test_a_mark_is_seen_by_a_profiler_and_by_nobody_else() -> None:
    assert isinstance(phase("forward"), contextlib.nullcontext)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(4):
            with phase("forward"):
                torch.ones(50, 50) @ torch.ones(50, 50)
    averages = profiler.key_averages()
    seconds = phase_seconds(averages, steps=2)
    twice = phase_seconds(averages, steps=1)
    assert seconds["forward"] == pytest.approx(twice["forward"] / 2)
    assert {name for name, value in seconds.items() if value} == {"forward"}
    named = {name: calls for name, _, calls in top_operators(averages, steps=2)}
    assert named["aten::mm"] == 2
    assert "phalanx.forward" not in named


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"profile": "4-3"}, "train.profile 4-3 ends before it begins"),
        ({"profile": "9-11"}, "train.profile 9-11 goes beyond the last step 10"),
        ({"memory_snapshot": 11}, "train.memory_snapshot 11 comes after the last step 10"),
        ({"memory_snapshot": 4, "profile": "3-4"}, "train.memory_snapshot 4 lies within train.profile 3-4"),
        ({"profile": "3"}, "train.profile must be the first and the last step, such as 10-12, not '3'"),
        ({"profile": 3}, "train.profile must be the first and the last step, such as 10-12, not 3"),
    ],
)
def test_impossible_steps_are_refused(train: dict[str, Any], expected: str) -> None:
    tree = {"model": {"hidden": 16, "layers": 1, "heads": 2}, "train": {"steps": 10, **train}}
    with pytest.raises(ConfigError) as caught:
        load.build_config(tree, "a recipe")
    assert expected in str(caught.value)


def test_steps_that_can_be_looked_into_are_accepted() -> None:
    train = {"steps": 10, "profile": "9-10", "memory_snapshot": 1}
    found = load.build_config({"model": {"hidden": 16, "layers": 1, "heads": 2}, "train": train}, "a recipe")
    assert (found.train.profile, found.train.memory_snapshot) == ("9-10", 1)
