"""What tests share: running a function on several ranks, and meeting in a process group there."""

import contextlib
import itertools
import json
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.core.placement import InMemoryCheckpoint, Placement, StateFileLocation
from phalanx.recovery import inventory
from phalanx.recovery.catalog import choose_restore_point
from phalanx.recovery.state_file import StateFileMetadata

ROOT = Path(__file__).resolve().parent.parent
# `make test-all` sets it: curves at their full length, and all of what `make test` samples.
ALL = "PHALANX_TEST_ALL" in os.environ
START_S = 120  # what the zygote gets to import torch on a busy machine
# The last is the Python that starts zygotes: in workers of `make test` it forks them (tests/warm_shell.py).
zygote_python = [sys.executable]


def without_waiting_for_disks() -> None:
    """Have files count as written when the kernel has them: tests end processes, and never the machine's power."""
    os.fsync = lambda fd: None


def cover(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each value of each factor occurs; with `make test-all` all combinations."""
    values = [list(factor) for factor in factors]
    if ALL:
        return list(itertools.product(*values))
    return [tuple(each[case % len(each)] for each in values) for case in range(max(map(len, values)))]


def some(cases: Iterable[Any], *places: int) -> list[Any]:
    """The cases at these places; with `make test-all` all."""
    listed = list(cases)
    return listed if ALL else [listed[place] for place in places]


def free_port() -> int:
    """A loopback port for who binds it a moment later: none of those that the kernel gives to whoever asks for any, so
    that no other test's process gets it meanwhile."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(10_001, min(least, 32_768)))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(
    function: Callable[..., Any] | str,
    world: int,
    timeout_s: float = 120,
    restarts: int = 0,
    shared: Path | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(placement, **kwargs)` on `world` CPU ranks and return their JSON-able results by rank.

    `function` is a module-level function of an importable module, or its "module:name"; kwargs travel as JSON (a Path
    arrives as a string). With `restarts`, an abnormal end starts all ranks again with the next `placement.attempt`;
    with `shared`, a folder for state files, ranks of the run in kwargs["run"] begin with what those hold.

    Raises:
        AssertionError: a rank failed or the time was up; the text has the first cause's traceback and the logs' ends.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    request = {"function": name, "world": world, "kwargs": kwargs, "timeout_s": timeout_s, "restarts": restarts}
    request["shared"] = None if shared is None else str(shared)
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
        reply = _ask(request | {"folder": folder}, timeout_s)
    assert "error" not in reply, f"{name} on {world} ranks: {reply['error']}"
    results: list[Any] = reply["results"]
    return results


@contextlib.contextmanager
def process_group(
    placement: Placement, timeout_s: float = 30, backend: str = "gloo", options: Any = None
) -> Iterator[None]:
    """The default process group of the ranks of a placement, destroyed at the end."""
    import torch.distributed as dist

    wait = timedelta(seconds=timeout_s)
    address = placement.store
    store: Any = dist.HashStore()
    if address is not None:
        store = dist.TCPStore(
            address.host,
            address.port,
            placement.world,
            is_master=placement.rank == 0,
            timeout=wait,
            wait_for_workers=False,
            master_listen_fd=address.listen_fd,
        )
    dist.init_process_group(
        backend, store=store, rank=placement.rank, world_size=placement.world, timeout=wait, pg_options=options
    )
    # A rank that leaves at once would break connections that a slower one still makes.
    store.set(f"connected/{placement.rank}", "")
    store.wait([f"connected/{rank}" for rank in range(placement.world)], wait)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_alive(pid: int) -> bool:
    """Whether a process exists and still runs; one that has ended but not been reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Return as soon as a condition holds; AssertionError when it does not in time."""
    until = time.monotonic() + timeout_s
    while True:
        begun = time.monotonic()
        if condition():
            return
        looked = time.monotonic()
        assert looked < until, f"still not so after {timeout_s} s"
        # What reads long files or starts commands to see it shall not keep a core busy, which those have need of that
        # are waited for.
        time.sleep(min(1.0, max(0.005, 4 * (looked - begun))))


@cache
def _zygote() -> subprocess.Popen[str]:
    # Warnings of its imports go to a file, which is read only if it dies.
    errors = tempfile.NamedTemporaryFile("w", prefix="phalanx-zygote-", suffix=".log", delete=False)  # noqa: SIM115
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with errors:
        return subprocess.Popen(
            [zygote_python[-1], "-m", "tests.zygote", str(os.getpid()), errors.name],
            cwd=ROOT,
            env=os.environ | threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _ask(request: dict[str, Any], timeout_s: float) -> Any:
    zygote = _zygote()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    try:
        zygote.stdin.write(json.dumps(request, default=str) + "\n")
        zygote.stdin.flush()
        ready, _, _ = select.select([zygote.stdout], [], [], timeout_s + START_S)
        line = zygote.stdout.readline() if ready else ""
    except BrokenPipeError:
        line = ""
    except BaseException:  # pytest's own timeout or Ctrl-C: the answer would come in the next test's place
        stop_zygote()
        raise
    if line:
        return json.loads(line)
    log = Path(str(zygote.args[-1])).read_text()  # type: ignore[index]
    stop_zygote()
    return {"error": f"the zygote, parent of the tests' ranks, gave no answer (exit code {zygote.returncode})\n{log}"}


def stop_zygote() -> None:
    """End the zygote and the ranks that it may still have; the next `run_ranks` starts another."""
    if _zygote.cache_info().currsize == 0:
        return
    zygote = _zygote()
    zygote.kill()
    zygote.wait()
    Path(str(zygote.args[-1])).unlink(missing_ok=True)  # type: ignore[index]
    _zygote.cache_clear()


def find_newest_checkpoint(found: Iterable[StateFileMetadata]) -> InMemoryCheckpoint | None:
    """The newest step that is whole in state files of one node."""
    facts = list(found)
    choice = choose_restore_point({0: [inventory.make_file_info(each) for each in facts]})
    if choice is None:
        return None
    paths = {each.rank: each for each in facts if (each.generation, each.way) == (choice.generation, choice.way)}
    return InMemoryCheckpoint(
        choice.step,
        tuple(StateFileLocation(rank, str(paths[rank].path), paths[rank].layout.hex()) for rank in choice.files),
    )


def find_committed_step(folder: Path, run: bytes) -> int:
    """The newest step that all ranks of a run hold in a folder; 0: none."""
    kept = find_newest_checkpoint(inventory.read_state_files(folder, run))
    return max(0, kept.step) if kept is not None else 0
