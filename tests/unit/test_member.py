"""What one of several nodes does with what it keeps of a run."""

import os
from pathlib import Path
from types import SimpleNamespace

from phalanx.config import Config
from phalanx.devices import Device
from phalanx.member import Member, Where
from phalanx.records import ExitCode, RunPaths
from phalanx.shared_memory import LOCK, TOUCHED_S, held, sweep


def test_what_a_run_of_days_keeps_is_not_taken_for_left_behind(tmp_path: Path) -> None:
    paths, folder = RunPaths(tmp_path / "run"), tmp_path / f"phalanx-{os.getuid()}-run-1"
    with held(folder) as memory:
        member = Member(Config(), paths, [Device("cpu", "any", True)], Where(1, 2, None), {}, memory, lambda text: None)
        job = member.job(SimpleNamespace(paths=paths, config=Config()), 1, 2)
        assert job.shared == folder
        os.utime(folder / LOCK, (0, 0))  # days later
        memory.touched -= 2 * TOUCHED_S
        job.on_idle()
    assert sweep(tmp_path) == []


def test_what_is_done_is_not_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with held(tmp_path / "shared") as memory:
        member = Member(Config(), paths, [], Where(1, 2, None), {}, memory, lambda text: None)
        member.code = ExitCode.DONE
        member.leave()
    assert not memory.folder.exists()
