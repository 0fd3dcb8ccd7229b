"""How a node begins: a node 0 that is started again at once, while others are about to take its run over."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load
from phalanx.core.errors import RunError
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election
from phalanx.elastic.membership.rendezvous import RendezvousPoint
from phalanx.launch import multinode, rendezvous_options, run
from tests.helpers import ROOT


def test_an_epoch_that_others_begin_while_it_looks_whether_they_lead_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for them to come, and they for it."""
    paths, looks, led = RunPaths(tmp_path), list[int](), list[int]()
    assert election.claim(paths, 1, {"attempt": 1, "leader": 0}) is None

    def goes_on(paths: RunPaths, meeting: rendezvous_options.RendezvousOptions) -> bool:
        looks.append(len(looks))
        if len(looks) == 1:  # nobody answers yet, and a moment later node 1 leads
            assert election.claim(paths, 2, {"attempt": 2, "leader": 1}) is None
        return len(looks) > 1

    def lead(start: Any, before: int) -> int:
        led.append(before)
        multinode.watch_for_takeover(paths, lambda: None, before)()
        raise AssertionError("it waits for the others")

    monkeypatch.setattr(multinode, "LOOK_S", -1.0)
    monkeypatch.setattr(run, "preload_and_find_devices", lambda on_cpu: (None, None))
    monkeypatch.setattr(run, "assign_devices", lambda *found: [])
    monkeypatch.setattr(multinode, "is_run_active", goes_on)
    monkeypatch.setattr(run.TrainingStart, "lead", lead)
    monkeypatch.setattr(run.TrainingStart, "follow", lambda start: 42)
    meeting, wanted = (
        rendezvous_options.RendezvousOptions(2, 0, RendezvousPoint("here", folder=tmp_path), 60.0),
        load.load_recipe(ROOT / "recipes/demo.yaml"),
    )
    assert run.train(wanted, paths, 1, {}, meeting) == 42
    assert led == [1]


def test_no_other_epoch_is_no_reason_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multinode, "LOOK_S", -1.0)
    paths, tended = RunPaths(tmp_path), list[int]()
    look = multinode.watch_for_takeover(paths, lambda: tended.append(1), election.read_epoch_number(paths))
    look()
    assert election.claim(paths, 1, {"attempt": 1, "leader": 1}) is None
    with pytest.raises(RunError, match="another node now leads the run"):
        look()
    assert tended == [1, 1]
