"""The warm parent of the tests' ranks: started once per pytest session, forks the ranks of every distributed test.

Pytest itself never forks ranks (it has threads, and no warm torch). One JSON line in, one JSON line out:
{"function": "tests.dist.cases:curve", "world": 3, "kwargs": {}, "timeout_s": 60, "restarts": 0, "folder": "/tmp/x"} ->
{"results": [by rank]} or {"error": text}.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node.agent import NodeJob, preload, run_local_job
from phalanx.elastic.node.worker import STACKS_SIGNAL
from phalanx.system.fork import die_with
from tests.helpers import without_waiting_for_disks, zygote_python

ROOT = Path(__file__).resolve().parent.parent
COLD = "PHALANX_TESTS_COLD" in os.environ
WARM = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.testing",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",  # which takes each rank seconds
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer_utils",  # for set_seed
    "numpy.ma",
    "pytest",
    "hypothesis",
    "tests.helpers",
)
# Cases that may be imported before ranks are forked; those of the simulated accelerator start threads.
WARM_CASES = ("tests.dist.", "tests.numerics.")


class TimeUp(Exception):
    """The ranks of one request took longer than they were given."""


def warm_up() -> None:
    """Import what ranks use. A module of ours that does not import is left to the test that needs it to report."""
    preload(WARM)
    for path in sorted((ROOT / "phalanx").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__main__" or parts[1] == "compat":  # which makes packages of others importable
            continue
        try:
            preload([".".join(parts).removesuffix(".__init__")])
        except Exception:
            traceback.print_exc()


def use_huge_pages() -> None:
    """Have what is in memory lie in huge pages: a fork copies a table of pages, which then is a hundredth as long."""
    size, collapse = 2 << 20, 25  # MADV_COLLAPSE; an older kernel knows none, and nothing changes
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access == "rw-p" and inode == "0":
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for place in range(-(-begin // size) * size, end - size + 1, size):
                libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), collapse)


def run_case(placement: Placement, function: str, kwargs: dict[str, Any], folder: str) -> int:
    """One rank: call the function and leave its result in a file."""
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(placement, **kwargs)
    write_atomic(Path(folder) / f"result-{placement.rank}.json", json.dumps(result))
    return 0


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request to its end."""
    folder, world = Path(request["folder"]), request["world"]
    paths = RunPaths(folder)
    deadline = time.monotonic() + request["timeout_s"]
    events: list[dict[str, Any]] = []

    def watch_the_clock() -> None:
        if time.monotonic() < deadline:
            return
        for pid in next(event["pids"] for event in reversed(events) if "pids" in event).values():
            try:
                os.kill(pid, STACKS_SIGNAL)
            except ProcessLookupError:
                continue
        time.sleep(0.3)  # for the stacks to reach the logs
        raise TimeUp(f"the ranks had not ended after {request['timeout_s']} s; their stacks are in the logs below")

    if not COLD and request["function"].startswith(WARM_CASES):
        preload([request["function"].partition(":")[0]])
    worker = partial(run_case, function=request["function"], kwargs=request["kwargs"], folder=str(folder))

    shared = request.get("shared")
    if shared is not None:  # what is kept there is that of a run
        paths = RunPaths(Path(request["kwargs"]["run"]))

    def find_newest_checkpoint() -> int:
        steps = (path.name.removeprefix("step-") for path in (paths.root / "checkpoints").glob("step-*"))
        return max((int(step) for step in steps if step.isdecimal()), default=0)

    job = NodeJob(
        world=world,
        worker=worker,
        paths=paths,
        on_event=lambda kind, details: events.append({"kind": kind, **details}),
        on_idle=watch_the_clock,
        shared=None if shared is None else Path(shared),
    )
    first_attempt = request["kwargs"].get("first_attempt", 1)
    try:
        code = run_local_job(job, request["restarts"], first_attempt=first_attempt, progress=find_newest_checkpoint)
    except Exception as error:
        return {"error": f"{error}\n{logs(paths, events, world)}"}
    if code != 0:
        return {"error": f"exit code {code}\n{logs(paths, events, world)}"}
    return {"results": [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world)]}


def logs(paths: RunPaths, events: list[dict[str, Any]], world: int) -> str:
    """What is known about a failure: the deaths, the first cause's traceback, the ends of the last attempt's logs."""
    deaths = [event for event in events if event["kind"] == EventKind.WORKER_DIED]
    parts = [f"attempt {death['attempt']}, rank {death['rank']}: {death['reason']}" for death in deaths]
    if deaths and (cause := paths.exit_cause(deaths[-1]["attempt"], deaths[-1]["rank"])).exists():
        parts.append(json.loads(cause.read_text())["traceback"])
    attempt = max((event["attempt"] for event in events), default=1)
    for rank in range(world):
        log = paths.log(attempt, rank)
        if log.exists() and (lines := log.read_text().splitlines()):
            parts.append(f"--- log of rank {rank}, its last lines\n" + "\n".join(lines[-40:]))
    return "\n".join(parts)


def main() -> None:
    """Serve requests until pytest closes the pipe or dies."""
    if zygote_python[-1] == sys.executable:  # a forked one is ended when its client ends, which does so with pytest
        die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's; its end of the pipe says when to leave
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a module prints may mix with the replies
    without_waiting_for_disks()
    if not COLD:
        warm_up()
    use_huge_pages()
    for line in sys.stdin:
        replies.write(json.dumps(serve(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
