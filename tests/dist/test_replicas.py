"""Replicas of state on another node, without agents: two ranks stand for two nodes, each with a keeper and a door."""

import dataclasses
import json
import os
import resource
import signal
import socket
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.checkpoint.memory import replication
from phalanx.checkpoint.memory.previous_state import InMemoryCheckpointReader
from phalanx.checkpoint.memory.replication import SharedGradients, make_replayer
from phalanx.checkpoint.memory.store import SharedMemoryStore
from phalanx.comm import mesh as meshes
from phalanx.comm.mesh import Mesh, join
from phalanx.core.errors import PhalanxError
from phalanx.core.placement import HostPort, InMemoryCheckpoint, Placement, StateFileLocation
from phalanx.elastic.membership.channel import connect_and_greet
from phalanx.elastic.membership.listener import ConnectionListener
from phalanx.elastic.replicas import server
from phalanx.elastic.replicas.own_ranks import ROLE, StateFileFetcher
from phalanx.elastic.replicas.server import ReplicaServer
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import StateFileInfo, choose_restore_point
from phalanx.recovery.replica_client import ReplicaClient, receive_frame, send_frame
from tests.dist.engine_cases import ADAMW
from tests.dist.test_in_memory_checkpoints import made, step
from tests.helpers import run_ranks, wait_until

RUN, SECRET = b"r" * 32, "a secret"


class Node:
    """One of two nodes: a folder in shared memory, a keeper, and a door that lets those in who know the secret."""

    def __init__(self, place: Path, number: int, secret: str = SECRET, room: int | None = None) -> None:
        self.number, self.folder, self._place = number, place / f"node-{number}", place
        self.folder.mkdir(mode=0o700)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        self.keeper = ReplicaServer(self.folder, RUN, secret, make_replayer)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        self.refused: list[str] = []
        self.door = ConnectionListener(listener, secret, lambda host, why: self.refused.append(why))
        (place / f"port-{number}").write_text(str(listener.getsockname()[1]))

    def open(self) -> "Node":
        """Let others in; nothing may be forked here any more."""
        threading.Thread(target=self._let_in, daemon=True).start()
        return self

    def _let_in(self) -> None:
        while True:
            for channel, hello in self.door.accept():
                assert hello["role"] == ROLE
                channel.send({"ok": True})
                self.keeper.hand_over(channel.socket, writes="attempt" in hello)
                channel.close("the keeper has it")
            time.sleep(0.002)

    def address(self, number: int) -> HostPort:
        file = self._place / f"port-{number}"
        wait_until(lambda: file.exists() and bool(file.read_text()))
        return "127.0.0.1", int(file.read_text())

    def replicas(self, attempt: int = 1) -> ReplicaClient:
        return ReplicaClient(self.folder, self.number, 2, self.address(1 - self.number), attempt, 10.0)

    def holds(self) -> list[list[Any]]:
        """Rank, steps and whether it is a replica, of all that it has."""
        (self.folder / inventory.RANKS).unlink(missing_ok=True)  # ranks live, and nothing is being written
        return [[each.rank, list(each.steps), each.replica] for each in inventory.read_inventory(self.folder, RUN)]


def memory_of(
    mesh: Mesh, node: Node, events: list[Any], kept: InMemoryCheckpoint | None = None, **options: Any
) -> SharedMemoryStore:
    return SharedMemoryStore(
        node.folder, mesh, generation=options.pop("generation", 1), run=RUN, previous=kept, replicas=node.replicas(),
        on_event=lambda kind, details: events.append(details), first_on_node=True, **options,
    )  # fmt: skip


def settle(made: Any, mesh: Mesh) -> None:
    made.keeper_settles()
    mesh.sum([0.0])


# ------------------------------------------------------------------------------------------------------- step by step


def counting(log: Path) -> None:
    """Have keepers that are forked from now on write down how a replica came to its steps, and what they copy."""
    for of, name in ((server._Node, "_write"), (server._Node, "_make_again"), (StateFileFetcher, "_fill")):
        whole = getattr(of, name)

        def counted(self: Any, *args: Any, name: str = name, inner: Any = whole) -> None:
            with open(log, "a") as file:
                file.write(f"{name}\n")
            inner(self, *args)

        setattr(of, name, counted)


RULES = {
    "by gradients": dataclasses.asdict(ADAMW),
    "by the state": None,
    "by other kernels": dataclasses.asdict(ADAMW),
}
HOW = {
    "by gradients": "gradients, from which it recomputes the update",
    "by the state": "a full copy, because only AdamW updates of state in shared memory can be recomputed",
    "by other kernels": "a full copy, because the nodes' processors or torch versions differ, or memory is short",
}


