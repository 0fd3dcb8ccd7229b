"""The warm parent of the tests' nodes: it has imported what a node needs and forks each; none starts Python anew.

One JSON line in, one JSON line out: {"words": [...], "environment": {...}, "network": null, "output": "/tmp/x"} ->
{"pid": 7}, and, once that has ended, {"ended": 7} -> {"code": -9}. The words are those of tests.cluster.node_jobs.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.links import enter
from phalanx.elastic.node.agent import preload
from phalanx.system.fork import die_with, fork
from tests.helpers import ROOT

OUT, ERRORS = "out", "errors"


class Node:
    """A process that the warm parent has forked."""

    def __init__(self, parent: "WarmNodes", words: Sequence[str], environment: dict[str, str], network: str | None):
        self._parent, self._folder, self._code = parent, Path(tempfile.mkdtemp(dir=parent.folder)), None
        asked = {"words": list(words), "environment": os.environ | environment, "network": network}
        self.pid: int = parent.ask(asked | {"output": str(self._folder)})["pid"]
        self._descriptor = os.pidfd_open(self.pid)  # its parent leaves it a zombie until it is asked for its end

    def signal(self, number: signal.Signals) -> None:
        if not self.over():
            signal.pidfd_send_signal(self._descriptor, number)

    def over(self) -> bool:
        return self._code is not None or bool(select.select([self._descriptor], [], [], 0)[0])

    def wait(self, timeout_s: float) -> int:
        """The exit code, or minus the number of the signal that has ended it."""
        if self._code is None:
            assert select.select([self._descriptor], [], [], timeout_s)[0], f"it still runs after {timeout_s} s"
            self._code = self._parent.ask({"ended": self.pid})["code"]
            os.close(self._descriptor)
        return self._code

    def said(self) -> tuple[str, str]:
        """Its output and its errors so far."""
        return (self._folder / OUT).read_text(), (self._folder / ERRORS).read_text()


class WarmNodes:
    """The parent, started by the first node; everything ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.warm_nodes", str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[WarmNodes]:
    made = WarmNodes(folder)
    try:
        yield made
    finally:
        made.close()


def be_node(request: dict[str, Any]) -> int:
    """In a forked child: what `python -m tests.cluster.node_jobs` does with these words."""
    from tests.cluster import node_jobs
    from tests.unit import agent_jobs

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python begins
    for name, number in ((OUT, 1), (ERRORS, 2)):
        with open(Path(request["output"], name), "wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["network"] is not None:
        enter(request["network"])
    sys.argv = ["node_jobs", *request["words"]]
    node_jobs.FOLDER = agent_jobs.FOLDER = Path(request["words"][2])
    node_jobs.main()
    return 0


def main() -> None:
    """Serve requests until the tests' process closes the pipe or dies."""
    die_with(int(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a module prints may mix with the replies
    preload(["tests.cluster.node_jobs"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's; its end of the pipe says when to leave
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            reply = {"code": os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])}
        else:
            pid, descriptor = fork(lambda: be_node(request))  # noqa: B023
            os.close(descriptor)
            reply = {"pid": pid}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
