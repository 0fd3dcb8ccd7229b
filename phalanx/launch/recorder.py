"""The recorder process of a leading agent, which writes its events and shows the run: a hanging file system then blocks
it and not the agent, which would be declared lost.

It is forked from the agent, receives events through a pipe, follows the run's files, and reports each committed step,
node requests (`phalanx nodes`), and each event that is written. No torch here.
"""

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, IncidentTracker, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor.node_requests import NodeRequest, NodeRequestKind, read_requests
from phalanx.launch import outcome
from phalanx.report.console import Console, Follower
from phalanx.system.fork import end_child, fork

POLL_S = 0.1
LOOK_S = 1.0  # interval of checks for node requests and for free locks
CLOSE_S = 10.0  # time to write and show the last events
AGAIN_S = 1.0  # how long one lives at least, before another takes its place
TryAgain = Callable[[], None]  # tries once more to hold what could not be held
HoldLeaderFiles = Callable[[], contextlib.AbstractContextManager[TryAgain | None]]


class EventRecorder:
    """Records events in a separate process. `hold` is entered for as long as it lives: locks and files that belong to
    the leader.

    If the process is killed, it is replaced by another one, which receives the unwritten events again. The first begins
    at once or, `later`, when `take_committed_steps` is called: a new leader first sends orders to the other nodes.
    `steps` is 0 if no steps are reported; `stream` is where the run is shown, standard output if None; `verbose` shows
    how each setting was resolved.
    """

    def __init__(
        self,
        paths: RunPaths,
        steps: int,
        unit: str,
        hold: HoldLeaderFiles = contextlib.nullcontext,
        later: bool = False,
        stream: TextIO | None = None,
        verbose: bool = False,
    ) -> None:
        self._follower = (paths, steps, unit, hold, stream, verbose)
        self._steps: list[int] = []
        self._asked: list[NodeRequest] = []
        self._count = 0
        self._unwritten: dict[int, bytes] = {}  # unwritten events by number
        self._begun = False
        self._out = bytearray()
        if not later:
            self._begin()

    def _begin(self, replaces: bool = False) -> None:
        events, self._events = os.pipe()
        self._replies, told = os.pipe()
        self._pid, self._pidfd = fork(
            lambda: _recorder_main(events, told, replaces, *self._follower), keep=[events, told]
        )
        os.close(events)
        os.close(told)
        os.set_blocking(self._events, False)
        os.set_blocking(self._replies, False)
        self._out = bytearray(b"".join(self._unwritten.values()))
        self._in = bytearray()
        self._begun, self._begun_at = True, time.monotonic()
        self._send()

    def _revive(self) -> None:
        if self._is_dead() and time.monotonic() > self._begun_at + AGAIN_S:
            os.close(self._events)
            self._reap()
            self._begin(replaces=True)

    def _is_dead(self, wait_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def fileno(self) -> int:
        return self._replies

    def record(self, kind: str, details: dict[str, Any]) -> None:
        """Write and show an event; details have `attempt`. An incident is written after the next completed step,
        if steps are reported; with `unless_written`, only if its attempt has none of that kind."""
        self._count += 1
        event = {"number": self._count, "kind": str(kind), "time": time.time(), **details}
        self._unwritten[self._count] = line = json.dumps(event).encode() + b"\n"
        self._out += line
        self._send()

    def show(self, kind: str, details: dict[str, Any]) -> None:
        """Show an event that is already written."""
        self.record(kind, {**details, "shown_only": True})

    def take_committed_steps(self) -> list[int]:
        """Steps that have become safe since the last call."""
        if not self._begun:
            self._begin()
        self._send()
        self._hear()  # before the reports of a killed process are dropped
        self._revive()
        steps, self._steps = self._steps, []
        return steps

    def take_node_requests(self) -> list[NodeRequest]:
        """Requests to nodes since the last call, in order."""
        self._send()
        self._hear()
        asked, self._asked = self._asked, []
        return asked

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._replies, 1 << 16):
                self._in += part
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        for told in map(json.loads, lines):
            if isinstance(told, int):
                self._steps.append(told)
            elif "written" in told:
                self._unwritten.pop(told["written"], None)
            else:
                self._asked.append(NodeRequest(**{**told, "wanted": NodeRequestKind(told["wanted"])}))

    def close(self) -> None:
        """Wait until all is written and shown, for a while; a process that something has killed is replaced once."""
        if not self._begun:
            self._begin()
        until = time.monotonic() + CLOSE_S
        self._end(until)
        if self._unwritten and time.monotonic() < until:
            self._begin(replaces=True)
            self._end(until)

    def _end(self, until: float) -> None:
        writable = select.poll()
        writable.register(self._events, select.POLLOUT)
        while self._out and time.monotonic() < until and not self._is_dead():
            writable.poll(100)
            self._send()
        os.close(self._events)
        while not self._is_dead(0.1) and time.monotonic() < until:
            self._hear()
        self._hear()
        self._reap()

    def abandon(self) -> None:
        """End it now: this agent may not write any more."""
        if self._begun:
            os.close(self._events)
            self._reap()

    def _reap(self) -> None:
        end_child(self._pid, self._pidfd)
        os.close(self._replies)

    def _send(self) -> None:
        try:
            while self._out and self._begun:
                sent = os.write(self._events, self._out[: 1 << 16])
                del self._out[:sent]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the process is gone
            self._out.clear()


