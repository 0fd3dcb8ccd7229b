"""How long a script of a user's own is away when its node is lost: `phalanx run` over two nodes and a spare.

Network namespaces of this machine are the nodes, joined by cables of 1 Gbit/s; `examples/fsdp_loop.py` is the script.
All processes of a node end at once (crash), or its cable is pulled (power-loss), of which nobody is told. Dead is the
time from then until all ranks run the first line of the script again: what comes after it is the script's own start and
load, and is told beside it. Needs root and iproute2.

    sudo python3 benchmarks/script_faults.py --quick
    sudo python3 benchmarks/script_faults.py --times 5 --json script_faults.json
"""

import argparse
import functools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.links import enter, links
from benchmarks.started import ROOT, Command, start, strike
from phalanx.compat.run import PRELOAD
from phalanx.elastic.node.agent import preload

NODES, SPARES, MBIT = 2, 1, 1000.0
KINDS = ("crash", "power-loss")
ASKED_S = 2.0
AFTER, EVERY, STEPS, PAUSE_S = 8, 3, 24, 0.2  # a node is lost after so many steps; a checkpoint every so many
PATIENCE_S = 240.0
LOOK_S = 0.002


def lost(folder: Path, kind: str, node: int) -> dict[str, float]:
    """Start the script, lose a node, and wait for its end. Seconds until all ranks have begun again (`dead`), and until
    the first further step (`until_step`)."""
    folder.mkdir(parents=True)
    with links([MBIT] * (NODES + SPARES)) as made:
        commands: dict[int, Command] = {}
        try:
            for each in range(NODES + SPARES):
                words = [
                    "run",
                    "--nproc",
                    "1",
                    "--nodes",
                    str(NODES),
                    "--spares",
                    str(SPARES),
                    "--node-rank",
                    str(each),
                ]
                words += ["--rendezvous", f"file://{folder}/meet", str(ROOT / "examples" / "fsdp_loop.py"), "kept"]
                words += ["--steps", str(STEPS), "--every", str(EVERY), "--pause", str(PAUSE_S)]
                inside = functools.partial(enter, made.names[each])
                commands[each] = start(words, folder, folder / f"node-{each}.txt", before=inside)
            _when(folder, lambda said: _steps(said) >= AFTER)
            began = time.monotonic()
            if kind == "crash":
                strike(commands[node].all(), signal.SIGKILL)
            else:
                made.plug(node, False)
            began_again = _when(folder, lambda said: len(re.findall(r"starts, after 1 restarts$", said, re.M)) == NODES)
            stepped = _when(folder, lambda said: re.search(r"^resumed from step \d+\nstep \d", said, re.M))
            living = [command for each, command in commands.items() if each != node]
            _when(folder, lambda said: all(command.over() for command in living))
            assert [command.code for command in living] == [0] * len(living), living[0].said()
            return {"dead": began_again - began, "until_step": stepped - began}
        finally:
            for command in commands.values():
                command.end()


def _steps(said: str) -> int:
    return max((int(step) for step in re.findall(r"^step (\d+) loss", said, re.M)), default=0)


def _when(folder: Path, holds: Callable[[str], Any]) -> float:
    """When something came to hold of what all nodes have said."""
    until = time.monotonic() + PATIENCE_S
    while True:
        said = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("node-*.txt")))
        if holds(said):
            return time.monotonic()
        assert time.monotonic() < until, said[-4000:]
        time.sleep(LOOK_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one of each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    preload(PRELOAD)
    folder = Path(tempfile.mkdtemp(prefix="phalanx-script-faults-"))
    found: list[dict[str, Any]] = []
    try:
        for number in range(1 if given.quick else given.times):
            for kind in KINDS:
                node = (number + 1) % NODES  # the one that does not lead, then the one that does
                seconds = lost(folder / f"{kind}-{number}", kind, node)
                found.append({"kind": kind, "node": node, "load": os.getloadavg()[0], **seconds})
                print(f"{kind} of node {node}: dead {seconds['dead']:.2f} s, first further step after "
                      f"{seconds['until_step']:.2f} s (load {os.getloadavg()[0]:.1f})", flush=True)  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for kind in KINDS:
        dead = [each["dead"] for each in found if each["kind"] == kind]
        print(f"{kind}: dead {statistics.median(dead):.2f} s ({min(dead):.2f} to {max(dead):.2f}), "
              f"asked for: {ASKED_S:g}")  # fmt: skip
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
