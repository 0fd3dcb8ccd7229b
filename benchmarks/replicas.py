"""What a replica of each step on a second node costs the link between them: as gradients, and as the state itself.

    sudo python3 benchmarks/replicas.py [--quick] [--json FILE] [--mbit N]

Two nodes (links.py; needs root) with one rank each, which updates its shard by AdamW and commits every step, and whose
replica the other node keeps. Nothing else happens in a step, so that it takes what its replica takes. Bytes are those
that have left the nodes' interfaces, set against what has to travel: a gradient, or all of the state.
"""

import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Check, Row, at_most, machine, options, report, result
from benchmarks.links import links, why_not
from phalanx.core.placement import HostPort, Placement
from phalanx.elastic.membership.listener import ConnectionListener
from phalanx.elastic.node.agent import preload
from phalanx.elastic.replicas.server import ReplicaServer
from phalanx.recovery import shared_memory

PRELOAD = (
    "torch",
    "torch._dynamo",
    "phalanx.comm.mesh",
    "phalanx.checkpoint.memory.store",
    "phalanx.checkpoint.memory.replication",
)
SECRET, RUN = "of this benchmark", b"b" * 32
GRADIENTS, STATE = "gradients", "the state itself"
ITEM_BYTES = {GRADIENTS: 4, STATE: 12}  # of a parameter, with AdamW in float32
PART = 600_000  # elements of each shard's parameter
BYTES = 1.1  # what is asked: sent over what has to be, of which the frames of a network take 0.045
TOLD = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def node(placement: Placement, folder: str, address: str) -> Path:
    """Begin to keep replicas on this node, and let others in. Before there are threads."""
    from phalanx.checkpoint.memory.replication import make_replayer

    mine = Path(folder) / f"node-{placement.rank}"
    mine.mkdir(mode=0o700)
    keeper = ReplicaServer(mine, RUN, SECRET, make_replayer)
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(8)
    door = ConnectionListener(listener, SECRET, lambda host, why: None)
    (Path(folder) / f"port-{placement.rank}").write_text(str(listener.getsockname()[1]))

    def let_in() -> None:
        while True:
            for channel, hello in door.accept():
                channel.send({"ok": True})
                keeper.hand_over(channel.socket, writes="attempt" in hello)
                channel.close("the keeper has it")
            time.sleep(0.002)

    threading.Thread(target=let_in, daemon=True).start()
    return mine


def sent_bytes() -> int:
    """What has left this node."""
    lines = [line.replace(":", " ").split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo")


def commits(placement: Placement, folder: str, addresses: list[str], way: str, elements: int, steps: int) -> Any:
    """Steps that are committed here and on the other node: (seconds, bytes sent) of each, the first, which sends the
    state anyway, left out."""
    own = node(placement, folder, addresses[placement.rank])
    import torch

    from phalanx.checkpoint.memory.store import SharedMemoryStore
    from phalanx.comm.mesh import join
    from phalanx.engine.state_slots import OwnedShards, StateSlots
    from phalanx.layout.buckets import Fragment, ParameterSpec
    from phalanx.optim.update import AdamW, StepUpdate, allocate_zeros
    from phalanx.recovery.replica_client import ReplicaClient

    class Told:
        weight: int = 1
        loss_scale: float | None = None

        def get(self) -> tuple[float, float]:
            return 1.0, 0.0

    torch.set_num_threads(1)
    rule, parts = AdamW(**TOLD), elements // PART
    names = [f"{placement.rank}.{number}" for number in range(parts)]
    owned = tuple(Fragment(ParameterSpec(name, (PART, 1), "", "fp32"), 0, PART, 0, 0) for name in names)
    shards, keys = OwnedShards(owned, rule, torch.float32, torch.device("cpu")), [each.key for each in owned]

    with join(placement, 60) as mesh:
        other = Path(folder) / f"port-{1 - placement.rank}"
        while not (other.exists() and other.read_text()):
            time.sleep(0.01)
        partner: HostPort = (addresses[1 - placement.rank], int(other.read_text()))
        memory = SharedMemoryStore(
            own, mesh, generation=1, run=RUN, on_event=lambda kind, details: None, wanted=True,
            replicas=ReplicaClient(own, placement.rank, 2, partner, 1, 60.0), replicate="every_step",
            rule=TOLD if way == GRADIENTS else None, first_on_node=True,
        )  # fmt: skip
        state = StateSlots(shards, allocate_zeros, keeper=memory)
        state.open()
        grads = {key: torch.full((PART,), 0.1) for key in keys}
        found = []
        for step in range(1, steps + 2):
            change = StepUpdate(step, 1e-4, frozenset(), torch.ones(()), torch.zeros(()))
            mesh.sum([0.0])
            before, begun = sent_bytes(), time.perf_counter()
            state.begin_write()
            state.note_updates(keys, grads, change)
            rule.apply(state.source, state.target, grads, change)
            state.advance(step, Told())
            state.wait_for_commit()
            seconds = time.perf_counter() - begun
            mesh.sum([0.0])  # both have all that they wait for
            if step > 1:
                found.append((mesh.max([seconds])[0], sent_bytes() - before))
        memory.close()
    return found


def measure(way: str, elements: int, steps: int, mbit: float) -> tuple[Row, Check]:
    with links([mbit, mbit]) as network, tempfile.TemporaryDirectory(dir=shared_memory.SHM_ROOT) as folder:
        addresses = list(network.addresses)
        both = network.run([0, 1], commits, folder, addresses, way, elements, steps)
    return judged(way, both, elements, mbit)


def judged(way: str, both: list[list[tuple[float, float]]], elements: int, mbit: float) -> tuple[Row, Check]:
    """A row and a check, of what `commits` returned on either node."""
    seconds = statistics.median(each[0] for each in both[0])
    sent = statistics.mean(each[1] for rank in both for each in rank)
    payload = ITEM_BYTES[way] * (elements // PART * PART)
    row: Row = {
        "replica by": way, "million parameters a node": elements / 1e6, "Mbit/s": mbit,
        "a step's replica, s": seconds, "bytes sent": sent, "has to be": payload, "ratio": sent / payload,
        "link's bound, s": payload * 8 / (mbit * 1e6),
    }  # fmt: skip
    return row, at_most(f"bytes sent over those that have to be, {way}", sent / payload, BYTES)


def main() -> None:
    parser = options("What a replica of each step on a second node costs the link between them.")
    parser.add_argument("--mbit", type=float, default=1000.0, help="what each node's link carries (default 1000)")
    given = parser.parse_args()
    why = why_not()
    if why is not None:
        print(f"not measured: {why}")
        return
    elements, steps = (3_000_000, 4) if given.quick else (9_600_000, 10)
    rows, checks = zip(*(measure(way, elements, steps, given.mbit) for way in (GRADIENTS, STATE)), strict=True)
    report(result("replicas", machine(None, 1), rows, checks), given.json)


if __name__ == "__main__":
    preload(PRELOAD)  # first of all: whoever forks ranks must have no thread of a numerical library
    main()