def walks(placement: Placement, folder: str, kind: str, by: str) -> dict[str, Any]:
    """Five steps; the other node has each of them. Then node 0 is lost, and all is read from node 1."""
    events: list[Any] = []
    log = Path(folder) / f"log-{placement.rank}"
    counting(log)
    if by == "by other kernels":
        replication.describe_kernels = lambda: f"of node {placement.rank}"
    node = Node(Path(folder), placement.rank).open()
    with join(placement, 30) as mesh:
        memory = memory_of(mesh, node, events, rule=RULES[by])
        engine = made(mesh, kind, memory)
        for number in range(1, 6):
            step(engine, number, mesh)
        settle(engine, mesh)
        mesh.sum([0.0])
        found = {
            "late": memory.commits_async,
            "holds": node.holds(),
            "events": events,
            "came by": log.read_text().split(),
        }
        mine = {(p.name, p.kind, p.start): p.tensor.clone() for p in engine.inner.pieces()}
        mesh.sum([0.0])
        theirs = Path(folder) / f"node-{1 - placement.rank}" / inventory.REPLICAS
        [own], [replica] = inventory.list_state_files(node.folder), inventory.list_state_files(theirs)
        one, other = state_file.StateFile(own), state_file.StateFile(replica)
        slots = one.metadata.steps[5], other.metadata.steps[5]
        size = one.metadata.slot_bytes
        found["same"] = one.read_bytes(one.slot_offset(slots[0]), size) == other.read_bytes(
            other.slot_offset(slots[1]), size
        )
        found["same header"] = one.raw_header(slots[0]) == other.raw_header(slots[1])
        mesh.sum([0.0])
        (Path(folder) / "node-1" / inventory.RANKS).unlink(missing_ok=True)
        mesh.sum([0.0])
        choices: list[Any] = []

        def looked() -> bool:
            choices.append(choose_restore_point({1: inventory.read_inventory(Path(folder) / "node-1", RUN)}))
            return choices[-1] is not None

        wait_until(looked)  # while the other rank looks there is nothing to be seen
        choice = choices[-1]
        files = tuple(
            StateFileLocation(rank, inventory.state_file_path(held), held.layout, node.address(1))
            if placement.rank == 0 or held.replica
            else StateFileLocation(rank, str(node.folder / inventory.state_file_path(held)), held.layout)
            for rank, (_, held) in sorted(choice.files.items())
        )
        kept = InMemoryCheckpoint(choice.step, files)
        source = InMemoryCheckpointReader(
            kept, {n: tuple(p.shape) for n, p in engine.inner.model.named_parameters()}, memory.replicas
        )
        far = True
        for (name, what, start), tensor in mine.items():
            out = torch.empty_like(tensor)
            source.read_into(name, what, start, start + len(tensor), out)
            far &= torch.equal(out, tensor)
        found["by coordinates"] = far
        # A spare: it takes up the file of rank 0 as it is, from where it is, and has no replica of rank 1.
        if placement.rank == 0:
            for path in (own, *inventory.list_state_files(node.folder / inventory.REPLICAS)):
                path.unlink()
        mesh.sum([0.0])
        if by == "by gradients" and placement.rank == 0:  # as an agent does, before there are ranks
            node.keeper.fetch(files[0].path, node.address(1), kept.step, 2)
        again = made(mesh, kind, memory_of(mesh, node, events, kept, generation=2, rule=RULES[by]))
        found["copies"] = log.read_text().split().count("_fill")
        same = {(p.name, p.kind, p.start): p.tensor.clone() for p in again.inner.pieces()}
        found["attached"] = again.memory.has_state
        found["as it is"] = mine.keys() == same.keys() and all(torch.equal(mine[key], same[key]) for key in mine)
        mesh.sum([0.0])
        log.write_text("")
        again.inner.resume_after(kept.step)
        step(again, 6, mesh)
        settle(again, mesh)
        found["came on by"], found["holds on"] = log.read_text().split(), node.holds()
        mesh.sum([0.0])
        engine.inner.close()
        again.inner.close()
        return found


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("zero 1", "by the state"),
        ("zero 3", "by gradients"),
        ("zero 1", "by gradients"),
        ("zero 1", "by other kernels"),
    ],
)
def test_the_other_node_has_each_step_and_all_is_there_without_the_first(kind: str, by: str, tmp_path: Path) -> None:
    found = run_ranks(walks, 2, folder=str(tmp_path), kind=kind, by=by)
    for rank, each in enumerate(found):
        assert each["late"]
        assert each["copies"] == (1 if rank == 0 else 0)
        assert each["holds"] == [[rank, [4, 5], False], [1 - rank, [4, 5], True]]
        for what in ("same", "same header", "by coordinates", "attached", "as it is"):
            assert each[what], (rank, what)
        [decided] = [event for event in each["events"] if event["key"] == "resilience.replicate_every"]
        assert decided["value"] == "every_step"
        assert decided["reason"] == f"the state of 2 of 2 ranks is kept on a second node, which gets {HOW[by]}"
        again = by == "by gradients"
        assert each["came by"] == ["_write", *(["_make_again"] * 4 if again else ["_write"] * 4)]
        # Who has it all still makes the next step of it; who has nothing gets that step alone.
        assert each["came on by"] == ["_make_again" if again and rank == 1 else "_write"]
        there = [6] if rank == 0 else [5, 6]
        assert each["holds on"] == [[rank, [5, 6], False], [1 - rank, there, True]]


