"""Programs for nodes in namespaces whose commands are forked from a process that has imported torch."""

import contextlib
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.placement import Placement
from tests import helpers, warm_shell
from tests.helpers import run_ranks, wait_until

# Of a Python that is asked for anything else, too, as the script of a job does.
ANY = """#!/bin/sh
case $1 in
-m) exec {warm} "$@" ;;
*) exec {python} "$@" ;;
esac
"""


@dataclass(frozen=True)
class WarmPython:
    """`python -m phalanx train` is forked, other commands of `python` begin as usual; all of `phalanx` are forked. A
    killed one has to be a real process, so it is not for tests that kill `phalanx train`."""

    python: Path
    phalanx: Path


def serve(placement: Placement, folder: str) -> None:
    place, address = Path(folder), f"{folder}/socket"
    warm_shell.write_client(place / "train", warm_shell.PYTHON, address)
    warm_shell.write_client(place / "phalanx", warm_shell.CLIENT, address)
    (place / "python").write_text(ANY.format(warm=place / "train", python=sys.executable))
    (place / "python").chmod(0o755)
    warm_shell.serve(placement, address)


@contextlib.contextmanager
def running() -> Iterator[WarmPython]:
    """Programs that are there as long as no test runs ranks: these are forked by the same process."""
    with tempfile.TemporaryDirectory(prefix="phalanx-warm-") as place, ThreadPoolExecutor(1) as pool:
        address = Path(place, "socket")
        helpers._zygote()  # dies with the thread that starts it, which is not to be the one below
        served = pool.submit(run_ranks, serve, 1, timeout_s=400, folder=place)
        wait_until(lambda: served.done() or address.exists(), timeout_s=200)
        try:
            yield WarmPython(Path(place, "python"), Path(place, "phalanx"))
        finally:
            with socket.socket(socket.AF_UNIX) as over, contextlib.suppress(OSError):  # it may have failed to start
                over.connect(f"{address}.end")
            served.result()
