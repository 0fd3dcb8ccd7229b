"""The table "what happens after a death" of docs/fault-tolerance.md, made from what `decide` decides.

`python -m tests.unit.test_death_table` prints it.
"""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.placement import ExitCode
from phalanx.elastic.supervisor.decide import decide
from phalanx.elastic.supervisor.state import (
    DivisionPrepared,
    FailureCause,
    FinishJob,
    JobPhase,
    JobState,
    NodeLost,
    NodeReady,
    PrepareDivision,
    RanksEnded,
    RestartBudget,
    StartAttempt,
    StopSignalReceived,
    SupervisorAction,
    SupervisorEvent,
    Tick,
)
from tests.helpers import ROOT
from tests.unit.test_decide import begun

CLUSTERS = (1, 0), (2, 0), (2, 1)  # nodes, and spares beside them
NODE_LOST = "a node is lost"
BUG = FailureCause(1, 1, "KeyError in step 17")
DEATHS: dict[str, FailureCause | None] = {
    "a rank is killed from outside": FailureCause(0, 1, ""),
    "a rank raises an exception": BUG,
    "the same, at the same place, for the third time in a row": BUG,
    "a rank is killed, for the fourth time without a new step": FailureCause(0, 1, ""),
    "a rank refuses its configuration": FailureCause(1, int(ExitCode.CONFIG), "ConfigError"),
    "a rank runs out of memory, and can ask for less": FailureCause(1, int(ExitCode.OUT_OF_MEMORY), "", True),
    "a rank runs out of memory, and cannot": FailureCause(1, int(ExitCode.OUT_OF_MEMORY), ""),
    "a rank finds kept state damaged": FailureCause(1, 1, "", state_damaged=True),
    "a rank dies after a stop signal": FailureCause(0, 1, ""),
    NODE_LOST: None,
}


def fail(what: str, nodes: int, spares: int) -> list[SupervisorAction]:
    """What is done, over the next minutes, about a death in a run of so many nodes."""
    cause, state = DEATHS[what], begun(nodes, spares)
    if "third time" in what:
        state = replace(state, budget=RestartBudget(crash=(BUG.fingerprint, 2), failures=2))
    if "fourth time" in what:
        state = replace(state, budget=RestartBudget(failures=3))
    events: list[SupervisorEvent] = [StopSignalReceived(1.0, "SIGTERM")] if "stop signal" in what else []
    lost = FailureCause(3, 1, "")
    if cause is None:
        events += [NodeLost(1.0, nodes - 1, "gone"), *(RanksEnded(1.0, each, 1, 1, lost) for each in range(nodes - 1))]
    else:
        events += [RanksEnded(1.0, each, 1, cause.code if each == 0 else 1, lost if each else cause)
                   for each in range(nodes)]  # fmt: skip
    done: list[SupervisorAction] = []
    for event in events:
        state, actions = decide(state, event)
        done += actions
    return done + settle(state)


def settle(state: JobState) -> list[SupervisorAction]:
    """What follows by itself: nodes get ready for another division, and time goes by."""
    done: list[SupervisorAction] = []
    for second in range(2, 700):
        now, events = float(second), list[SupervisorEvent]()
        if state.phase == JobPhase.PREPARING:
            events = [DivisionPrepared(now, state.division + 1)]
            events += [NodeReady(now, each.node, state.division + 1) for each in state.nodes]
        for event in [*events, Tick(now)]:
            state, actions = decide(state, event)
            done += actions
        if state.phase in (JobPhase.RUNNING, JobPhase.OVER):
            break
    return done


def describe(done: Sequence[SupervisorAction]) -> str:
    finished = next((action for action in done if isinstance(action, FinishJob)), None)
    if finished is not None:
        return f"the run ends with exit code {finished.code}"
    started = next(action for action in done if isinstance(action, StartAttempt))
    if any(isinstance(action, PrepareDivision) for action in done):
        return f"the work is redistributed over node {', '.join(map(str, started.seats))}"
    if started.seats != tuple(range(len(started.seats))):
        return "the spare takes the ranks of the lost node, and all ranks restart"
    return "all ranks restart" + (f", {started.reason}" if started.reason else "")


def render_table() -> str:
    lines = ["| what happens, on any number of nodes | what is decided |", "|---|---|"]
    lines += [f"| {what} | {describe(fail(what, 2, 0))} |" for what, cause in DEATHS.items() if cause is not None]
    lines.append(f"| a node of two is lost | {describe(fail(NODE_LOST, 2, 0))} |")
    lines.append(f"| a node of two is lost, and there is a spare | {describe(fail(NODE_LOST, 2, 1))} |")
    return "\n".join(lines) + "\n"


def test_the_page_says_what_is_decided() -> None:
    assert render_table() in (ROOT / "docs/fault-tolerance.md").read_text(encoding="utf-8")


def test_a_ranks_death_is_answered_alike_on_any_number_of_nodes() -> None:
    for what, cause in DEATHS.items():
        if cause is not None:
            assert len({describe(fail(what, *cluster)) for cluster in CLUSTERS}) == 1, what


if __name__ == "__main__":
    print(render_table(), end="")
