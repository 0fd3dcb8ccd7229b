"""This node's memory of a run, as its agent has it: its ranks' state files, and the process that keeps replicas of
other nodes' state (`replicas/server.py`)."""

import contextlib
from collections.abc import Callable
from typing import Any

from phalanx.core.events import EventKind
from phalanx.core.placement import HostPort, InMemoryCheckpoint
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.node.job import NodeJob
from phalanx.elastic.replicas.server import MakeReplicaUpdater, ReplicaServer
from phalanx.elastic.supervisor.assignment import find_restore_source, list_files_to_fetch, list_reusable_replicas
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import inventory_to_message


class ReplicaHost:
    """`serves`: whether other nodes may have replicas here."""

    def __init__(self, secret: str, make_replica_updater: MakeReplicaUpdater) -> None:
        self.serves = True
        self._secret, self._make_replica_updater = secret, make_replica_updater
        self._server: ReplicaServer | None = None
        self._run = b""  # what the run is known by; asked for when its ranks begin, as later its folder may hang

    def open(self, job: NodeJob | None, forget_run: bool = False) -> ReplicaServer | None:
        """The process for state of other nodes, started again where it has died; None where nothing is kept.
        `forget_run`: the run may have got its first records since."""
        if forget_run:
            self._run = b""
        if not self.serves:
            return None
        if self._server is not None and not self._server.is_alive:
            self.close()
        if job is None or job.shared is None or not job.keeps_state or job.paths is None:
            return self._server
        run = self._run_of(job)
        if self._server is not None and self._server.run_id != run:  # it had no records yet when it was forked
            self.close()
        if self._server is None:
            self._server = ReplicaServer(job.shared, run, self._secret, self._make_replica_updater)
        return self._server

    def hand_over(self, job: NodeJob | None, channel: Channel, writes: bool) -> None:
        """Give the process a connection of another node."""
        server = self.open(job)
        if server is not None:
            channel.send({"ok": True})
            with contextlib.suppress(OSError):  # it has died: the rank that waits for it fails
                server.hand_over(channel.socket, writes)
        channel.close("the process for replicas has it")

    def close(self) -> None:
        """Have nothing more written here, before it is told what there is."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _run_of(self, job: NodeJob) -> bytes:
        assert job.paths is not None
        self._run = self._run or state_file.compute_run_id(job.paths.events)
        return self._run

    def list_inventory(self, job: NodeJob | None) -> list[dict[str, Any]]:
        """What there is of the run's state in this node's memory, for the leader."""
        if job is None or job.shared is None or job.paths is None:
            return []
        return inventory_to_message(inventory.read_inventory(job.shared, self._run_of(job)))

    def adopt_restore_source(
        self, job: NodeJob, start: Message, node: int, address_of: Callable[[int], HostPort]
    ) -> InMemoryCheckpoint | None:
        """What an attempt begins with on this `node`, as the order to start says; whatever else lies here is removed,
        but for replicas of use. What another node has of it, and ranks here will take as it is, is on its way from now
        on."""
        assert job.shared is not None
        for message in inventory.find_damage(job.shared):
            job.on_event(EventKind.WARNING, {"attempt": int(start["attempt"]), "message": message})
        kept = find_restore_source(start, node, job.shared, address_of)
        own = {file.path for file in (kept.files if kept else ()) if file.address is None}
        reusable = {str(job.shared / name) for name in list_reusable_replicas(start, node)}
        inventory.remove_unused_files(job.shared, own | reusable)
        for file in list_files_to_fetch(start, node, kept):
            if kept is not None and file.address is not None and self._server is not None:
                self._server.fetch(file.path, file.address, kept.step, int(start["slots"]))
        return kept
