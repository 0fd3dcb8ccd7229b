"""Nodes of a training run in processes of their own, which are killed, frozen and started again as the run goes on.

One rank of the harness stands for a node: it forks the command line from a warm process, and ends it when the records
say that it is time.
"""

import contextlib
import functools
import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.started import command_line
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor import node_requests
from phalanx.elastic.supervisor.meeting_host import MeetingHost
from phalanx.recovery import shared_memory
from phalanx.recovery.replica_client import SOCKET
from phalanx.system.fork import fork
from tests.helpers import ALL, run_ranks, wait_until

STEPS = 36 if ALL else 24
RECIPE = """
model: {hidden: 16, layers: 1, heads: 2, intermediate: 32, dropout: 0.1}
data: {source: text.jsonl, tokenizer_vocab: 280, seq_len: 8, held_out: 0.3, cache: cache}
train: {steps: STEPS, global_batch: 6, micro_batch: 2, eval_sequences: 4, dtype: fp64}
optim: {lr: 1e-2, decay_steps: 300}
balance: {batch: even}
checkpoint: {every: 6, keep: 30}
comm: {timeout_s: 60}
resilience: {heartbeat_timeout_s: 3}
report: {tensorboard: false}
""".replace("STEPS", str(STEPS))
PATIENCE_S = 200.0
# A model that waits in each pass, as for a GPU: what trains until something happens takes no core meanwhile.
SLOW = "model.code=slow.py"
SLOW_MODEL = """
import time
from phalanx.models.llama import Llama

class Model(Llama):
    def forward(self, *inputs, **named):
        time.sleep(0.15)
        return super().forward(*inputs, **named)
"""

# What happens to a node, one life after the other: `begin` and `end` are steps of the run at which it is started and
# gets `signal` (0 and None: at once, and not at all); or it is started when the first life of another node, `begin`,
# is over, and gets the signal when its output matches `end`; `thaw_s`: a stopped one goes on after so many seconds.
# Instead of the signal it may be `asked` for: a node, and what is wanted of it; or the `keeper` of a node gets it; or
# `all` nodes. One that is `emptied` has lost its memory since the life before; what one has kept is that of the node
# whose number it `had` before. It may open so many `files` (None: as many as this process). Node 0 may be
# `stopped_at_entry`: asked to stop when the others have just heard that they are members.
Life = dict[str, Any]


def life(
    begin: int | str = 0,
    end: int | str | None = None,
    number: int = signal.SIGKILL,
    thaw_s: float | None = None,
    files: int | None = None,
) -> Life:
    return {"begin": begin, "end": end, "signal": int(number), "thaw_s": thaw_s, "asked": None, "files": files}


def train(
    place: Path,
    run: str,
    lives: list[list[Life]],
    nodes: int,
    *overrides: str,
    ranks: tuple[int, ...] = (),
    start: Callable[..., Any] = run_ranks,
    node: Callable[..., Any] | None = None,
) -> list[list[list[Any]]]:
    """[exit code, output] of each life of each node; `start` runs `node` as `run_ranks` runs `live`."""
    total = len(lives)
    commands = [
        ["train", "recipe.yaml", *overrides, "--run-dir", run, "--ranks", str(ranks[node] if ranks else 1), "--nodes",
         str(nodes), "--spares", str(total - nodes), "--node-rank", str(node), "--rendezvous",
         f"file://{place}/meet-{run}", "--rendezvous-timeout", "60"]
        for node in range(total)
    ]  # fmt: skip
    try:
        arguments = {"folder": str(place), "run": run, "commands": commands, "lives": lives}
        found: list[list[list[Any]]] = start(node or live, total, timeout_s=280, **arguments)
        return found
    finally:
        for node in range(total):  # what is killed leaves its memory
            shutil.rmtree(shared_memory.find_folder(RunPaths(place / run), node) or place / "none", ignore_errors=True)


