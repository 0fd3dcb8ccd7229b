"""State that is copied from an accelerator to shared memory: page-locked, in each step or in every Nth."""

from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.memory.interval import choose_interval
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import inventory, state_file
from phalanx.system import accelerator
from tests.accelerator import curves
from tests.accelerator.device import needs_device, run_on_device
from tests.helpers import find_newest_checkpoint
from tests.numerics import runs

pytestmark = needs_device
STEPS = 20


def copied(placement: Placement, path: str) -> list[bool]:
    """Whether memory that was mapped is page-locked, and what comes late is seen in it when that was waited for."""
    device = torch.device(placement.device)
    accelerator.set_device(device, 1)
    file = state_file.create_state_file(Path(path), state_file.StateFileOwner(1, 0, 1, b"r" * 32, 0, 1), {}, 4096)
    mapped = torch.frombuffer(file.map, dtype=torch.uint8)
    locked = accelerator.page_lock(mapped, device)
    there = torch.frombuffer(file.map, dtype=torch.float32, count=4, offset=file.slot_offset(1))
    there.copy_(torch.ones(4, device=device), non_blocking=True)
    late = there.tolist() == [0.0] * 4
    accelerator.synchronize_stream(device)
    again = accelerator.page_lock(mapped, device)  # which the device refuses, and no kernel fails for
    fine = (torch.ones(2, device=device) * 2).tolist() == [2.0, 2.0]
    return [locked, late, there.tolist() == [1.0] * 4, again, fine]


def test_memory_that_was_mapped_is_page_locked(shared: Path) -> None:
    assert run_on_device(copied, order="lazy", path=str(shared)) == [[True, True, True, False, True]]
    assert not accelerator.page_lock(torch.zeros(4), torch.device("cpu"))


def test_how_often_a_step_is_kept() -> None:
    assert [choose_interval(share) for share in (0.0, 0.0049, 0.005, 0.006, 0.5, 3.0)] == [1, 1, 1, 2, 100, 600]
    assert [choose_interval(share, unit=4) for share in (0.0025, 0.006, 0.5)] == [1, 4, 100]


def train_noting(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """A run that notes whether the memory of its slots was page-locked."""
    lock = accelerator.page_lock

    def noted(memory: torch.Tensor, device: torch.device) -> bool:
        found = lock(memory, device)
        (Path(run) / "locked").write_text(f"{found} {memory.nbytes}")
        return found

    accelerator.page_lock = noted
    return runs.train(placement, run, data, changes)


def walked(run: Path, data: Path, shared: Path, wanted: Any, link_mb_s: int) -> list[int]:
    """A run whose state goes over a link of that speed; what it said of how often a step is kept."""
    run.mkdir()
    write_event(RunPaths(run).events, EventKind.RUN_STARTED, 1)
    changes = curves.RECIPE | {
        "parallel.engine": "single",
        "resilience.in_memory_checkpoints": wanted,
        "train.steps": STEPS,
    }
    arguments = {"run": str(run), "data": str(data), "changes": changes}
    codes = run_on_device(train_noting, order="threads", shared=shared, timeout_s=240, link_mb_s=link_mb_s, **arguments)
    assert codes == [0]
    said = [
        event["value"]
        for event in runs.events(run, EventKind.AUTO_RESOLVED)
        if event["key"] == "resilience.in_memory_checkpoints"
    ]
    return [int(value.split()[1]) for value in said if isinstance(value, str)]


def test_over_a_slow_link_every_nth_step_is_kept_and_said(tokens: Path, tmp_path: Path, shared: Path) -> None:
    """Each step would wait for the copy of the one before."""
    (every,) = walked(tmp_path / "auto", tokens, shared, "auto", 1)
    assert every > 1
    kept = find_newest_checkpoint(
        inventory.read_state_files(shared, state_file.compute_run_id(RunPaths(tmp_path / "auto").events))
    )
    assert kept is not None
    newest = max(step for step in range(1, STEPS + 1) if step % every == 0 or step < 11)
    assert kept.step == newest


def test_what_is_asked_for_is_kept_however_slow_the_link(tokens: Path, tmp_path: Path, shared: Path) -> None:
    assert walked(tmp_path / "asked", tokens, shared, True, 1) == []
    kept = find_newest_checkpoint(
        inventory.read_state_files(shared, state_file.compute_run_id(RunPaths(tmp_path / "asked").events))
    )
    assert kept is not None and kept.step == STEPS
    (file,) = inventory.list_state_files(shared)
    assert (tmp_path / "asked" / "locked").read_text() == f"True {file.stat().st_size}"