class LocalRecorder:
    """The recorder within the agent's process, for a run on one node: no other node waits for its heartbeats or can
    take over."""

    def __init__(self, paths: RunPaths, steps: int, unit: str, verbose: bool = False) -> None:
        self._steps: list[int] = []
        self._view = _RecorderView(_console(paths, steps, unit, None, verbose), paths, self._take, replaces=False)
        self._follower = Follower(paths, self._view)
        self._due = 0.0

    def _take(self, told: Any) -> None:
        if isinstance(told, int):
            self._steps.append(told)

    def record(self, kind: str, details: dict[str, Any]) -> None:
        self._view.record(0, str(kind), {"time": time.time(), **details})

    def show(self, kind: str, details: dict[str, Any]) -> None:
        self._view.console.on_event({"kind": kind, **details})

    def take_committed_steps(self) -> list[int]:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + POLL_S
            self._follower.poll()
        steps, self._steps = self._steps, []
        return steps

    def take_node_requests(self) -> list[NodeRequest]:
        return []

    def close(self) -> None:
        self._view.finish(self._follower)

    def abandon(self) -> None:
        self._view.console.close()


class _RecorderView:
    """The console, and the state of the records shown on it. It `replaces` that of a killed process, which may
    have written some events already."""

    def __init__(self, console: Console, paths: RunPaths, reply: Callable[[Any], None], replaces: bool) -> None:
        self.console, self._paths, self._tell_agent = console, paths, reply
        self.incidents = IncidentTracker(self._end_incident)
        self._open: list[int] = []  # numbers of the messages about open incidents
        self._late: list[tuple[int, dict[str, Any]]] = []  # incidents that may be over by now, with their numbers
        self._before = list(read_events(paths.events)) if replaces else []
        if replaces and (saved := outcome.checkpoint_step_in_events(paths)):  # which may not have been reported
            self._reply(saved)
        self._requests: dict[str, float] = {}  # time of the last reported request, by node
        self._look_at = 0.0

    def on_step(self, record: dict[str, Any]) -> None:
        self.incidents.on_step(record)
        self.console.on_step(record)

    def on_event(self, event: dict[str, Any]) -> None:
        if event.get("kind") == EventKind.CHECKPOINT_SAVED and type(event.get("step")) is int:
            self._reply(event["step"])
        self.incidents.on_event(event)
        self.console.on_event(event)

    def _reply(self, what: Any) -> None:
        self._tell_agent(what)

    def look(self, again: TryAgain | None) -> None:
        """Report new requests to nodes to the agent; and acquire what has become free."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        if again is not None:
            again()
        for request in read_requests(self._paths):
            if request.time != self._requests.get(request.node):  # clocks of requesters may differ
                self._requests[request.node] = request.time
                self._reply(vars(request))

    def tick(self) -> None:
        self.console.tick()

    def finish(self, follower: Follower) -> None:
        """Show and write the last of it."""
        follower.poll()
        self.incidents.end({})
        follower.poll(final=True)
        self.console.close()

    def record(self, number: int, kind: str, details: dict[str, Any]) -> None:
        if kind == EventKind.INCIDENT:
            del details["time"]  # that of its end is written
            if self._before:
                self._late.append((number, details))
            else:
                self._begin_incident(number, details)
            return
        if details.pop("unless_written", False) and any(
            _is_one(event, kind, details) for event in read_events(self._paths.events)
        ):
            pass  # the previous leader has written it
        elif details.pop("shown_only", False):
            self.console.on_event({"kind": kind, **details})
        elif not any(event.get("kind") == kind and event.get("time") == details["time"] for event in self._before):
            outcome.write_agent_event(self._paths, self.console, kind, details)
        self._reply({"written": number})

    def _begin_incident(self, number: int, details: dict[str, Any]) -> None:
        self._open.append(number)
        self.incidents.begin(details)
        if not self.console.total_steps:
            self.incidents.end({"seconds": max(0.0, time.time() - details["began"])})

    def catch_up(self) -> None:
        """Process the lines since the incidents that an earlier process received, before the next incident and
        after the last: so the number of incidents is unaffected."""
        late, self._late = [told for told in self._late if not self._is_written(*told)], []
        for index, (number, details) in enumerate(late):
            self._begin_incident(number, details)
            stop = late[index + 1][1]["attempt"] if index + 1 < len(late) else None
            for event in _up_to(stop, read_events(self._paths.events)):
                self.incidents.on_event(event)
            for record in _up_to(stop, read_lines(self._paths.metrics)):
                self.incidents.on_step(record)

    def _is_written(self, number: int, details: dict[str, Any]) -> bool:
        if not any(_is_of(event, details) for event in self._before):
            return False
        self._reply({"written": number})
        return True

    def _end_incident(self, details: dict[str, Any]) -> None:
        outcome.write_agent_event(self._paths, self.console, EventKind.INCIDENT, details)
        self._tell_written()

    def _tell_written(self) -> None:
        for number in self._open:
            self._reply({"written": number})
        self._open.clear()


def _up_to(attempt: int | None, lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines of attempts before that one; None: all."""
    for line in lines:
        if attempt is None or (isinstance(line.get("attempt"), int) and line["attempt"] < attempt):
            yield line


