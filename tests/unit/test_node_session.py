"""What one of several nodes does with what it keeps of a run."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core import faults
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.rendezvous import RendezvousPoint
from phalanx.elastic.supervisor import node_requests
from phalanx.health.findings import DeviceInfo
from phalanx.launch import outcome
from phalanx.launch.node_session import NodeSession, make_policy
from phalanx.launch.recorder import LocalRecorder
from phalanx.launch.rendezvous_options import RendezvousOptions
from phalanx.recovery.shared_memory import LOCK, TOUCHED_S, hold_folder, remove_stale_folders
from phalanx.report import event_text
from phalanx.trainer import run_folder

OPTIONS = RendezvousOptions(2, 1, RendezvousPoint("there"), 60.0, quiet=True)


def test_what_a_run_of_days_keeps_is_not_taken_for_left_behind(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with hold_folder(paths, 1, tmp_path) as memory:
        member = NodeSession(
            paths,
            [DeviceInfo("cpu", "any", True)],
            OPTIONS,
            {},
            Config(),
            memory,
        )
        job = member.job_for(SimpleNamespace(paths=paths, config=Config()), 1, 2)
        assert job.shared == memory.folder
        os.utime(memory.folder / LOCK, (0, 0))  # days later
        memory.touched -= 2 * TOUCHED_S
        job.on_idle()
    assert remove_stale_folders((tmp_path,)) == []


def test_that_a_run_is_done_is_written_where_rank_0_was_lost_before_it_had(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_event(paths.events, EventKind.FINISHED, 1, step=10, seconds=1.0)
    outcome.write_finish_event(paths, 10, 1)
    assert len(list(read_lines(paths.events))) == 1
    outcome.write_finish_event(paths, 20, 3)  # it was given more steps
    (told,) = list(read_lines(paths.events))[1:]
    assert (told["kind"], told["step"], told["attempt"], run_folder.find_final_step(paths)) == ("finished", 20, 3, 20)
    assert event_text.describe_event(told) == "finished after step 20"


def test_what_is_done_is_not_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with hold_folder(paths, 1, tmp_path) as memory:
        member = NodeSession(paths, [], OPTIONS, {}, Config(), memory)
        member.code = ExitCode.DONE
        member.settle_memory()
    assert not memory.folder.exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda offer, code: offer.update(config=_with_code(offer["config"], code)),
            r"model.code is '.*theirs.py'",
        ),
        (
            lambda offer, code: offer.update(faults=faults.faults_to_message(faults.parse_faults(["kill:step=1"]))),
            "faults differ from",
        ),
        (lambda offer, code: offer["policy"].update(max_restarts=99), "resilience section differs from its recipe"),
    ],
)
def test_nothing_that_a_leader_offers_beside_the_recipe_is_imported(
    tmp_path: Path, change: Callable[[dict[str, Any], str], None], expected: str
) -> None:
    code, wanted = tmp_path / "theirs.py", load.build_config({"model": {"hidden": 8, "layers": 1, "heads": 1}}, "here")
    code.write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Model: ...\n")
    offer = {"config": load.to_yaml(wanted), "faults": [], "policy": asdict(make_policy(wanted, 2))}
    change(offer, str(code))
    paths = RunPaths(tmp_path / "run")
    with hold_folder(paths, 1, tmp_path) as memory:
        member = NodeSession(
            paths,
            [DeviceInfo("cpu", "any", True)],
            OPTIONS,
            {},
            wanted,
            memory,
        )
        with pytest.raises(ConfigError, match=expected):
            member.make_job(offer, lambda: None)
    assert not (tmp_path / "marker").exists()


def _with_code(text: str, code: str) -> str:
    tree = load.parse_yaml(text, "an offer")
    return load.to_yaml(load.build_config(tree | {"model": tree["model"] | {"code": code}}, "an offer"))


def test_the_recorder_of_a_run_on_one_node_passes_steps_on_and_no_requests(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_event(paths.events, EventKind.RUN_STARTED, 1, hosts=["here"], steps=9)
    recorder = LocalRecorder(paths, 9, "tokens")
    node_requests.write_request(paths, "0", node_requests.NodeRequestKind.DRAIN, "hot")
    write_event(paths.events, EventKind.CHECKPOINT_SAVED, 1, step=4, bytes=1, seconds=0.1)
    assert recorder.take_committed_steps() == [4]
    assert recorder.take_committed_steps() == []
    assert recorder.take_node_requests() == []  # a run on one node has nowhere else to go
    recorder.record(EventKind.WARNING, {"attempt": 1, "message": "written at once"})
    assert list(read_lines(paths.events))[-1]["message"] == "written at once"
    recorder.close()
