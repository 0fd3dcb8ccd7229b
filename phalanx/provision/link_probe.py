"""A node's part in measuring the links of a cluster: it answers the other nodes and probes them in turn. `main` runs
on the node, with the standard library alone; `links.py` starts it on all nodes at the same time.

Lines of JSON on standard input, and one answer to each: the secret and the address to listen at; the addresses of all.
"""

import json
import os
import sys
from contextlib import closing
from typing import Any

from phalanx.core.placement import round_robin_partners
from phalanx.elastic.membership.connectivity import EchoServer, probe


def answer(tree: Any) -> None:
    """Answer with a line of JSON."""
    os.write(1, f"{json.dumps(tree)}\n".encode())


def main() -> None:
    """Answer until standard input ends, so that no node leaves before all others have probed it."""
    begin = json.loads(sys.stdin.readline())
    with closing(EchoServer(begin["host"], begin["secret"])) as server:
        answer(server.address)
        line = sys.stdin.readline()
        if not line:
            return
        told = json.loads(line)
        own, peers = told["own"], told["peers"]
        found = {}
        for other in round_robin_partners(own, len(peers)):
            if other is not None and peers[other] is not None:
                found[other] = probe((peers[other][0], peers[other][1]), begin["secret"]).to_json()
        answer(found)
        sys.stdin.read()
