"""What a user may ask to go wrong: read as it is written, or refused in a sentence."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.disk.load import step_folder
from phalanx.core import faults
from phalanx.core.errors import ConfigError
from phalanx.core.faults import FAULT_PHASES, KINDS, Fault
from phalanx.core.records import EventKind
from phalanx.workload.injection import FaultInjector

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


@st.composite
def any_fault(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(sorted(KINDS)))
    fault = Fault(kind, draw(st.integers(1, 10**6)), rank=draw(st.integers(0, 99)), attempt=draw(st.integers(1, 9)))
    fault = dataclasses.replace(fault, every=draw(st.booleans()))
    values = {
        "phase": st.sampled_from(FAULT_PHASES),
        "factor": st.floats(1.5, 1e5),
        "steps": st.integers(1, 99),
        "parameter": st.none() | st.just("layers.0.mlp.up.weight"),
        "element": st.none() | st.integers(0, 10**9),
        "bit": st.integers(0, 63),
    }
    return dataclasses.replace(fault, **{name: draw(values[name]) for name in KINDS[kind][1]})


@calm
@given(st.lists(any_fault(), min_size=1, max_size=4))
def test_what_is_written_is_read_back(planned: list[Fault]) -> None:
    texts = [fault.text for fault in planned]
    assert faults.parse_faults(texts) == planned
    assert faults.parse_faults(["; ".join(texts)]) == planned
    assert faults.faults_from_message(faults.faults_to_message(planned)) == tuple(planned)


@calm
@given(st.text(max_size=40) | st.text("kilhang:=,;rankstep0123456789", max_size=40))
def test_any_text_is_a_fault_or_a_sentence(text: str) -> None:
    said = ""
    try:
        faults.parse_faults([text])
    except ConfigError as error:
        said = str(error)
    assert said == "" or said.startswith("--inject ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hnag:step=3", "unknown fault 'hnag'; did you mean hang?"),
        ("explode:step=3", "choose one of kill, crash"),
        ("kill:rank=1", "step is missing; write it as in kill:rank=1,step=7"),
        ("kill:7", "'7' is not key=value"),
        ("kill:step=", "'step=' is not key=value"),
        ("kill:step=0", "step must be a whole number from 1, not '0'"),
        ("kill:step=3,rank=-1", "rank must be a whole number from 0, not '-1'"),
        ("kill:step=3,factor=2", "kill takes no factor; it takes rank, step, attempt, every, phase"),
        ("kill:step=3,step=4", "step is given twice"),
        ("kill:step=3,every=yes", "every is true or false, not 'yes'"),
        ("kill:step=3,phase=lunch", "phase is one of data, forward, backward, update, not 'lunch'"),
        ("slow:step=3,factor=0.5", "factor must be a number above 1"),
        ("slow:step=3,factor=nan", "factor must be a number above 1"),
    ],
)
def test_a_mistake_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        faults.parse_faults([text])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kill:rank=2,step=3", "no rank 2 in a run of ranks 0 to 1"),
        ("kill:step=11", "the run has 10 steps (train.steps)"),
        ("corrupt-checkpoint:step=3", "checkpoints at a URL are not changed"),
        ("node-down:step=3", "needs another node that continues (--nodes)"),
    ],
)
def test_what_cannot_happen_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        faults.check_faults(faults.parse_faults([text]), world=2, steps=10, local=False)
    assert sentence in str(caught.value)


def test_attempts_count_from_the_first_one_of_the_command() -> None:
    planned = faults.shift_attempts(
        faults.parse_faults(["kill:step=3; kill:step=3,attempt=2; hang:step=1,every=true"]), 5
    )
    assert [[fault.applies_to(attempt) for attempt in (4, 5, 6)] for fault in planned] == [
        [False, True, False],
        [False, False, True],
        [True, True, True],
    ]


def test_what_has_not_happened_is_known_by_its_text() -> None:
    planned = faults.parse_faults(["kill:step=3", "kill:rank=1,step=3"])
    assert faults.find_missed_faults(planned, {"kill:rank=0,step=3"}) == planned[1:]


def test_the_file_of_a_rank_that_is_not_there_any_more_is_not_damaged(tmp_path: Path) -> None:
    """A node was lost, and the others have divided the ranks: the save is no less whole for that."""
    happened: list[Fault] = []
    planned = [Fault("corrupt-checkpoint", 3, rank=rank) for rank in (0, 1)]
    injector = FaultInjector(planned, 0, 1, tmp_path, lambda fault, step: happened.append(fault))
    (file := step_folder(tmp_path, 4) / "rank-00000.safetensors").parent.mkdir()
    file.write_bytes(bytes(200))
    told: list[Any] = []
    injector.wrap_on_event(lambda kind, details: told.append(kind))(EventKind.CHECKPOINT_SAVED, {"step": 4})
    assert (told, happened, file.read_bytes().count(4)) == ([EventKind.CHECKPOINT_SAVED], planned[:1], 1)
