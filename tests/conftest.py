"""Fixtures of all tests."""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.helpers import stop_zygote, without_waiting_for_disks

if TYPE_CHECKING:
    from tests.stores import Faults, S3Server

# On CI the same examples each time; elsewhere new ones, which is how they find what nobody thought of. How long one
# takes says nothing on cores that are shared.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Workers and the ranks that they start share the cores, where threads that spin are slow. Torch is not imported yet.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # processes that compile would first import torch, each

# No name is looked for on the real hub; tests/hub.py stands for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Modules are compiled once, also where the environment wants no files of it: the tests start Python hundreds of times.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As CPU ranks do (`use_batch_scheduling` in phalanx/system/cpus.py), also where a test makes its groups itself: that
# saves a third of what ranks compute on busy cores.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

without_waiting_for_disks()

TESTS = Path(__file__).resolve().parent
LONG = ("test_docs.py", "accelerator", "numerics", "dist", "gpu")  # what takes long, in this order
WAITS = "cluster"  # what waits more than it computes


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked, as their zygotes are: else each of them would import torch."""
    from tests.warm_shell import python_of_workers

    with contextlib.ExitStack() as stack:
        python = stack.enter_context(python_of_workers())
        config.add_cleanup(stack.pop_all().close)
    for spec in specs:
        spec.python = str(python)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What collecting makes lives to the end: nobody need look through it for what can be freed, and least of all again
    and again while it grows (a collection of garbage takes a second once torch and transformers are there)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several workers (`make test`) none shall begin with what takes long when the others are done, and not all at
    once with what waits: its files stand between the other long ones."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    parts = {item.path: item.path.relative_to(TESTS).parts[0] for item in items}
    waiting, long = ([path for path, part in parts.items() if (part == WAITS) is waits] for waits in (True, False))
    long.sort(key=lambda path: _turn(parts[path]))
    turns = {path: float(turn) for turn, path in enumerate(long)}
    last = sum(parts[path] in LONG for path in long)
    turns |= {path: last * turn / len(waiting) for turn, path in enumerate(waiting)}
    items.sort(key=lambda item: turns[item.path])


def _turn(part: str) -> int:
    return LONG.index(part) if part in LONG else len(LONG)


@pytest.fixture(scope="session", autouse=True)
def zygote() -> Iterator[None]:
    """The parent of the tests' ranks is started by the first `run_ranks` and ended here."""
    yield
    stop_zygote()


@pytest.fixture(autouse=True)
def umask_restored() -> Iterator[None]:
    """A command that a test calls in this process leaves no umask behind (a run in pytest's folders is its user's)."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def hang_ups_count() -> Iterator[None]:
    """A hang-up ends what a test starts, even where the tests themselves were started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token files to train and to evaluate on."""
    from tests.numerics import runs  # imports torch, which not every test needs

    folder = tmp_path_factory.mktemp("tokens")
    runs.write_tokens(folder)
    return folder


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[S3Server]":
    """A real S3 server on loopback."""
    from tests.stores import S3Server

    server = S3Server(tmp_path_factory.mktemp("s3") / "log")
    yield server
    server.close()


@pytest.fixture
def bucket(s3_server: "S3Server", monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A URL of its own for each test, on the S3 server to which this process's environment leads."""
    from phalanx.storage import files as storage
    from tests.stores import BUCKET

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    storage._make_filesystem.cache_clear()  # a driver made before would not know of it
    return f"s3://{BUCKET}/{abs(hash(request.node.nodeid)):x}"


@pytest.fixture
def faults() -> "Faults":
    """What goes wrong in `faulty://`: nothing yet."""
    from phalanx.storage import files as storage
    from tests.stores import register

    storage._make_filesystem.cache_clear()
    return register()
