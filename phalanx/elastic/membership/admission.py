"""Admission of nodes to a job, at its rendezvous and later: what one says of itself to the one that leads, whether it
fits, and who has a number that two claim."""

import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from phalanx.core.records import EventKind
from phalanx.core.run_paths import redact_url
from phalanx.elastic.membership import messages
from phalanx.elastic.membership.channel import Channel, Message


def _device(row: list[Any]) -> list[Any]:
    if len(row) < 3 or not all(isinstance(value, kind) for value, kind in zip(row, (str, str, bool), strict=False)):
        raise ValueError("a device is no name, model and whether it has bf16")
    messages.check_printable(row[0] + row[1])
    return row


class _At(messages.MessagePart):
    token: messages.Token
    address: messages.Address
    port: messages.Port
    beats: messages.Port


class _Hello(messages.MessagePart):
    role: Literal["node"]
    node: messages.Node
    nodes: messages.Ranks
    host: messages.Name
    pid: messages.Count
    devices: list[Annotated[list[Any], AfterValidator(lambda row: _device(row))]]
    versions: dict[messages.Name, messages.Name]
    recipe: dict[messages.Name, Any]
    at: _At | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "_Hello":
        if self.devices and self.at is None:  # nodes that only look at each other have none, and are no members
            raise ValueError("it does not say where it is called")
        return self


def make_hello(node: int, nodes: int, devices: list[Any], versions: Message, recipe: Message) -> Message:
    """What a node says of itself: `devices` has name, model and bf16 of each rank; `nodes` counts spares too."""
    return {
        "role": "node", "node": node, "nodes": nodes, "host": platform.node(), "pid": os.getpid(), "devices": devices,
        "versions": versions, "recipe": recipe,
    }  # fmt: skip


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A recipe as dotted keys and values, as a hello has it."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_mismatch(hello: Message, leader: Message, to_node_0: bool) -> str | None:
    """Why a node cannot take part with the one whose hello is `leader`, as a sentence for its user.

    `to_node_0`: whether that is node 0 at the first meeting, whose number nobody else may have.
    """
    if (wrong := messages.find_schema_problem(_Hello, hello)) is not None:
        return f"a node sent a greeting that makes no sense ({wrong}); use the same version of Phalanx on all nodes"
    if leader["devices"] and not hello["devices"]:
        return (
            "a node sent a greeting that makes no sense (devices: none); use the same version of Phalanx on all nodes"
        )
    node, host, nodes = hello["node"], hello["host"], hello["nodes"]
    versions, recipe, devices = hello["versions"], hello["recipe"], hello["devices"]
    kinds = {kind_of(device) for device in [*devices, *leader["devices"]]}
    who, there = f"node {node} ({host})", f"node {leader['node']}"
    if nodes != leader["nodes"]:
        return f"--nodes is {nodes} on {who} and {leader['nodes']} on {there}; give all nodes the same number"
    if not (node > 0 if to_node_0 else node >= 0) or node >= nodes:
        return f"{host} wants to be node {node} of {nodes}; give it a --node-rank that is not taken"
    for name, version in leader["versions"].items():
        if versions.get(name) != version:
            theirs = versions.get(name, "missing")
            return f"{name} is {theirs} on {who} and {version} on {there}; install the same version on all nodes"
    different = [key for key in sorted({*recipe, *leader["recipe"]}) if recipe.get(key) != leader["recipe"].get(key)]
    if different:
        both = [(key, redact(recipe.get(key)), redact(leader["recipe"].get(key))) for key in different[:3]]
        said = "; ".join(f"{key} is {theirs!r} on {who} and {here!r} on {there}" for key, theirs, here in both)
        return f"{said}; start all nodes with the same recipe and the same keys"
    if len(kinds) > 1:
        return (
            f"{who} trains on {kind_of(devices[0])} and {there} on {kind_of(leader['devices'][0])}, between which "
            "nothing can be exchanged; hide the accelerators of all nodes, or of none"
        )
    return None


def receive_messages(channel: Channel) -> Iterator[messages.MessageRecord]:
    """What the other side of a meeting has said since the last call; who asks whether this one is there is answered,
    and who sends nonsense, or does not answer itself, is lost."""
    for message in channel.receive():
        try:
            record = messages.parse_message(message)
        except ValueError as error:
            channel.close(str(error))
            break
        if isinstance(record, messages.PingMessage):
            channel.send({"pong": True})
        else:
            yield record
    channel.check_alive()


