"""Starting a run on several nodes that no scheduler ties together: one command on each, which meet by themselves.

Node 0 resolves the recipe, prepares its data and tells the others what came of it; each of them checks that it sees the
same run folder and the same data before the first step. The rules of meeting are in `cluster/`.
"""

import contextlib
import functools
import json
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import yaml
from rich.text import Text

import phalanx
from phalanx import ending, launch, mirror, recipe, storage
from phalanx.cluster import agent, other_node, rendezvous
from phalanx.cluster.first_node import FirstNode, own_hello
from phalanx.cluster.fork import fork_call
from phalanx.cluster.job import Job, Others, Part
from phalanx.cluster.other_node import OtherNode
from phalanx.cluster.rendezvous import Place, look_again
from phalanx.cluster.stopping import StopAsked, stoppable
from phalanx.config import Config
from phalanx.devices import Device, devices_of_ranks, warmed
from phalanx.errors import ConfigError, PhalanxError, RunError
from phalanx.launch import Nodes, Prepared
from phalanx.records import BASE_WEIGHTS, ExitCode, Kind, RunPaths, write_atomic
from phalanx.remote_run import fetch_records, mirrored
from phalanx.report import words
from phalanx.report.terminal import open_terminal

TIMEOUT_S = 600.0
WEIGHTS = "model.from_hf"  # what a new run begins with: each rank reads its own part of it
SEEN_S = 3.0  # what a network file system gets to show what another node has just written


@dataclass(frozen=True)
class Meeting:
    """What the command line says of a job on several nodes."""

    nodes: int
    node: int
    place: Place
    timeout_s: float
    quiet: bool = False  # whether nothing is said on the way


def meeting(
    nodes: int | None, node: int | None, where: str | None, timeout_s: float | None, environment: Mapping[str, str]
) -> Meeting | None:
    """Check the options that belong together; None for a run on one node. Raises ConfigError."""
    if nodes is None:
        given = {"--node-rank": node, "--rendezvous": where, "--rendezvous-timeout": timeout_s}
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise ConfigError(f"{alone[0]} belongs to a run on several nodes; give --nodes too, or leave it out")
        return None
    if nodes == 1:
        raise ConfigError("--nodes 1 is a run on one node, which needs no rendezvous; leave --nodes out")
    if node is None:
        raise ConfigError(f"--nodes {nodes} needs --node-rank, which of them this one is: 0 to {nodes - 1}")
    if node >= nodes:
        raise ConfigError(f"--node-rank {node} is not one of {nodes} nodes; give a number from 0 to {nodes - 1}")
    if where is None:
        raise ConfigError(
            f"--nodes {nodes} needs --rendezvous, where the nodes meet: tcp://HOST:PORT of node 0, or file:///FOLDER "
            "that all nodes share"
        )
    return Meeting(nodes, node, rendezvous.place_of(where, environment), timeout_s or TIMEOUT_S)


def train(
    wanted: Config,
    paths: RunPaths,
    ranks: int | None,
    meeting: Meeting,
    environment: Mapping[str, str],
    on_cpu: bool = False,
) -> int:
    """Train as one of several nodes. Returns the exit code, as `launch.train` does; raises PhalanxError for what a user
    can mend, on whichever node it was found."""
    try:
        with stoppable():
            found, accelerators = warmed(on_cpu)
        devices = devices_of_ranks(found, accelerators, ranks)
        run = _lead if meeting.node == 0 else _follow
        return run(wanted, paths, devices, meeting)
    except StopAsked as asked:
        open_terminal().print(ending.stopped_early(paths, str(asked)))
        return ExitCode.STOPPED


def hello(
    wanted: Config, devices: Sequence[Device], meeting: Meeting, command: str = "phalanx train"
) -> dict[str, Any]:
    """What this node says of itself; nodes that were started by unlike commands do not fit, nor by unlike recipes."""
    rows = [[device.name, device.model, device.bf16] for device in devices]
    versions = {"phalanx": phalanx.__version__, "torch": version("torch")}
    asked = {"the command": command, **dict(_flat(wanted.model_dump(mode="json")))}
    return own_hello(meeting.node, meeting.nodes, rows, versions, asked)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _say(meeting: Meeting, text: str) -> None:
    if not meeting.quiet:
        open_terminal().print(Text(f"node {meeting.node} of {meeting.nodes}: {text}"), soft_wrap=True)