def goes_back(placement: Placement, folder: str) -> list[Any]:
    """Two steps; then training goes back, and takes another way."""
    node = Node(Path(folder), placement.rank).open()
    with join(placement, 30) as mesh:
        memory = memory_of(mesh, node, [])
        engine = made(mesh, "zero 1", memory)
        for number in (1, 2):
            step(engine, number, mesh)
        settle(engine, mesh)
        memory.discard_previous()
        forgotten = node.holds()
        mesh.sum([0.0])
        engine.inner.resume_after(0)
        for number in (1, 2, 3):
            step(engine, number, mesh)
        settle(engine, mesh)
        ways = [each.way for each in inventory.read_inventory(node.folder, RUN)]
        found = [forgotten, node.holds(), ways]
        mesh.sum([0.0])
        engine.inner.close()
        return found


def test_what_is_forgotten_is_forgotten_on_the_other_node_too(tmp_path: Path) -> None:
    for rank, (forgotten, holds, ways) in enumerate(run_ranks(goes_back, 2, folder=str(tmp_path))):
        assert forgotten == [[rank, [], False], [1 - rank, [], True]]
        assert holds == [[rank, [2, 3], False], [1 - rank, [2, 3], True]]
        assert ways == [] or ways == [1, 1]


# ------------------------------------------------------------------------------------------------------ some steps only


def held(node: Node, number: int | None = None) -> list[StateFileInfo]:
    """What a node has (None: this one), while ranks live."""
    place = node.folder if number is None else node.folder.with_name(f"node-{number}")
    own = [inventory.make_file_info(facts) for facts in inventory.read_state_files(place, RUN)]
    of_others = inventory.read_state_files(place / inventory.REPLICAS, RUN)
    return own + [inventory.make_file_info(facts, replica=True) for facts in of_others]


def kept_of(node: Node, nodes: list[int]) -> InMemoryCheckpoint:
    """What is gone on from where these nodes are left."""
    choice = choose_restore_point({number: held(node, number) for number in nodes})
    assert choice is not None
    files = []
    for rank, (number, each) in sorted(choice.files.items()):
        name, here = inventory.state_file_path(each), number == node.number
        path = str(node.folder / name) if here else name
        files.append(StateFileLocation(rank, path, each.layout, None if here else node.address(number)))
    return InMemoryCheckpoint(choice.step, tuple(files))


