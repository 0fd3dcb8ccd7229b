"""Jobs that test_agent.py runs, each in a process of its own: pytest has threads and signal handlers of its own.

`python -m tests.unit.agent_jobs WORKER WORLD FOLDER '{"max_restarts": 1}'` prints each event as a JSON line with its
time and the exit code last.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from phalanx.core import progress_page
from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.core.placement import ExitCode, InMemoryCheckpoint, Placement, StateFileLocation
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node import attempt, standby
from phalanx.elastic.node.agent import NodeJob, run_local_job
from phalanx.layout import memory_limits

FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else Path()


class OutOfMemoryError(RuntimeError):
    """Has the name that torch's has."""


def note(placement: Placement, name: str, value: Any) -> None:
    path = FOLDER / f"{name}-{placement.attempt}-{placement.rank}.json"
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


def fine(placement: Placement) -> int:
    assert placement.store is not None
    note(placement, "port", placement.store.port)
    return 0


def early_and_late(placement: Placement) -> int:
    time.sleep(0.4 * placement.rank)
    return 0


def killed_once(placement: Placement) -> int:
    assert placement.store is not None
    note(placement, "port", placement.store.port)
    if placement.attempt == 2:
        note(placement, "running", time.monotonic())
        return 0
    if placement.rank == 1:
        time.sleep(0.1)
        note(placement, "killed", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def meet(placement: Placement) -> int:
    """Rank 0 serves on the descriptor that it was given; the others connect to the address."""
    assert placement.store is not None
    if placement.store.listen_fd is not None:
        with socket.socket(fileno=placement.store.listen_fd) as listener:
            for _ in range(placement.world - 1):
                listener.accept()[0].sendall(b"hello")
    else:
        with socket.create_connection((placement.store.host, placement.store.port), timeout=5) as connection:
            assert connection.recv(5) == b"hello"
    return 0


def alone(placement: Placement) -> int:
    return 0 if placement.store is None and placement.world == 1 else 1


def raises(placement: Placement) -> int:
    if placement.rank == 1:
        error = KeyError("layer 3")
        error.add_note("in step 17")
        raise error
    time.sleep(60)
    return 0


def config_error(placement: Placement) -> int:
    raise ConfigError("optim.lr is 0, so nothing would be learned; set it above 0")


def checkpoint_error(placement: Placement) -> int:
    raise CheckpointError("piece 3 is torn")


def out_of_memory(placement: Placement) -> int:
    raise OutOfMemoryError("tried to allocate 20 GiB")


def starves(placement: Placement, steps: int = 0) -> int:
    """Is killed as by a kernel that counts it, a moment after the agent has begun to look. It was asked for larger
    micro-batches than it runs, which have 4 sequences unless it may have less."""
    mine = progress_page.open_progress_page(placement.shared, placement.rank, placement.attempt)
    for step in range(1, steps + 2):
        mine.enter_phase("data", step)
    mine.set_largest_micro_batch(
        min(4, memory_limits.read_micro_batch_limits(RunPaths(FOLDER / "run")).get(placement.rank, 64))
    )
    time.sleep(0.3)
    note(placement, "starved", 1)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def starves_behind_a_step(placement: Placement) -> int:
    return starves(placement, steps=1)


def eats(placement: Placement) -> int:
    """The last rank takes 100 MB for each of its 4 sequences, or of as many as it may have."""
    mine = progress_page.open_progress_page(placement.shared, placement.rank, placement.attempt)
    mine.enter_phase("data", 1)
    if placement.rank < placement.world - 1:
        time.sleep(60 if placement.attempt == 1 else 0)
        return 0
    mine.set_largest_micro_batch(
        most := min(4, memory_limits.read_micro_batch_limits(RunPaths(FOLDER / "run")).get(placement.rank, 64))
    )
    time.sleep(0.3)  # the agent has begun to look
    taken = [b"\1" * (100 << 20) for _ in range(most)]
    return 0 if len(taken) == most else 1


def cause_cannot_be_written(placement: Placement) -> int:
    RunPaths(FOLDER / "run").exit_cause(placement.attempt, placement.rank).mkdir()
    raise ValueError("the real reason")


def exits_7(placement: Placement) -> int:
    sys.exit(7)


def returns_3(placement: Placement) -> int:
    return 3


def peers_fail_first(placement: Placement) -> int:
    if placement.rank != 1:
        raise ConnectionResetError("Connection reset by peer")
    time.sleep(0.05)
    raise ValueError("the real reason")


def stops_when_asked(placement: Placement) -> int:
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    note(placement, "ready", os.getpid())
    while not received:
        time.sleep(0.01)
    time.sleep(0.05 * placement.rank)
    note(placement, "received", signal.Signals(received[0]).name)
    return int(ExitCode.STOPPED)


def deaf(placement: Placement) -> int:
    if placement.rank == 0:
        return stops_when_asked(placement)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(placement, "ready", os.getpid())
    time.sleep(60)
    return 0


def fails_past_checkpoints(placement: Placement) -> int:
    """Attempts 1, 2 and 4 come to a further checkpoint before they fail."""
    steps = FOLDER / "steps"
    steps.mkdir(exist_ok=True)
    if placement.attempt in (1, 2, 4):
        (steps / str(placement.attempt)).touch()
    return 3


def bad_cause(placement: Placement) -> int:
    """Leaves a cause file that is none."""
    text = ['["torn', "[1]", '{"exit_code": 11}'][placement.rank]
    RunPaths(FOLDER / "run").exit_cause(placement.attempt, placement.rank).write_text(text)
    return 3


def unprepared(placement: Placement) -> int:
    note(placement, "ready", os.getpid())
    time.sleep(60)
    return 0


def asks_to_stop_and_fails(placement: Placement) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or the agent's own SIGTERM may come before this has returned
    os.kill(os.getppid(), signal.SIGTERM)
    return 3


def starts_a_child(placement: Placement) -> int:
    note(placement, "child", subprocess.Popen(["sleep", "60"]).pid)
    if placement.rank == 1:
        while not (FOLDER / "child-1-0.json").exists():
            time.sleep(0.01)
        return 3
    time.sleep(60)
    return 0


def looks_around(placement: Placement) -> int:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]  # the listing's own is closed by now
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    around = {
        "files": [link for link in links if link != "/dev/null"],
        "stdin": sys.stdin.read(),
        "default": all(handler == signal.SIG_DFL for handler in handlers),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "group": os.getpgid(0) == os.getpid(),
        "device": placement.device,
    }
    note(placement, "around", around)
    print("printed")
    print("complained", file=sys.stderr)
    return 0


