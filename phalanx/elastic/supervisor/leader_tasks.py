"""State of the leading agent beside that of its job: the open incident, the preparation of another division, and
the translation of messages to events."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.placement import ExitCode
from phalanx.elastic.membership import messages
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.supervisor.state import (
    DivisionPrepared,
    DivisionRejected,
    FailureCause,
    JobState,
    NodeInventoryReported,
    NodeReady,
    NodeUnfit,
    PrepareDivision,
    StartAttempt,
    SupervisorEvent,
)
from phalanx.recovery.catalog import inventory_from_message
from phalanx.system import exit_causes
from phalanx.system.async_call import AsyncCall
from phalanx.system.exit_causes import WorkerExit

PREPARE_S = 3600.0  # limit for resolving another division, which may make token files
Plan = Sequence[tuple[int, int]]


class OpenIncident:
    """An open incident: from the detection of a failure until the ranks are ordered to start again."""

    def __init__(self) -> None:
        self._began = time.time()
        self._phases: dict[str, float] = {}
        self.what: list[str] = []

    def mark(self, phase: str) -> None:
        """Record the time of a recovery phase since the failure was seen."""
        self._phases[phase] = round(time.time() - self._began, 3)

    def details(self, state: JobState, action: StartAttempt, before: Message | None) -> dict[str, Any]:
        """Details of the incident, once an attempt is started; `before`: the order of the last one."""
        self.mark("ordered")
        what = "; ".join(dict.fromkeys(self.what)) or "the attempt failed"
        done = _describe_restart(state, action, before)
        return {"attempt": action.attempt, "what": what, "done": done, "began": self._began, "phases": self._phases}


def _describe_restart(state: JobState, action: StartAttempt, before: Message | None) -> str:
    done = "all ranks restart"
    if before is not None and before["division"] != action.division:
        world = sum(slot.ranks for slot in state.slots)
        nodes = f"node{'s' if len(action.seats) > 1 else ''} {', '.join(map(str, action.seats))}"
        done = f"the work is redistributed over {nodes}: {world} rank{'s' if world > 1 else ''}"
    elif before is not None and list(action.seats) != before["seats"]:
        pairs = [(old, new) for old, new in zip(before["seats"], action.seats, strict=True) if old != new]
        done = ", ".join(f"node {new} takes the ranks of node {old}" for old, new in pairs)
    if action.reason is not None:
        done += f", {action.reason}"
    if action.replayed_steps:
        steps = "step is" if action.replayed_steps == 1 else "steps are"
        done += (
            f"; {action.replayed_steps} committed {steps} replayed from step {action.step}, because the state is "
            f"copied to a second node every {state.policy.replicate_every} steps"
        )
    return done


def find_failure_cause(ended: Message, ends: Sequence[WorkerExit]) -> FailureCause | None:
    """Why the ranks of a node failed; None where they did not."""
    abnormal = [end for end in ends if end.abnormal]
    if not abnormal:
        return None
    first = exit_causes.find_root_cause(abnormal)
    code = 1 if first.exit_code is None else first.exit_code
    return FailureCause(
        exit_causes.root_cause_priority(first),
        # It was asked to stop, and could not heed that yet.
        int(ExitCode.STOPPED) if ended["code"] == ExitCode.STOPPED else code,
        exit_causes.fingerprint_failure(first),
        bool(ended.get("lowered")),
        exit_causes.is_state_damage(first),
    )


def find_first_death(ends: Sequence[WorkerExit], node_lost: bool) -> dict[str, Any] | None:
    """Which rank's end brought an attempt down; None where it was none's, or that of a lost node."""
    abnormal = [end for end in ends if end.abnormal]
    if not abnormal or (node_lost and all(exit_causes.is_secondary_failure(end) for end in abnormal)):
        return None
    return exit_causes.find_root_cause(abnormal).details()


def list_events(node: int, message: messages.MessageRecord, now: float) -> list[SupervisorEvent]:
    """The events in a node's message about the node itself, before it is a member and later."""
    events: list[SupervisorEvent] = []
    if isinstance(message, messages.EndedMessage | messages.ReadyMessage) and message.held is not None:
        events.append(NodeInventoryReported(now, node, inventory_from_message(message.held)))
    if isinstance(message, messages.ReadyMessage):
        events.append(NodeReady(now, node, message.ready))
    if isinstance(message, messages.UnfitMessage):
        events.append(NodeUnfit(now, node, message.unfit, message.code))
    return events


class DivisionPreparation:
    """Another division, resolved in a child by `prepare(division, plan, devices)`."""

    def __init__(
        self,
        prepare: Callable[[int, Plan, list[list[Any]]], Message],
        action: PrepareDivision,
        devices: list[list[Any]],
    ) -> None:
        self._division = action.division
        self.call = AsyncCall(prepare, action.division, list(action.plan), devices, timeout_s=PREPARE_S)
        self.offer: Message | None = None

    def poll_once(self) -> DivisionPrepared | DivisionRejected | None:
        """The result of the preparation; None while it runs. The offer is then in `offer`."""
        now = time.monotonic()
        try:
            result = self.call.result()
        except (PhalanxError, RuntimeError) as error:
            return DivisionRejected(now, self._division, str(error))
        if result is None:
            return None
        self.offer = result[0]
        return DivisionPrepared(now, self._division)