def some_steps(placement: Placement, folder: str) -> dict[str, Any]:
    """The other node gets every third step. A rank dies behind step 8, and node 1 is lost behind step 10."""
    node, events = Node(Path(folder), placement.rank).open(), list[Any]()
    found: dict[str, Any] = {}

    def holds() -> list[Any]:
        return [[each.rank, list(each.steps), each.replica] for each in held(node)]

    def kept(nodes: list[int]) -> InMemoryCheckpoint:
        return kept_of(node, nodes)

    def begun(mesh: Mesh, generation: int, kept: InMemoryCheckpoint | None = None) -> Any:
        options: dict[str, Any] = {"rule": RULES["by gradients"], "replicate": 3, "generation": generation}
        engine = made(mesh, "zero 1", memory_of(mesh, node, events, kept, **options))
        if kept is not None:
            engine.inner.resume_after(kept.step)
            engine.memory.replicas.wait_for_ack()
        settle(engine, mesh)
        return engine

    def state(engine: Any) -> dict[Any, torch.Tensor]:
        return {(p.name, p.kind, p.start): p.tensor.clone() for p in engine.inner.pieces()}

    with join(placement, 30) as mesh:
        first = begun(mesh, 1)
        for number in range(1, 9):
            step(first, number, mesh)
        settle(first, mesh)
        found["behind 8"] = holds()
        mesh.sum([0.0])
        second = begun(mesh, 2, kept([0, 1]))
        found["again at 8"] = [second.memory.has_state, holds()]
        states = {}
        for number in (9, 10):
            step(second, number, mesh)
            settle(second, mesh)
            states[number] = state(second)
        found["behind 10"] = holds()
        mesh.sum([0.0])
        back = kept([0])
        mesh.sum([0.0])
        if placement.rank == 1:  # a spare has nothing of all that
            for path in [
                *inventory.list_state_files(node.folder),
                *inventory.list_state_files(node.folder / inventory.REPLICAS),
            ]:
                path.unlink()
        mesh.sum([0.0])
        third = begun(mesh, 3, back)
        found["back at"] = [back.step, third.memory.has_state, holds()]
        found["same"] = [_alike(state(third), states[9])]
        step(third, 10, mesh)
        settle(third, mesh)
        found["same"].append(_alike(state(third), states[10]))
        found["in the end"] = holds()
        found["said"] = [event for event in events if event["key"] == "resilience.replicate_every"]
        mesh.sum([0.0])
        for engine in (first, second, third):
            engine.inner.close()
    return found


def _alike(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_every_third_step_is_on_the_other_node_and_all_can_go_back_to_it(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(some_steps, 2, folder=str(tmp_path))):
        other = 1 - rank
        assert found["behind 8"] == [[rank, [6, 7, 8], False], [other, [3, 6], True]]
        # Who goes on at once still has what a lost node would take all back to, and sends nothing.
        assert found["again at 8"] == [True, [[rank, [6, 8], False], [other, [3, 6], True]]]
        assert found["behind 10"] == [[rank, [8, 9, 10], False], [other, [6, 9], True]]
        # The spare's replica is new: it gets the step behind that, and what is waited for has the link for itself.
        there = [6, 9] if rank == 0 else []
        assert found["back at"] == [9, True, [[rank, [9], False], [other, there, True]]]
        there = [9, 10] if rank == 0 else [10]
        assert found["same"] == [True, True]
        assert found["in the end"] == [[rank, [9, 10], False], [other, there, True]]
        assert [event["value"] for event in found["said"]] == [3]
        assert "every 3 steps, where it takes " in found["said"][0]["reason"]
        assert "a lost node costs at most 2 committed steps" in found["said"][0]["reason"]


# ------------------------------------------------------------------------------------------------------ what goes wrong


def decided(placement: Placement, folder: str, replicate: int | str, room: int | None) -> list[Any]:
    """What came of an attempt to replicate; the second node has no more room than that."""
    events: list[Any] = []
    node = Node(Path(folder), placement.rank, room=room if placement.rank == 1 else None).open()
    with join(placement, 30) as mesh:
        memory = memory_of(mesh, node, events, replicate=replicate)
        try:
            engine = made(mesh, "zero 1", memory)
        except PhalanxError as error:
            return [type(error).__name__, str(error)]
        step(engine, 1, mesh)
        settle(engine, mesh)
        said = [[event["value"], event["reason"]] for event in events if event["key"] == "resilience.replicate_every"]
        found = [node.holds(), said, memory.commits_async]
        mesh.sum([0.0])
        engine.inner.close()
        return found


def replicates(folder: Path, replicate: int | str) -> list[list[int] | None]:
    """Which steps nodes hold of each other's ranks behind the first one; None: they hold no replica."""
    found = run_ranks(decided, 2, folder=str(folder), replicate=replicate, room=None)
    return [next((steps for _, steps, replica in holds if replica), None) for holds, _, _ in found]


def test_where_there_is_no_room_the_run_does_without_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "auto").mkdir()
    found = run_ranks(decided, 2, folder=str(tmp_path / "auto"), replicate="auto", room=50_000)
    for rank, (holds, said, late) in enumerate(found):
        assert holds == [[rank, [1], False]]  # and nothing is left of what one of them had made room for
        assert not late
        assert said[0][0] == "off"
        assert said[0][1].startswith("losing a node takes the run back to a checkpoint: ")
    assert "has no room for" in found[0][1][0][1]
    for asked in ("every_step", 4):
        place = tmp_path / str(asked)[:2]  # a socket's path may not be long
        place.mkdir()
        found = run_ranks(decided, 2, folder=str(place), replicate=asked, room=50_000)
        assert [name for name, _ in found] == ["ConfigError"] * 2
        assert f"resilience.replicate_every is {asked}, but" in found[0][1]
        assert "bytes of a replica (File too large)" in found[0][1]


