"""The agents of a job's nodes with workers that are over at once, each in a process of its own; no torch is imported.

`python -m tests.cluster.node_jobs WORKER RANKS FOLDER '{"nodes": 2, "node": 1, "meet": "file:///...", ...}'` prints
each event, and what node 0 hears of others, as a JSON line, and how it ended last. Workers are those of agent_jobs and
those below; `attempt` is node 0's first.
"""

import contextlib
import functools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from phalanx import nodes
from phalanx.cluster import agent, other_node, rendezvous, wire
from phalanx.cluster.first_node import own_hello
from phalanx.cluster.job import Job, Part
from phalanx.cluster.other_node import OtherNode
from phalanx.errors import PhalanxError
from phalanx.records import Placement, RunPaths
from tests.unit import agent_jobs
from tests.unit.agent_jobs import note

FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else Path()


def tells(placement: Placement) -> int:
    """All ranks meet at the store's address through the relays, and each tells rank 0 who it is."""
    assert placement.store is not None
    if placement.store.listen_fd is None:
        with socket.create_connection((placement.store.host, placement.store.port), timeout=10) as connection:
            connection.sendall(bytes([placement.rank]) * 100_000)
            connection.shutdown(socket.SHUT_WR)
            assert connection.makefile("rb").read() == b"heard"
    else:
        told = []
        with socket.socket(fileno=placement.store.listen_fd) as listener:
            for _ in range(placement.world - 1):
                with listener.accept()[0] as connection:
                    text = connection.makefile("rb").read()
                    assert text == text[:1] * 100_000
                    told.append(text[0])
                    connection.sendall(b"heard")
        note(placement, "told", sorted(told))
    places = [placement.node, placement.local_rank, placement.local_world, os.environ.get("GLOO_SOCKET_IFNAME")]
    note(placement, "place", places)
    return 0


def second_time(placement: Placement) -> int:
    """The first attempt lasts until it is killed, the next is over at once."""
    note(placement, "ready", os.getpid())
    if placement.attempt == 1:
        time.sleep(60)
    return 0


def more_memory(placement: Placement) -> int:
    """Runs out of memory in attempts 1 and 2, on the last rank."""
    if placement.attempt < 3 and placement.rank == placement.world - 1:
        raise MemoryError("no more")
    time.sleep(60 if placement.attempt < 3 else 0)
    return 0


def is_answered(other: OtherNode) -> bool:
    return any(found is not None for found in (other.refused, other.over, other.lost, other.offer))


def main() -> None:
    """Be the node that the arguments describe."""
    options = json.loads(sys.argv[4])
    worker = globals().get(sys.argv[1]) or getattr(agent_jobs, sys.argv[1])
    ranks, count, node = int(sys.argv[2]), options["nodes"], options["node"]
    wire.IDLE_S, wire.BETWEEN_S, wire.COUNT, wire.SILENT_S = options.get("silence", (5, 3, 3, 14))
    wire.ASK_S, wire.DEAF_S = options.get("answer", (30.0, 300.0))
    meeting = nodes.meeting(count, node, options["meet"], options.get("timeout_s", 20), os.environ)
    assert meeting is not None
    devices = [[options.get("device", "cpu"), "any", True]] * ranks
    hello = own_hello(node, count, devices, {"torch": options.get("torch", "2")}, options.get("recipe", {"a": 1}))

    def tell(kind: str, details: dict[str, Any]) -> None:
        print(json.dumps({"kind": kind, "time": time.monotonic(), **details}), flush=True)

    common: dict[str, Any] = {"worker": worker, "paths": RunPaths(FOLDER / "run"), "on_event": tell}
    ended: dict[str, Any] = {}
    try:
        if node == 0:
            allowed = iter([True] * options.get("lowered", 0))
            with nodes.hosted(meeting, hello) as first:
                first.notice = tell
                nodes.gather(first, meeting, first.tend)
                counts = [len(each["devices"]) for each in first.hellos()]
                first.offer(lambda number: {"first_rank": sum(counts[:number]), "world": sum(counts)})
                job = Job(
                    ranks,
                    **common,
                    first_attempt=options.get("attempt", 1),
                    max_restarts=options.get("max_restarts", 0),
                    after_out_of_memory=lambda: next(allowed, False),
                    part=Part(0, 0, sum(counts), first.interface()),
                    others=first,
                )
                ended["code"] = agent.run(job)
                first.finish(ended["code"], "over")
        else:
            ended["code"] = None
            while ended["code"] is None:
                other = other_node.seek(meeting.place, hello, meeting.timeout_s, lambda text: tell("said", {"t": text}))
                with contextlib.closing(other):
                    nodes.wait(other, functools.partial(is_answered, other))
                    if other.offer is not None:
                        part = Part(node, **other.offer, interface=rendezvous.interface_of(other.channel.socket))
                        other.say({"answer": {}})
                        ended["code"] = agent.follow(Job(ranks, **common, part=part, others=other), other)
                    ended["words"] = other.refused or (other.over and other.over[1])
                    ended["code"] = 2 if other.refused else other.over[0] if other.over else ended["code"]
                tell("left", {"lost": other.lost})
    except PhalanxError as error:
        ended = {"code": int(error.exit_code), "words": str(error)}
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
