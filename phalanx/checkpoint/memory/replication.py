"""Replication of a rank's state to the memory of the next node: whether it is on, and what is sent for each step."""

import mmap
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from phalanx.checkpoint.disk.files import DTYPES
from phalanx.checkpoint.memory.interval import SlotRotation
from phalanx.checkpoint.memory.previous_state import map_slot
from phalanx.checkpoint.memory.slots import OnEvent, StateFolder
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.core.records import EventKind
from phalanx.optim.update import AdamW, Slot, StepUpdate
from phalanx.recovery.catalog import find_redundant, needs_replicas
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.recovery.shared_memory import HOST_MEMORY_SHARE, format_bytes
from phalanx.recovery.state_file import ALIGNED, StateFile, round_up
from phalanx.system import memory as host_memory

REPLICATE_KEY = "resilience.replicate_every"
Replicate = int | Literal["auto", "every_step", "off"]


# ------------------------------------------------------------------------------------------------------ replica update
# Making an update again on the node that holds a replica: what travels is the reduced gradient, a third of the state.
# The same kernel gives the same bits of the same numbers, on processors with the same instructions: that is compared
# beforehand, and what came of every step afterwards. Only AdamW's updates are made again, of states that live in shared
# memory; of others the state itself is sent.


Tensors = Sequence[Sequence[Any]]  # of a slot, as a state file's index has them


def describe_kernels() -> str:
    """What must be equal for bitwise identical results."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def gradient_bytes(tensors: Tensors) -> int:
    """What the gradients of all of a slot's parameters take."""
    return sum(size for _, _, size in _places(tensors).values())


def describe_updates(rule: Mapping[str, float], tensors: Tensors) -> dict[str, Any]:
    """What another node must know to make the updates of a state of such `tensors` again, by AdamW with the numbers of
    `rule`, and to have room for that."""
    return {"rule": dict(rule), "kernels": describe_kernels(), "gradients": gradient_bytes(tensors)}


def _places(tensors: Tensors) -> dict[str, tuple[str, int, int]]:
    """By key: type, elements, and bytes, one gradient behind the other."""
    found = {}
    for key, kind, dtype, shape, _ in tensors:
        if kind == "param":
            count = torch.Size(shape).numel()
            found[key] = dtype, count, round_up(count * DTYPES[dtype].itemsize, ALIGNED)
    return found


def _views(memory: mmap.mmap, tensors: Tensors) -> dict[str, torch.Tensor]:
    views, at = {}, 0
    for key, (dtype, count, size) in _places(tensors).items():
        empty = torch.empty(0, dtype=DTYPES[dtype])
        views[key] = torch.frombuffer(memory, dtype=DTYPES[dtype], count=count, offset=at) if count else empty
        at += size
    return views


class SharedGradients:
    """A rank's gradients of the step that is being committed, and what its update goes by, for the process that sends
    them; nothing is left of them when both have ended."""

    def __init__(self, tensors: Tensors) -> None:
        """Raises OSError where there is no memory for them."""
        self.bytes = gradient_bytes(tensors)
        self.descriptor = os.memfd_create("phalanx-gradients")
        try:
            os.posix_fallocate(self.descriptor, 0, max(self.bytes, 1))
            self._views = _views(mmap.mmap(self.descriptor, max(self.bytes, 1)), tensors)
        except OSError:
            os.close(self.descriptor)
            raise
        self._without: set[str] = set()
        self._change: StepUpdate | None = None

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        """Shards are about to be updated, those of `keys` by `grads`, or as what has none; the last call counts."""
        self._without -= grads.keys()
        self._without |= set(keys) - grads.keys()
        self._change = change
        if grads:
            torch._foreach_copy_([self._views[key] for key in grads], list(grads.values()))

    def to_message(self) -> dict[str, Any]:
        """What the other node has to know beside the gradients. Waits for nothing: they are on the host."""
        change = self._change
        assert change is not None
        return {
            "step": change.step,
            "lr": change.lr,
            "divisor": change.divisor.item(),
            "skip": change.skip.item(),
            "no_decay": sorted(change.no_decay),
            "without": sorted(self._without),
        }