def _show(meeting: Meeting, kind: str, details: dict[str, Any]) -> None:
    _say(meeting, words.sentence({"kind": kind, **details}))


def wait(others: Others, until: Callable[[], bool]) -> None:
    """Let others be heard until something holds."""
    others.tend()
    while not until():
        poll = select.poll()
        for descriptor, events in others.descriptors().items():
            poll.register(descriptor, events)
        poll.poll(100)
        others.tend()


# -------------------------------------------------------------------------------------------------------------- node 0


def _lead(wanted: Config, paths: RunPaths, devices: Sequence[Device], meeting: Meeting) -> int:
    from phalanx.train import folder

    with contextlib.ExitStack() as held:
        with stoppable():
            held.enter_context(folder.opened(paths))
            held.enter_context(mirrored(paths))
            first = held.enter_context(hosted(meeting, hello(wanted, devices, meeting)))
            tend = hearing(first)
            gather(first, meeting, tend)
            if (done := launch.finished(wanted, paths)) is not None:
                first.finish(done, "the run is complete already")
                return done
            nodes = everywhere(first)
            world = len(nodes.devices)
            prepared = launch.prepare(
                wanted,
                paths,
                devices,
                world,
                len(devices),
                writes=True,
                elsewhere=nodes.devices[len(devices) :],
                meanwhile=tend,
            )
            offer(first, held.enter_context(_offering(wanted, prepared, paths, first)), tend)
        code = launch.run_ranks(prepared, paths, devices, nodes)
        first.finish(code, _ending(code, paths))
        return code


def hearing(first: FirstNode) -> Callable[[], None]:
    """A function that hears the other nodes; it raises StopAsked once one of them was asked to stop."""

    def tend() -> None:
        first.tend()
        if first.asked is not None:
            raise StopAsked(first.asked)

    return tend


def offer(first: FirstNode, what: Callable[[int], dict[str, Any]], tend: Callable[[], None]) -> None:
    """Tell each node `what(node)` says, and wait until all are ready. Raises as `FirstNode.ready`."""
    first.offer(what)
    while not first.ready():
        _look(first, tend)


def gather(first: FirstNode, meeting: Meeting, tend: Callable[[], None]) -> None:
    """Wait until all nodes are there; `tend` hears them. Raises as `FirstNode.arrived`."""
    said: list[int] = []
    while not first.arrived():
        if first.missing() != said:
            said = first.missing()
            names = f"node{'s' if len(said) > 1 else ''} {', '.join(map(str, said))}"
            _say(meeting, f"waiting for {names} at {meeting.place.text}, for {meeting.timeout_s:g} s at most")
        _look(first, tend)


def _look(first: FirstNode, tend: Callable[[], None]) -> None:
    poll = select.poll()
    for descriptor, events in first.descriptors().items():
        poll.register(descriptor, events)
    poll.poll(100)
    tend()


@contextlib.contextmanager
def hosted(meeting: Meeting, hello: dict[str, Any]) -> Iterator[FirstNode]:
    """Node 0, to be found by the others. However it ends, they are told, and nothing stays behind."""
    place = meeting.place
    if place.folder is not None:
        there = rendezvous.read_address(place.folder)
        if there is not None and other_node.is_there(there):
            raise RunError(
                f"the rendezvous folder {place.folder} is used by another job, whose node 0 is process "
                f"{there.process}; give each job a folder of its own, or stop that one"
            )
    with contextlib.ExitStack() as held:
        listener = rendezvous.listen(place)
        held.callback(listener.close)
        address: rendezvous.Address | str = place.secret
        if place.folder is not None:
            address = rendezvous.new_address(listener)
            made = rendezvous.publish(place.folder, address)
            held.callback(rendezvous.withdraw, place.folder, address, made)
        show = functools.partial(_show, meeting)
        first = FirstNode(meeting.nodes, listener, address, place.folder, hello, meeting.timeout_s, show)
        try:
            yield first
        except StopAsked as asked:
            first.finish(ExitCode.STOPPED, f"node 0 was stopped by {asked} before the ranks were started")
            raise
        except PhalanxError as error:
            first.finish(error.exit_code, str(error))
            raise
        except BaseException as error:
            first.finish(ExitCode.FAILED, f"node 0 failed: {type(error).__name__}: {error}")
            raise