def live(placement: Placement, folder: str, run: str, commands: list[list[str]], lives: list[list[Life]]) -> Any:
    """All lives of the node of this rank's number."""
    paths = RunPaths(Path(folder) / run)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # this process is a rank of the harness
        os.environ.pop(name, None)
    results = []
    for number, each in enumerate(lives[placement.rank]):
        out = Path(folder) / f"{run}-node-{placement.rank}-life-{number}.txt"
        wait_until(functools.partial(_reached, paths, each["begin"], run), timeout_s=PATIENCE_S)
        results.append(_live(folder, placement.rank, commands[placement.rank], each, paths, out))
    return results


def _live(folder: str, node: int, arguments: list[str], told: Life, paths: RunPaths, out: Path) -> list[Any]:
    def child() -> int:
        os.chdir(folder)
        if told.get("stopped_at_entry"):
            MeetingHost.enter = _stopped(MeetingHost.enter)  # type: ignore[method-assign]
        if told.get("files") is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (told["files"], told["files"]))
        return command_line(arguments, out)

    if told.get("emptied"):
        shutil.rmtree(_memory(paths, node))
    if "had" in told:
        (_memory(paths, node) / shared_memory.RUN).write_text(f"{shared_memory.compute_run_key(paths)}-{told['had']}")
    pid, pidfd = fork(child)
    os.close(pidfd)
    process = out.with_suffix(".pid")
    process.write_text(str(pid))
    if isinstance(told["end"], str):
        wait_until(lambda: bool(re.search(told["end"], _read(out), re.DOTALL)) or _over(pid), timeout_s=PATIENCE_S)
        os.kill(pid, told["signal"])
    elif told["end"] is not None:
        wait_until(lambda: _step(paths) >= told["end"] or _over(pid), timeout_s=PATIENCE_S)
        if told["asked"] is not None:
            node_requests.write_request(
                paths, told["asked"][0], node_requests.NodeRequestKind(told["asked"][1]), "its fan is loud"
            )
        elif "all" in told:  # the other agents of the same life
            for file in Path(folder).glob(out.with_suffix(".pid").name.replace(f"-node-{node}-", "-node-*-")):
                os.kill(int(file.read_text()), told["signal"])
        else:
            os.kill(_keeper(paths, told["keeper"]) if "keeper" in told else pid, told["signal"])
        if told["thaw_s"] is not None:
            time.sleep(told["thaw_s"])
            os.kill(pid, signal.SIGCONT)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [status, _read(out)]


def _read(out: Path) -> str:
    return out.read_text() if out.exists() else ""


def _memory(paths: RunPaths, node: int) -> Path:
    """A node's folder in shared memory."""
    folder = shared_memory.find_folder(paths, node)
    assert folder is not None, f"node {node} has kept nothing"
    return folder


def _stopped(enter: Callable[..., Any]) -> Callable[..., Any]:
    """A function that has this process asked to stop when it has done the same."""

    def entered(*arguments: Any) -> Any:
        members = enter(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return members

    return entered


def _keeper(paths: RunPaths, node: int) -> int:
    """The process of a node that keeps replicas: who holds the socket by which ranks reach it."""
    path = _memory(paths, node) / SOCKET
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    (inode,) = [row[6] for row in rows if row[7:] == [str(path)] and row[3] == "00010000"]  # it listens
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is gone by now
            if os.readlink(link) == f"socket:[{inode}]":
                return int(link.parts[2])
    raise AssertionError(f"nobody holds {path}")


def _over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reached(paths: RunPaths, begin: int | str, run: str) -> bool:
    if isinstance(begin, str):
        return (paths.root.parent / f"{run}-{begin}-life-1.txt").exists()
    return _step(paths) >= begin


def _step(paths: RunPaths) -> int:
    return max((record["step"] for record in read_steps(paths.metrics)), default=0)


def curve(run: Path) -> list[float]:
    return [record[key] for record in read_steps(RunPaths(run).metrics) for key in ("loss", "grad_norm")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(RunPaths(run).events) if event["kind"] == kind]


def state(run: Path, step: int = STEPS) -> dict[str, Any]:
    """What the files of a checkpoint are known by: their sizes and checksums."""
    (manifest,) = (RunPaths(run).has_checkpoints).glob(f"step-*{step}/manifest.json")
    files: dict[str, Any] = json.loads(manifest.read_text())["files"]
    return {f"rank {rank}": files[name] for rank, name in enumerate(sorted(files))}
