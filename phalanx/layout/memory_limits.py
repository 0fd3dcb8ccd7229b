"""Memory limits of ranks after running out of memory: a file for each in the run folder."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core.json_lines import write_atomic
from phalanx.core.run_paths import RunPaths
from phalanx.layout.balance import UNBOUND


def read_micro_batch_limits(paths: RunPaths) -> dict[int, int]:
    """Sequences of a micro-batch that each rank which has run out of memory may have at most, by rank."""
    return {int(found["rank"]): int(found["most"]) for found in _limits(paths)}


def record_out_of_memory(paths: RunPaths, rank: int, tried: int, device: str = "") -> int:
    """Note that `rank` ran out of memory with micro-batches of `tried` sequences; returns its new limit, half of that.

    `device` is the model of the rank's device, since another one may hold more (`drop_stale_limits`). Raises OSError.
    """
    assert tried > 1, "less than one sequence cannot be asked for"
    path = paths.memory_limit(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    most = tried // 2
    write_atomic(path, json.dumps({"rank": rank, "most": most, "device": device}))
    return most


def record_kernel_kill(paths: RunPaths, rank: int, tried: int, steps: int) -> str | None:
    """Record that the kernel has killed `rank` because memory ran out, with micro-batches of `tried` sequences (0: none
    yet) after so many `steps` since its start; see `record_out_of_memory`. Returns a message, or None where that says
    nothing about the size of micro-batches, or cannot be recorded."""
    killed = "killed by the kernel because memory ran out, with micro-batches of"
    if tried == 1 and not steps:
        return (
            f"{killed} one sequence, and there are none smaller; shard the model over more machines, run fewer ranks "
            "on this one, or set memory.activations=full"
        )
    if tried <= 1:  # with the same it has come through steps: others took the memory, or it had lost some
        return None
    try:
        most = record_out_of_memory(paths, rank, tried)
    except OSError:
        return None
    return f"{killed} {tried} sequences at most; from the next start on it gets {most} at most"


def drop_stale_limits(paths: RunPaths, models: Sequence[str]) -> None:
    """Remove limits of ranks that are gone or that are on a device of another model now; `models` in order of rank."""
    for found in _limits(paths):
        rank = int(found["rank"])
        if rank >= len(models) or found.get("device") not in ("", models[rank]):
            paths.memory_limit(rank).unlink(missing_ok=True)


def watch_limits(paths: RunPaths) -> Callable[[], bool]:
    """A function that says whether a limit has been lowered since it was made or last asked.

    Limits only fall, and not below one sequence, so it says True a bounded number of times.
    """
    seen = read_micro_batch_limits(paths)

    def fell() -> bool:
        nonlocal seen
        before, seen = seen, read_micro_batch_limits(paths)
        return any(most < before.get(rank, UNBOUND) for rank, most in seen.items())

    return fell


def _limits(paths: RunPaths) -> list[dict[str, Any]]:
    found = []
    for path in sorted(paths.memory_limit(0).parent.glob("rank-*.json")):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # an unreadable one limits nothing: running out of memory writes it again
            continue
        if isinstance(tree, dict) and all(type(tree.get(key)) is int for key in ("rank", "most")) and tree["most"] >= 1:
            found.append(tree)
    return found
