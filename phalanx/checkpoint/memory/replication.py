"""Replicas of a rank's state in the memory of the next node: whether there are any, and what is sent of each step."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from phalanx.checkpoint.memory.interval import SlotRotation
from phalanx.checkpoint.memory.replica_update import SharedGradients, describe_updates, gradient_bytes
from phalanx.checkpoint.memory.slots import OnEvent, StateFolder
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.core.records import EventKind
from phalanx.recovery.catalog import find_redundant, needs_replicas
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.recovery.shared_memory import HOST_MEMORY_SHARE, format_bytes
from phalanx.recovery.state_file import StateFile
from phalanx.system import memory as host_memory

REPLICATE_KEY = "resilience.replicate_every"
Replicate = int | Literal["auto", "every_step", "off"]


class Replication:
    """A rank's replicas by way of `client`; `replicate`: as in a recipe; `rule`: AdamW's numbers, where other nodes can
    make its updates again."""

    def __init__(
        self, client: ReplicaClient, mesh: Mesh, replicate: Replicate, rotation: SlotRotation,
        rule: Mapping[str, float] | None, on_event: OnEvent,
    ) -> None:  # fmt: skip
        self.client, self.active = client, False
        self.required = replicate not in ("auto", "off")
        self.deferred = False  # replicas begin once what lies here of attempts before has made room
        self.hosted: set[int] = set()  # ranks whose replicas this node holds
        self.gradients: SharedGradients | None = None
        self._mesh, self._replicate, self._rotation, self._rule = mesh, replicate, rotation, rule
        self._on_event = on_event
        self._nodes: list[int] = []  # of each rank
        self._redundant = False  # whether what this rank holds is on another node anyway

    def gather_nodes(self, parts: Sequence[int]) -> None:
        """See which ranks are on which nodes, and whose `parts` several nodes have anyway. Collective."""
        self._nodes = [int(each) for each in self._mesh.gather(float(self.client.node))]
        self._redundant = find_redundant(parts, self._nodes)[self._mesh.rank]
        if self.client.partner is None or not needs_replicas(parts, self._nodes):
            self._rotation.every = None

    def refuse_without_file(self, shortage: str) -> None:
        """Raise ConfigError where replicas were asked for, though the rank's own file has no room."""
        if self.required:
            raise ConfigError(
                f"{REPLICATE_KEY} is {self._replicate}, but shared memory has no room even for the state of each "
                f"node's own ranks ({shortage}); give the machine or container a larger /dev/shm, or set "
                f"{REPLICATE_KEY}=auto or off"
            )

    def begin(self, file: StateFile, newest: int | None, folder: StateFolder, last: bool = False) -> None:
        """See which ranks have replicas made of their state, from now on, and have the partners make room; where what
        lies in memory of attempts before takes that, it is waited until nobody reads it any more: then this is the
        `last` time. `newest`: the step that is gone on from in the file, later ones are walked again, maybe cut
        otherwise. Collective."""
        client, mesh, bare = self.client, self._mesh, self._redundant
        needed = self._replicate != "off" and client.partner is not None
        rule = None if self._rule is None or bare else describe_updates(self._rule, file.index()["tensors"])
        short = client.begin_replica(file.metadata.path, self.required, bare, rule, newest) if needed else None
        lacking, made = mesh.sum([float(short is not None), float(needed and short is None and not bare)])
        self.deferred = lacking > 0 and not last and folder.has_previous_on_any_node(file)
        if lacking and self.required and not self.deferred:
            raise ConfigError(
                f"{REPLICATE_KEY} is {self._replicate}, but "
                + (short or "another node has no room for replicas (its rank's log has the numbers)")
                + f"; set {REPLICATE_KEY}=auto or off, or give the machine or container a larger /dev/shm"
            )
        self.active = needed and not lacking
        if lacking and needed and short is None:
            client.release_replica()
        if self.deferred:
            return
        self.gradients = self._share_gradients(file) if self.active and client.replays else None
        (again,) = mesh.sum([float(self.gradients is not None)])
        kept = mesh.gather(float(self.active))
        self.hosted = {rank for rank in range(mesh.world) if kept[rank] and self._nodes[rank] == client.previous_node}
        (replica_bytes,) = mesh.sum([2.0 * file.metadata.slot_bytes * (self.active and not bare)])
        if newest is not None or self._replicate == "off":
            return
        every = self._rotation.every
        if lacking:
            reason = f"a node that is lost takes the run back to a checkpoint, since {short or 'a node has no room'}"
        elif not made:
            reason = "every part of the state is on two nodes anyway"
        else:
            reason = f"the state of {made:g} of {mesh.world} ranks is kept on a second node"
            if every is None:
                how = "gradients with which it makes the update again" if again == made else self._as_it_is(int(again))
                reason += f", which gets {how}"
            else:
                reason += (
                    f" every {every} steps, where it takes {format_bytes(replica_bytes)} over all nodes; a lost node "
                    f"costs {every - 1} committed steps at most"
                )
        value = (every or "every_step") if made and not lacking else "off"
        self._on_event(EventKind.AUTO_RESOLVED, {"key": REPLICATE_KEY, "value": value, "reason": reason})

    def _share_gradients(self, file: StateFile) -> SharedGradients | None:
        """Memory for gradients, which the process that sends them has too; None where there is too little."""
        tensors = file.index()["tensors"]
        if gradient_bytes(tensors) > HOST_MEMORY_SHARE * host_memory.free_bytes():
            return None
        try:
            gradients = SharedGradients(tensors)
        except OSError:
            return None
        self.client.share_gradients(gradients.descriptor, gradients.bytes)
        return gradients

    def _as_it_is(self, again: int) -> str:
        """Why not all replicas are made of gradients."""
        if again:
            return f"gradients of {again} of them and else the state itself, as there is no memory for gradients"
        if self._rule is None:
            return "it as it is, since only AdamW's updates are made again, of states that live in shared memory"
        return "it as it is, since the nodes' processors or versions of torch differ, or there is no memory for more"

    def partner_steps(self) -> Collection[int] | None:
        """The steps that the partner has had from before; None where it needs none, as others hold the same state."""
        return None if self._redundant else self.client.partner_steps

    def send_commit(self, step: int, begins: bool = False) -> None:
        """Let the partner have what it gets of a step that is committed.

        Where others hold the same state anyway it gets what was said of it, each time. What an attempt `begins` with
        goes only where nothing has to travel: ranks wait for the next step, whose weights and gradients share the link,
        and then that one is sent as a whole in its place."""
        if not self.active:
            return
        if not self._redundant and not (step in self.client.partner_steps if begins else self._rotation.is_due(step)):
            return
        self.client.send_commit(step, None if self.gradients is None or begins else self.gradients.to_message())

    def wait_for_ack(self) -> None:
        """Wait until the partner has all that was sent."""
        if not self.active:
            return
        began, waits = time.perf_counter(), self._mesh.bookkeeping
        with waits.report_wait("message"):  # a rank that waits for another node does not hang
            self.client.wait_for_ack()
        if threading.current_thread() is threading.main_thread():  # nor is it slow; a lane holds nobody up
            waits.add_wait(time.perf_counter() - began)
