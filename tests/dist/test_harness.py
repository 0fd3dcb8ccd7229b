"""The tests' own ranks: fast, isolated, and honest about failures."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.system.fork import fork
from tests import helpers
from tests.helpers import ROOT, is_alive, process_group, run_ranks, wait_until


def add_ranks(placement: Placement, start: float = 0.0) -> list[float]:
    import torch
    import torch.distributed as dist

    with process_group(placement):
        value = torch.tensor([start + placement.rank])
        dist.all_reduce(value)
    return [value.item(), placement.rank, placement.world, torch.get_num_threads()]


def fail_on_one(placement: Placement, kind: str) -> None:
    import torch
    import torch.distributed as dist

    with process_group(placement):
        if placement.rank == 1:
            if kind == "error":
                raise ValueError("the weights of rank 1 are wrong")
            if kind == "config":
                raise ConfigError("optim.lr is 0, so nothing would be learned; set it above 0")
            if kind == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if kind == "hang":
                time.sleep(60)
        dist.all_reduce(torch.ones(1000))


def die_once(placement: Placement) -> list[float]:
    if placement.attempt == 1 and placement.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return [placement.attempt, add_ranks(placement)[0]]


def pid(placement: Placement) -> int:
    return os.getpid()


def write_pid_and_wait(placement: Placement, folder: str) -> None:
    (Path(folder) / f"{placement.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def interrupt_a_worker(placement: Placement, folder: str) -> list[object]:
    """Ctrl-C reaches the parent of pytest's workers as well as their clients."""
    from tests.warm_shell import serve_workers

    python, (reads, writes) = Path(folder, "python"), os.pipe()

    def parent() -> int:
        os.dup2(reads, 0)
        serve_workers(str(python))
        return 0

    pid, _ = fork(parent, keep=[reads])
    wait_until(python.exists)
    code = "import time\ntry:\n    open('begun', 'w')\n    time.sleep(60)\nfinally:\n    open('ended', 'w')"
    client = subprocess.Popen([python, "-u", "-c", code], cwd=folder)
    wait_until(Path(folder, "begun").exists)
    os.kill(pid, signal.SIGINT)
    client.send_signal(signal.SIGINT)
    client.wait()
    os.close(writes)
    return [Path(folder, "ended").exists(), client.returncode, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def with_loss(placement: Placement) -> list[float]:
    """One training step on every rank: what a cold torch would import lazily here costs more than a second."""
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return [p.abs().sum().item() for p in model.parameters()]


def test_results_come_by_rank() -> None:
    results = run_ranks(add_ranks, 3, start=1.0)
    assert results == [[6.0, rank, 3, 1] for rank in range(3)]


def test_one_rank_alone_works_the_same_way() -> None:
    assert run_ranks("tests.dist.test_harness:add_ranks", 1, start=5.0) == [[5.0, 0, 1, 1]]


def imported_by_a_step(placement: Placement) -> list[str]:
    before = set(sys.modules)
    with_loss(placement)
    return sorted(name for name in set(sys.modules) - before if name.startswith(("torch.", "phalanx.")))


def test_a_training_step_finds_everything_imported() -> None:
    """What a worker imports by itself it waits for, each time it is started: a second for torch._dynamo alone."""
    late = run_ranks(imported_by_a_step, 2)
    assert not [name for name in late[0] if name.startswith(("torch._dynamo", "torch.distributed", "phalanx."))], late


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("error", r"rank 1: ValueError: the weights of rank 1 are wrong\nTraceback(.|\n)*in fail_on_one"),
        ("config", "exit code 2\n.*rank 1: optim.lr is 0"),
        ("segfault", "rank 1: killed by SIGSEGV(.|\n)*Fatal Python error"),
    ],
)
def test_the_rank_that_failed_first_is_named(kind: str, text: str) -> None:
    for _ in range(3):  # its peers fail within milliseconds, in any order
        with pytest.raises(AssertionError, match=text):
            run_ranks(fail_on_one, 3, kind=kind)


def test_a_hang_ends_with_the_stacks_of_all_ranks() -> None:
    with pytest.raises(
        AssertionError, match=r"had not ended after 1 s(.|\n)*rank 0(.|\n)*all_reduce(.|\n)*fail_on_one"
    ):
        run_ranks(fail_on_one, 2, timeout_s=1, kind="hang")
    assert run_ranks(add_ranks, 2)[0][0] == 1.0


def test_restarted_ranks_meet_again() -> None:
    assert run_ranks(die_once, 2, restarts=1) == [[2, 1.0], [2, 1.0]]


def test_every_call_forks_new_ranks() -> None:
    assert len({*run_ranks(pid, 2), *run_ranks(pid, 2)}) == 4


def test_no_rank_outlives_pytest(tmp_path: Path) -> None:
    script = (
        "from tests.dist.test_harness import run_ranks, write_pid_and_wait as f\n"
        f"run_ranks(f, 2, folder={str(tmp_path / 'ranks')!r})"
    )
    (tmp_path / "tmp").mkdir()
    (tmp_path / "ranks").mkdir()
    environment = os.environ | {"PHALANX_TESTS_COLD": "1", "TMPDIR": str(tmp_path / "tmp")}
    caller = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    try:
        wait_until(lambda: sum(path.stat().st_size > 0 for path in (tmp_path / "ranks").iterdir()) == 2, timeout_s=180)
    finally:
        caller.kill()
        caller.wait()
    ranks = [int(path.read_text()) for path in (tmp_path / "ranks").iterdir()]
    wait_until(lambda: not any(is_alive(rank) for rank in ranks))


def test_ctrl_c_lets_a_forked_worker_end_what_it_has_begun(tmp_path: Path) -> None:
    assert run_ranks(interrupt_a_worker, 1, folder=tmp_path) == [[True, 1, 0]]


def test_what_covers_a_matrix_has_each_value_and_is_all_of_it_when_all_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(helpers, "ALL", False)
    assert helpers.cover([1, 2, 3], "ab") == [(1, "a"), (2, "b"), (3, "a")]
    monkeypatch.setattr(helpers, "ALL", True)
    assert len(helpers.cover([1, 2, 3], "ab")) == 6