def divided_anew(placement: Placement, folder: str) -> list[Any]:
    """Two steps; then ranks hold other parts of the state than before, where there is room for two files alone."""
    place, events = Path(folder) / f"node-{placement.rank}", list[Any]()

    def room(path: Any) -> Any:
        """As /dev/shm would be, of which these files are all; so many as `room` says fit, once that is there."""
        files = [*inventory.list_state_files(place), *inventory.list_state_files(place / inventory.REPLICAS)]
        told, taken = place / "room", [file.stat().st_size for file in files]
        free = int(float(told.read_text()) * max(taken)) - sum(taken) if told.exists() else 1 << 30
        return SimpleNamespace(f_bavail=max(0, free), f_frsize=1)

    os.statvfs = room  # type: ignore[assignment]
    meshes.this_host = lambda: f"node {placement.rank}"  # each with memory of its own
    node = Node(Path(folder), placement.rank).open()
    options: dict[str, Any] = {"wanted": True, "replicate": "every_step"}
    with join(placement, 30) as mesh:
        first = made(mesh, "zero 1", memory_of(mesh, node, events, **options))
        for number in (1, 2):
            step(first, number, mesh)
        settle(first, mesh)
        kept = kept_of(node, [0, 1])
        mesh.sum([0.0])
        (place / "room").write_text("2.5")
        mesh.sum([0.0])
        second = made(mesh, "uneven", memory_of(mesh, node, events, kept, generation=2, **options))
        shapes = {name: tuple(parameter.shape) for name, parameter in first.inner.model.named_parameters()}
        source = InMemoryCheckpointReader(kept, shapes, second.memory.replicas)
        second.inner.load(source.read_into)
        second.inner.resume_after(kept.step)
        second.memory.remove_other_files()
        step(second, 3, mesh)
        settle(second, mesh)
        found: list[Any] = [second.memory.has_state, second.memory.commits_async]
        found += [[[each.generation, each.rank, list(each.steps), each.replica] for each in held(node)]]
        found += [[event["value"] for event in events if event["key"] == "resilience.replicate_every"]]
        mesh.sum([0.0])
        first.inner.close()
        second.inner.close()
        return found


def test_what_is_only_kept_to_be_gone_on_with_takes_no_room_from_another_division(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(divided_anew, 2, folder=str(tmp_path))):
        there = [[2, rank, [2, 3], False], [2, 1 - rank, [3], True]]
        assert found == [False, True, there, ["every_step", "every_step"]]