def _is_one(event: dict[str, Any], kind: str, details: dict[str, Any]) -> bool:
    """Whether an event is of a kind and of the attempt that details tell of."""
    return event.get("kind") == kind and event.get("attempt") == details["attempt"]


def _is_of(event: dict[str, Any], incident: dict[str, Any]) -> bool:
    """Whether an event tells of an incident that `begin` tells of."""
    when, later = event.get("time"), isinstance(event.get("attempt"), int) and event["attempt"] >= incident["attempt"]
    same = event.get("kind") == EventKind.INCIDENT and later and incident["what"] in str(event.get("what"))
    return same and isinstance(when, float) and when >= incident["began"]


def _console(paths: RunPaths, steps: int, unit: str, stream: TextIO | None, verbose: bool) -> Console:
    """A console; a script, whose steps are unknown, has no first screen."""
    return Console(steps, paths.name, stream, unit, paths.display_name if steps else None, verbose)


def _recorder_main(
    events: int,
    replies: int,
    replaces: bool,
    paths: RunPaths,
    steps: int,
    unit: str,
    hold: HoldLeaderFiles,
    stream: TextIO | None,
    verbose: bool,
) -> int:
    def reply(what: Any) -> None:
        with contextlib.suppress(OSError):  # the agent is gone, and this process soon
            os.write(replies, json.dumps(what).encode() + b"\n")

    shown = _RecorderView(_console(paths, steps, unit, stream, verbose), paths, reply, replaces)
    follower = Follower(paths, shown)
    with hold() as again, open(events, "rb", buffering=0) as pipe:
        received = b""
        while True:
            if select.select([pipe], [], [], POLL_S)[0]:
                part = pipe.read(1 << 16)
                if not part:
                    break
                *lines, received = (received + part).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    shown.record(event.pop("number"), event.pop("kind"), event)
                shown.catch_up()
            shown.look(again)
            follower.poll()
        shown.finish(follower)
    return 0