class GradientReplayer:
    """A replica whose updates are recomputed. `form`: what the rank has said of itself, with AdamW's numbers."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._tensors: Tensors = form["index"]["tensors"]
        self._rule = AdamW(**{name: float(value) for name, value in form["rule"].items()})
        self.bytes = gradient_bytes(self._tensors)
        self._memory = mmap.mmap(-1, max(self.bytes, 1))
        self.gradients = memoryview(self._memory)[: self.bytes]  # to be filled, as they lie with the rank
        self._views = _views(self._memory, self._tensors)
        self._slots: tuple[Slot, Slot] | None = None

    def apply_update(self, file: StateFile, old: int, message: Mapping[str, Any]) -> None:
        """Update slot `old` of a replica into the other one."""
        if self._slots is None:
            self._slots = map_slot(file, 0, self._tensors), map_slot(file, 1, self._tensors)
        source, target = self._slots[old], self._slots[1 - old]
        some = next(iter(source.values()), None)
        if some is None:  # a rank may have an empty shard
            return
        without = set(message["without"])
        change = StepUpdate(
            step=int(message["step"]),
            lr=float(message["lr"]),
            no_decay=frozenset(message["no_decay"]),
            divisor=torch.tensor(float(message["divisor"]), dtype=some["param"].dtype),
            skip=torch.tensor(float(message["skip"])),
        )
        grads = {key: grad for key, grad in self._views.items() if key not in without}
        with torch.no_grad():
            self._rule.apply(source, target, grads, change)


def make_replayer(form: Mapping[str, Any]) -> GradientReplayer | None:
    """Recomputes a rank's updates here; None where the bits might differ."""
    if form.get("kernels") != describe_kernels():
        return None
    torch.set_num_threads(1)
    return GradientReplayer(form)


# ------------------------------------------------------------------------------------------------ replicas of a rank


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
        """Find which ranks are on which nodes, and which `parts` several nodes have anyway. Collective."""
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
        """Decide which ranks have replicas from now on, and let the partners allocate them; where files of earlier
        attempts take the room, it waits until no rank reads them any more: then this is the `last` time. `newest`: the
        step in the file that the run resumes from; later ones are replayed, perhaps sharded differently. Collective."""
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
            reason = f"losing a node takes the run back to a checkpoint: {short or 'a node has no room'}"
        elif not made:
            reason = "every part of the state is already on two nodes"
        else:
            reason = f"the state of {made:g} of {mesh.world} ranks is kept on a second node"
            if every is None:
                how = "gradients, from which it recomputes the update" if again == made else self._as_it_is(int(again))
                reason += f", which gets {how}"
            else:
                reason += (
                    f" every {every} steps, where it takes {format_bytes(replica_bytes)} over all nodes; a lost node "
                    f"costs at most {every - 1} committed steps"
                )
        value = (every or "every_step") if made and not lacking else "off"
        self._on_event(EventKind.AUTO_RESOLVED, {"key": REPLICATE_KEY, "value": value, "reason": reason})

    def _share_gradients(self, file: StateFile) -> SharedGradients | None:
        """Allocate memory for gradients, shared with the sending process; None where there is too little."""
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
            return f"gradients of {again} of them and otherwise the state itself, because memory for gradients is short"
        if self._rule is None:
            return "a full copy, because only AdamW updates of state in shared memory can be recomputed"
        return "a full copy, because the nodes' processors or torch versions differ, or memory is short"

    def partner_steps(self) -> Collection[int] | None:
        """The steps that the partner has had from before; None where it needs none, as others hold the same state."""
        return None if self._redundant else self.client.partner_steps

    def send_commit(self, step: int, begins: bool = False) -> None:
        """Send a committed step to the partner.

        Where other nodes have the same state it gets only its description, each time. The state that an attempt
        `begins` with is sent only where no data has to be transferred; otherwise the next step is sent as a whole in
        its place."""
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
        if threading.current_thread() is threading.main_thread():  # the communication thread delays no rank
            waits.add_wait(time.perf_counter() - began)
