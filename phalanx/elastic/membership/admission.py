"""Admission of nodes to a job, at its rendezvous and later: the handshake's hello, and whether a node fits."""

import os
import platform
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from phalanx.core.run_paths import redact_url
from phalanx.elastic.membership import messages
from phalanx.elastic.membership.channel import Channel, Message


def _device(row: list[Any]) -> list[Any]:
    if len(row) < 3 or not all(isinstance(value, kind) for value, kind in zip(row, (str, str, bool), strict=False)):
        raise ValueError("a device is not a name, a model and a bf16 flag")
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
        if self.devices and self.at is None:  # nodes of a health check have none, and are no members
            raise ValueError("it gives no address")
        return self


def make_hello(node: int, nodes: int, devices: list[Any], versions: Message, recipe: Message) -> Message:
    """The greeting of a node: `devices` has name, model and bf16 of each rank; `nodes` counts spares too."""
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
    """Why a node does not fit the node whose hello is `leader`, as a sentence for its user.

    `to_node_0`: whether that is node 0 at the rendezvous, whose number no other node may have.
    """
    if (wrong := messages.find_schema_problem(_Hello, hello)) is not None:
        return f"a node sent an invalid greeting ({wrong}); use the same version of Phalanx on all nodes"
    if leader["devices"] and not hello["devices"]:
        return "a node sent an invalid greeting (devices: none); use the same version of Phalanx on all nodes"
    node, host, nodes = hello["node"], hello["host"], hello["nodes"]
    versions, recipe, devices = hello["versions"], hello["recipe"], hello["devices"]
    kinds = {kind_of(device) for device in [*devices, *leader["devices"]]}
    who, there = f"node {node} ({host})", f"node {leader['node']}"
    if nodes != leader["nodes"]:
        return f"--nodes is {nodes} on {who} but {leader['nodes']} on {there}; give all nodes the same number"
    if not (node > 0 if to_node_0 else node >= 0) or node >= nodes:
        return f"{host} asks to be node {node} of {nodes}; give it an unused --node-rank"
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
            f"{who} trains on {kind_of(devices[0])} and {there} on {kind_of(leader['devices'][0])}, which cannot "
            "communicate; hide the accelerators on all nodes, or on none"
        )
    return None


def receive_messages(channel: Channel) -> Iterator[messages.MessageRecord]:
    """Receive messages at the rendezvous since the last call. Pings are answered; a sender of invalid messages, or one
    that does not answer, is lost."""
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
    """Why a node cannot rejoin a rendezvous where a job was `offered` to nodes with these greetings, by number."""
    node, devices = hello["node"], hello["devices"]
    if node not in offered or offered[node]["devices"] == devices:
        return None
    has, had = (_ranks(each) for each in (devices, offered[node]["devices"]))
    return (
        f"node {node} ({hello['host']}) has {has} now, and the job was started with {had} there; start it as before, "
        "or stop the job and restart all nodes"
    )


def _ranks(devices: list[Any]) -> str:
    models = ", ".join(sorted({str(device[1]) for device in devices}))
    return f"{len(devices)} rank{'s' if len(devices) > 1 else ''} on {models}"


def kind_of(device: list[Any]) -> str:
    """The kind of a device of a hello: "cpu", or an accelerator's."""
    return str(device[0]).partition(":")[0]


def explain_taken_rank(node: int, holder: str, claimant: Message) -> str:
    """The refusal of the second of two nodes with the same number."""
    return (
        f"process {claimant['pid']} on {claimant['host']} claims to be node {node}, but {holder} already is; give "
        "each node its own --node-rank"
    )


def explain_flood(host: str, node: int) -> str:
    """The warning about repeated connections without the secret."""
    return (
        f"connections from {host} keep reaching node {node} without the job's secret; they are closed and the job "
        "continues: find out what runs there, or block it with a firewall"
    )


def redact(value: Any) -> Any:
    """A value of a recipe without the secrets of URLs."""
    if isinstance(value, dict):
        return {key: redact(each) for key, each in value.items()}
    if isinstance(value, list):
        return [redact(each) for each in value]
    return redact_url(value) if isinstance(value, str) else value