def find_changed_devices(hello: Message, offered: Mapping[int, Message]) -> str | None:
    """Why a node cannot come back to a meeting where a job was `offered` to nodes that said these, by number."""
    node, devices = hello["node"], hello["devices"]
    if node not in offered or offered[node]["devices"] == devices:
        return None
    has, had = (_ranks(each) for each in (devices, offered[node]["devices"]))
    return (
        f"node {node} ({hello['host']}) has {has} now, and the job was started with {had} there; start it as before, "
        "or stop the job and start all nodes again"
    )


def _ranks(devices: list[Any]) -> str:
    models = ", ".join(sorted({str(device[1]) for device in devices}))
    return f"{len(devices)} rank{'s' if len(devices) > 1 else ''} on {models}"


def can_start_without(node: int, unfit: Collection[int], here: Collection[int], spares: int) -> bool:
    """Whether a job that has so many spares begins without a node that is not fit: `unfit` are those of which that is
    known already, `here` the nodes but node 0, of which one has to be left."""
    return len(unfit) < spares and bool(set(here) - set(unfit) - {node})


class Admission:
    """Takes callers who want to be nodes of a job, each under its number.

    `find_objection(hello)` says why one cannot be; `find_holder(node)`, in words, who has a number already. A number
    that is held may be that very node's, started again, while the holder is gone without a word: so `challenge(node)`
    says until when the holder may be found dead, or None for not yet. `accept` gets who is taken; `notice(details)`
    hears who is refused, who has `linger_s` to hear why."""

    def __init__(
        self,
        find_objection: Callable[[Message], str | None],
        find_holder: Callable[[int], str | None],
        challenge: Callable[[int], float | None],
        accept: Callable[[Channel, Message], None],
        notice: Callable[[str, dict[str, Any]], None],
        linger_s: float,
    ) -> None:
        self._find_objection, self._find_holder, self._challenge = find_objection, find_holder, challenge
        self._accept, self._notice, self._linger_s = accept, notice, linger_s
        self.waiting: list[tuple[Channel, Message, float | None]] = []  # for a number, until its holder is believed

    def descriptors(self) -> dict[int, int]:
        """What poll() has to look at, and for what."""
        return {channel.fileno(): channel.awaits for channel, _, _ in self.waiting if channel.lost is None}

    def greet(self, channel: Channel, hello: Message) -> None:
        """Take a caller, refuse it, or have it wait."""
        if (wrong := self._find_objection(hello)) is not None:
            self._refuse(channel, wrong)
        elif self._find_holder(hello["node"]) is None:
            self._accept(channel, hello)
        else:
            self.waiting.append((channel, hello, self._challenge(hello["node"])))

    def poll_once(self) -> None:
        """Look again at those who wait."""
        waiting, self.waiting = self.waiting, []
        for channel, hello, until in waiting:
            holder = self._find_holder(hello["node"])
            until = self._challenge(hello["node"]) if until is None else until
            if holder is None:
                self.greet(channel, hello)
            elif until is None or time.monotonic() < until:
                self.waiting.append((channel, hello, until))
            else:
                self._refuse(channel, explain_taken_rank(hello["node"], holder, hello))

    def confirm(self, node: int) -> None:
        """The holder of a number has answered: it has that for good."""
        self.waiting = [(channel, hello, 0.0 if hello["node"] == node else at) for channel, hello, at in self.waiting]

    def close(self, last: Message | None = None) -> None:
        """Send those who wait away, with a last word."""
        for channel, _, _ in self.waiting:
            if last is not None:
                channel.send_and_close(last, "the job is over", timeout_s=self._linger_s)
            channel.close("this node has left")
        self.waiting = []

    def _refuse(self, channel: Channel, why: str) -> None:
        self._notice(EventKind.WARNING, {"message": why})
        channel.send_and_close({"refused": why}, "it was refused", timeout_s=self._linger_s)


def kind_of(device: list[Any]) -> str:
    """The kind of a device of a hello: "cpu", or an accelerator's."""
    return str(device[0]).partition(":")[0]


def explain_taken_rank(node: int, holder: str, claimant: Message) -> str:
    """What to say to the second of two that have the same number."""
    return (
        f"process {claimant['pid']} on {claimant['host']} says it is node {node}, which {holder} is already; give each "
        "node a --node-rank of its own"
    )


def explain_flood(host: str, node: int) -> str:
    """What to say of strangers who call again and again."""
    return (
        f"connections from {host} keep coming to node {node} without the job's secret; they are closed, and the job "
        "goes on: find out what runs there, or keep it from the ports of the nodes by a firewall"
    )


def redact(value: Any) -> Any:
    """A value of a recipe as others may read it: without what is secret in a URL."""
    if isinstance(value, dict):
        return {key: redact(each) for key, each in value.items()}
    if isinstance(value, list):
        return [redact(each) for each in value]
    return redact_url(value) if isinstance(value, str) else value