def second_time(placement: Placement) -> int:
    """The last rank of the first attempt is killed, once as many processes wait as there are ranks if any are to;
    those of the next one meet, and say what they know."""
    if placement.attempt == 1:
        children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
        while (FOLDER / "early").exists() and len(children.read_text().split()) < 2 * placement.world:
            time.sleep(0.01)
        if placement.rank == placement.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    assert placement.store is not None
    told, has_store = dataclasses.asdict(placement), placement.store.listen_fd is not None
    told["store"] = [placement.store.host, has_store and os.get_inheritable(placement.store.listen_fd or 0)]
    names = [Path(frame.filename).name for frame in traceback.extract_stack()]
    note(placement, "told", told | {"early": "standby.py" in names})
    looks_around(placement)
    return meet(placement)


def main() -> None:
    """Run the job that the arguments name."""
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    if options.pop("early", False):
        standby.LATER_S = 0.0
        (FOLDER / "early").touch()

    def tell(kind: str, details: dict[str, Any]) -> None:
        print(json.dumps({"kind": kind, "time": time.monotonic(), **details}), flush=True)

    job = NodeJob(
        world=int(sys.argv[2]),
        worker=globals()[sys.argv[1]],
        paths=RunPaths(FOLDER / "run"),
        on_event=tell,
        **{name: options.pop(name) for name in ("grace_s", "devices", "logs") if name in options},
    )
    if job.worker in (starves, starves_behind_a_step, eats):
        job.shared = FOLDER
        job.after_kernel_kill = functools.partial(memory_limits.record_kernel_kill, RunPaths(FOLDER / "run"))
        job.after_out_of_memory = memory_limits.watch_limits(RunPaths(FOLDER / "run"))
    if job.worker in (starves, starves_behind_a_step):
        attempt.out_of_memory_kills = lambda: len(list(FOLDER.glob("starved-*.json")))
        attempt.cgroup_oom_kills = attempt.out_of_memory_kills
    if job.worker is second_time:
        files = StateFileLocation(0, "/dev/shm/\udcff", "ab"), StateFileLocation(1, "r-1", "ab", ("10.0.0.1", 5))
        job.find_in_memory_state = lambda: InMemoryCheckpoint(7, files)
    before = (len(os.listdir("/proc/self/fd")), [signal.getsignal(number) for number in (1, 2, 10, 15)])
    code = run_local_job(
        job, **options, progress=lambda: max((int(path.name) for path in FOLDER.glob("steps/*")), default=0)
    )
    after = (len(os.listdir("/proc/self/fd")), [signal.getsignal(number) for number in (1, 2, 10, 15)])
    assert before == after, "run() left descriptors or signal handlers behind"
    with contextlib.suppress(ChildProcessError):
        raise AssertionError(f"run() left a child behind: {os.waitpid(-1, os.WNOHANG)}")
    print(json.dumps({"code": code}))


if __name__ == "__main__":
    main()