def everywhere(first: FirstNode) -> Nodes:
    """What all nodes have said of themselves. All must be there."""
    hellos = first.hellos()
    devices = [Device(*row) for said in hellos for row in said["devices"]]
    return Nodes(Part(0, 0, len(devices), first.interface()), first, devices, [said["host"] for said in hellos])


def config_for_all(wanted: Config, prepared: Prepared) -> str:
    """The resolved configuration as YAML, but for what was `auto` and follows from memory: each node looks at its own,
    and the ranks agree."""
    of_memory = ("train.micro_batch", "parallel.zero", "parallel.reduce", "memory.activations")
    own = {key: "auto" for key in of_memory if recipe.get(wanted, key) == "auto"}
    return recipe.to_yaml(recipe.update(prepared.config, own))


@contextlib.contextmanager
def _offering(
    wanted: Config, prepared: Prepared, paths: RunPaths, first: FirstNode
) -> Iterator[Callable[[int], dict[str, Any]]]:
    """What node 0 tells each node; the sign by which they know the run folder is there as long."""
    counts = [len(said["devices"]) for said in first.hellos()]
    told = {
        "config": config_for_all(wanted, prepared),
        "sign": None if paths.url is not None else secrets.token_hex(8),
        "data": json.loads(paths.data.read_text(encoding="utf-8")),
        "weights": prepared.weights,
        "world": sum(counts),
    }
    if told["sign"] is not None:
        write_atomic(paths.sign, str(told["sign"]))
    try:
        yield lambda node: told | {"first_rank": sum(counts[:node])}
    finally:
        paths.sign.unlink(missing_ok=True)


def _ending(code: int, paths: RunPaths) -> str:
    if code == ExitCode.DONE:
        return "the run is done"
    if code == ExitCode.STOPPED:
        return "the run was stopped; the same commands go on with it"
    return f"the run failed (exit code {code}); node 0 and {paths.shown} say why"


# --------------------------------------------------------------------------------------------------------- other nodes


class _Changed(Exception):
    """Node 0 has gone, or has ended the job, while this node was preparing its part."""


def _follow(wanted: Config, paths: RunPaths, devices: Sequence[Device], meeting: Meeting) -> int:
    def make(node: OtherNode, tend: Callable[[], None]) -> Job:
        return _job(node, paths, devices, meeting, tend)

    return take_part(hello(wanted, devices, meeting), meeting, make)


def take_part(said: dict[str, Any], meeting: Meeting, make: Callable[[OtherNode, Callable[[], None]], Job]) -> int:
    """Be another node than node 0, which hears `said` of this one, until the job is over. `make` makes what runs here
    of what node 0 has offered; it calls the function that it is given all the time.

    Returns the exit code. Raises StopAsked, and PhalanxError where node 0 does not come or this node cannot take part.
    """
    while True:
        with stoppable():
            node = other_node.seek(meeting.place, said, meeting.timeout_s, functools.partial(_say, meeting))
        with contextlib.closing(node):
            code = _take_part(node, meeting, make)
        if code is not None:
            return code
        _say(
            meeting, f"node 0 was lost ({node.lost}); waiting for it to come back, for {meeting.timeout_s:g} s at most"
        )


def _take_part(node: OtherNode, meeting: Meeting, make: Callable[[OtherNode, Callable[[], None]], Job]) -> int | None:
    """This node's part of the job, up to its exit code, or to None when node 0 is lost."""

    def settled() -> bool:
        return node.over is not None or node.refused is not None or node.lost is not None

    def tend() -> None:
        node.tend()
        if settled():
            raise _Changed

    try:
        code = None
        with stoppable():
            _say(meeting, "reached node 0, which prepares the run when all are there")
            wait(node, lambda: settled() or node.offer is not None)
            job = None if settled() else make(node, tend)
        if job is not None:
            node.say({"answer": {}})
            code = agent.follow(job, node)
    except _Changed:
        code = None
    except StopAsked as asked:
        node.tell_stop(str(asked))
        raise
    except PhalanxError as error:
        node.say({"unfit": str(error)})
        raise
    if node.refused is not None:
        raise ConfigError(node.refused)
    if node.over is not None:
        _say(meeting, node.over[1])
        return node.over[0]
    return code