def lies(placement: Placement, folder: str) -> list[Any]:
    """A rank says another learning rate of its third step than that which it took."""
    node = Node(Path(folder), placement.rank).open()
    told = SharedGradients.to_message

    def lied(self: SharedGradients) -> dict[str, Any]:
        said = told(self)
        return said | {"lr": 0.5} if said["step"] == 3 and placement.rank == 0 else said

    SharedGradients.to_message = lied  # type: ignore[method-assign]
    with join(placement, 10) as mesh:
        engine = made(mesh, "zero 1", memory_of(mesh, node, [], rule=RULES["by gradients"]))
        said = "nothing"
        try:
            for number in range(1, 6):
                step(engine, number, mesh)
            engine.keeper_settles()
        except (PhalanxError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    wait_until(lambda: next(steps for _, steps, replica in node.holds() if replica) != [2, 3], 5)
    return [said, next(steps for _, steps, replica in node.holds() if replica)]


def test_an_update_that_came_to_something_else_is_no_replica(tmp_path: Path) -> None:
    found = run_ranks(lies, 2, folder=str(tmp_path))
    why = "CollectiveError: state could not be replicated to another node (the recomputed update of step 3"
    assert why in found[0][0]
    assert 3 not in found[1][1] and 2 in found[1][1]  # node 1 holds the replica of rank 0


def loses_its_keeper(placement: Placement, folder: str, whose: int) -> str:
    """A keeper is killed between two steps."""
    node = Node(Path(folder), placement.rank).open()
    with join(placement, 10) as mesh:
        memory = memory_of(mesh, node, [])
        engine = made(mesh, "zero 1", memory)
        step(engine, 1, mesh)
        settle(engine, mesh)
        if placement.rank == whose:
            os.kill(node.keeper.pid, signal.SIGKILL)
            os.waitpid(node.keeper.pid, 0)
        mesh.sum([0.0])
        try:
            for number in (2, 3):
                step(engine, number, mesh)
            engine.keeper_settles()
        except (PhalanxError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.parametrize("whose", [0, 1])
def test_a_keeper_that_dies_ends_the_attempt_with_a_reason(whose: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    found = run_ranks(loses_its_keeper, 2, folder=str(tmp_path), whose=whose)
    assert time.monotonic() - begun < 40
    assert "CollectiveError: this node's replica process is gone" in found[whose]
    assert "nothing" not in found


def knocks(placement: Placement, folder: str) -> list[Any]:
    """One that does not know the secret, and one that does and asks for what is none of its business."""
    node = Node(Path(folder), 0)
    other = Path(folder) / "other"
    other.mkdir()
    stranger, friend = Node(other, 1, secret="another"), Node(other, 0)
    node.open()
    file = state_file.create_state_file(
        node.folder, state_file.StateFileOwner(1, 0, 1, RUN, 0, 1), {"tensors": [], "pieces": []}, 16
    )
    (node.folder / "private").write_text("private")
    (node.folder / state_file.state_file_name(7, 0)).symlink_to("/etc/passwd")
    found: list[Any] = []
    for who, name, at, count in (
        (stranger, file.metadata.path.name, 0, 8), (friend, file.metadata.path.name, 0, 8),
        (friend, "private", 0, 7),
        (friend, "../other/port-0", 0, 1), (friend, "/etc/passwd", 0, 8),
        (friend, state_file.state_file_name(7, 0), 0, 8),
        (friend, file.metadata.path.name, 0, 1 << 40), (friend, file.metadata.path.name, -8, 8),
    ):  # fmt: skip
        replicas = ReplicaClient(who.folder, 0, 1, None, 1, 5.0)
        try:
            found.append(replicas.read_bytes(node.address(0), name, at, min(count, 1 << 20)).decode(errors="replace"))
        except PhalanxError as error:
            found.append(type(error).__name__)
    return [found, node.refused]


def test_only_state_files_are_read_and_by_those_alone_who_know_the_secret(tmp_path: Path) -> None:
    [[found, refused]] = run_ranks(knocks, 1, folder=str(tmp_path))
    assert found == ["CollectiveError", "phlxmem\0", *["CollectiveError"] * 6]
    assert refused == ["it does not know the secret"]


def breaks_off(placement: Placement, folder: str) -> list[Any]:
    """A sender that dies in the middle of a step, or sends something else than it says."""
    node = Node(Path(folder), 0).open()
    index: dict[str, Any] = {"tensors": [], "pieces": []}
    found = []
    for damaged in (False, True):
        connection = connect_and_greet(node.address(0), SECRET, {"role": ROLE, "attempt": 1}, 5.0)
        form = {"who": [1, 0, 1, 0, 1], "way": 0, "index": index, "slot_bytes": 8192, "asked": True}
        send_frame(connection, {"keep": form})
        found.append(receive_frame(connection)["steps"])
        for number, data in ((5, b"5" * 8192), (6, b"6" * 8192)):
            send_frame(connection, {"write": number, "header": json.dumps({"step": number})})
            whole = number == 5 or damaged
            connection.sendall(data if whole else data[:4096])
            if whole:
                send_frame(connection, {"sum": zlib.crc32(data) + (number == 6)})
                found.append(receive_frame(connection))
        connection.close()
        wait_until(lambda: node.holds() == [[0, [5], True]], 5)
    # A rank goes on from a step before that: what is behind it is walked again.
    connection = connect_and_greet(node.address(0), SECRET, {"role": ROLE, "attempt": 2}, 5.0)
    send_frame(connection, {"keep": form | {"newest": 4}})
    found += [receive_frame(connection)["steps"], node.holds()]
    return found


def test_what_is_torn_or_damaged_on_its_way_is_not_there(tmp_path: Path) -> None:
    [found] = run_ranks(breaks_off, 1, folder=str(tmp_path))
    assert found == [[], {"kept": 5}, [5], {"kept": 5}, {"kept": 6}, [], [[0, [], True]]]