def _job(
    node: OtherNode, paths: RunPaths, devices: Sequence[Device], meeting: Meeting, tend: Callable[[], None]
) -> Job:
    """What this node's agent runs. Raises PhalanxError where this node does not fit the run that node 0 prepared."""
    from phalanx.train import copies
    from phalanx.train.resolve import token_folders
    from phalanx.train.subject import spec_if_any
    from phalanx.train.trainer import Run

    offer = node.offer
    assert offer is not None
    first_rank, world = int(offer["first_rank"]), int(offer["world"])
    config = recipe.check(yaml.safe_load(offer["config"]), "node 0's configuration")
    if paths.url is None:
        _check_folder(paths, offer["sign"])
    else:
        paths = mirror.working(paths.url.text, config.data.cache, paths.url.timeout_s, first_rank)
        fetch_records(paths, tend)
    answer = resolved(config, devices, world, tend)
    _check_data(answer, {**offer["data"], WEIGHTS: offer["weights"]})
    here = copies.here(recipe.check(yaml.safe_load(answer["config"]), "the resolved configuration"))
    run = Run(here, spec_if_any(here, paths), paths, *token_folders(answer))
    last = first_rank + len(devices) - 1

    def show(kind: str, details: dict[str, Any]) -> None:
        if kind == Kind.ATTEMPT_STARTED:
            ranks = f"rank {first_rank}" if last == first_rank else f"ranks {first_rank} to {last}"
            _say(meeting, f"attempt {details['attempt']} started: {ranks} of {world} here")
        else:
            _show(meeting, kind, details)

    return Job(
        world=len(devices),
        worker=functools.partial(launch.worker, run),
        paths=paths,
        devices=[device.name for device in devices],
        on_event=show,
        grace_s=here.comm.timeout_s,
        part=Part(meeting.node, first_rank, world, rendezvous.interface_of(node.channel.socket)),
        others=node,
    )


def resolved(config: Config, devices: Sequence[Device], world: int, tend: Callable[[], None]) -> dict[str, Any]:
    """What `train.resolve` says on this node of the configuration that node 0 has offered."""
    unlike = list({device.model: device.name for device in devices}.values())
    look_again(storage.local_cache(config.data.cache))  # node 0 may just have made there what this node needs
    text = recipe.to_yaml(config)
    return fork_call(launch.resolve, text, unlike, world, len(devices), True, timeout_s=None, meanwhile=tend)


def _check_folder(paths: RunPaths, sign: str) -> None:
    """Raises ConfigError when this node does not see node 0's run folder, or cannot write to it."""
    until = time.monotonic() + SEEN_S
    while True:
        look_again(paths.root)
        with contextlib.suppress(OSError):
            if paths.sign.read_text(encoding="utf-8") == sign:
                break
        if time.monotonic() > until:
            raise ConfigError(
                f"the run folder {paths.root.absolute()} of this node is not the one of node 0; give --run-dir a "
                "folder on a file system that all nodes share, or a URL"
            )
        time.sleep(0.2)
    if not os.access(paths.root, os.W_OK | os.X_OK):
        raise ConfigError(f"this node cannot write to the run folder {paths.root.absolute()}; change its rights")


def _check_data(answer: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises ConfigError when this node would train on something else than node 0."""
    mine = {**answer["data"], WEIGHTS: answer["weights"]}
    if answer["base"] is not None:
        mine[BASE_WEIGHTS] = {"sha256": answer["base"]}
    different = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    if different:
        differ = "differs" if len(different) == 1 else "differ"
        raise ConfigError(
            f"{' and '.join(different)} {differ} between this node and node 0, so the nodes would train on different "
            "things; give all nodes the same files, or a data.cache that they share"
        )
