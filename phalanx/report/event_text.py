"""Event text: one sentence for each event of a run, and formats of numbers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import HELD_OUT
from phalanx.report.formats import (
    describe_scores,
    finite_number,
    format_bytes,
    format_count,
    format_difference,
    format_seconds,
    signal_name,
)


class EventMark(NamedTuple):
    """Mark of an event on displays: a symbol, its ASCII replacement, and a tone.

    Tones: "bad", "warn", "good", "info" and "quiet"; each display chooses their colours.
    """

    symbol: str
    ascii: str
    tone: str


_MARKS = {
    EventKind.RUN_STARTED: EventMark("▶", ">", "info"),
    EventKind.AUTO_RESOLVED: EventMark("·", "-", "quiet"),
    EventKind.LAYOUT_CHOSEN: EventMark("◆", "*", "info"),
    EventKind.PREDICTION_CHECKED: EventMark("◆", "*", "info"),
    EventKind.ATTEMPT_STARTED: EventMark("·", "-", "quiet"),
    EventKind.RESUMED: EventMark("↻", "@", "info"),
    EventKind.MEASURING: EventMark("·", "-", "quiet"),
    EventKind.MEASURED: EventMark("◆", "*", "info"),
    EventKind.DEVICES_CHANGED: EventMark("!", "!", "warn"),
    EventKind.MEMORY_LIMITED: EventMark("!", "!", "warn"),
    EventKind.WORK_SPLIT: EventMark("·", "-", "quiet"),
    EventKind.WORK_REBALANCED: EventMark("⇄", "=", "info"),
    EventKind.COMM_SCHEDULE_CHANGED: EventMark("·", "-", "quiet"),
    EventKind.CHECKPOINT_SAVED: EventMark("·", "-", "quiet"),
    EventKind.CHECKPOINT_FAILED: EventMark("!", "!", "bad"),
    EventKind.CHECKPOINT_SKIPPED: EventMark("!", "!", "warn"),
    EventKind.CHECKPOINT_REFUSED: EventMark("!", "!", "warn"),
    EventKind.EVALUATED: EventMark("◆", "*", "info"),
    EventKind.STEP_SKIPPED: EventMark("!", "!", "warn"),
    EventKind.ROLLED_BACK: EventMark("↻", "@", "warn"),
    EventKind.CORRUPTED: EventMark("✗", "X", "bad"),
    EventKind.STRAGGLER: EventMark("!", "!", "warn"),
    EventKind.INJECTED: EventMark("!", "!", "warn"),
    EventKind.WORKER_DIED: EventMark("✗", "X", "bad"),
    EventKind.RESTARTED: EventMark("↻", "@", "warn"),
    EventKind.GAVE_UP: EventMark("✗", "X", "bad"),
    EventKind.NODE_JOINED: EventMark("·", "-", "quiet"),
    EventKind.NODE_LEAVING: EventMark("!", "!", "warn"),
    EventKind.NODE_LOST: EventMark("✗", "X", "bad"),
    EventKind.INCIDENT: EventMark("↻", "@", "warn"),
    EventKind.STOP_REQUESTED: EventMark("!", "!", "warn"),
    EventKind.STOPPED: EventMark("■", "#", "warn"),
    EventKind.FINISHED: EventMark("✓", "+", "good"),
    EventKind.EXPORTED: EventMark("✓", "+", "good"),
    EventKind.PROFILED: EventMark("◇", "*", "info"),
    EventKind.MEMORY_RECORDED: EventMark("◇", "*", "info"),
    EventKind.HEALTH: EventMark("◆", "*", "info"),
    EventKind.WARNING: EventMark("!", "!", "warn"),
}


WITHIN = ("gather", "reduce")  # phases of a profile that happen inside the others


def event_mark(kind: str) -> EventMark:
    """The mark of a kind of event; an unknown kind gets a quiet one."""
    return _MARKS[EventKind(kind)] if kind in _MARKS else EventMark("·", "-", "quiet")


def describe_event(event: dict[str, Any], after_step: int | None = None) -> str:
    """One event as a sentence, without its mark and its time.

    `after_step` is the last step known when the event happened, for events that carry none. Missing details are left
    out; an event of an unknown kind is shown with all its details.
    """
    match event.get("kind"):
        case EventKind.RUN_STARTED:
            return "run started" + _started(event)
        case EventKind.AUTO_RESOLVED:
            return f"{event.get('key', 'a setting')} = {event.get('value')}" + _because(event)
        case EventKind.LAYOUT_CHOSEN:
            again = " as at the last start" if event.get("again") else ""
            why = f"; {event['why']}" if event.get("why") else ""
            return f"layout{again}: {event.get('layout', '?')}{why}; see phalanx plan"
        case EventKind.PREDICTION_CHECKED:
            return _compared(event)
        case EventKind.ATTEMPT_STARTED:
            return f"attempt {event.get('attempt', '?')} started" + _pids(event)
        case EventKind.RESUMED:
            step = event.get("step", "?")
            if event.get("memory"):
                return f"resumed from step {step}, kept in memory"
            return f"resumed from the checkpoint of step {step}"
        case EventKind.MEASURING:
            return "measuring the devices" + _because(event)
        case EventKind.MEASURED:
            return _measured(event)
        case EventKind.DEVICES_CHANGED:
            return "devices changed: the batch is split again" + _because(event)
        case EventKind.WORK_SPLIT | EventKind.WORK_REBALANCED:
            return _shared(event)
        case EventKind.COMM_SCHEDULE_CHANGED:
            rate = finite_number(event, "bytes_per_s")  # named where it is that of the network
            at = "the measured times" if rate is None else f"a link of {format_bytes(rate)}/s"
            return f"new communication schedule from step {event.get('step', '?')} on, for {at}"
        case EventKind.MEMORY_LIMITED:
            return "micro-batch limited after out of memory" + _limits(event)
        case EventKind.CHECKPOINT_SAVED:
            saved = "exists already" if event.get("already_there") else "saved" + _cost(event)
            return f"checkpoint of step {event.get('step', '?')} {saved}"
        case EventKind.CHECKPOINT_FAILED:
            return f"checkpoint of step {event.get('step', '?')} could not be saved" + _because(event)
        case EventKind.CHECKPOINT_SKIPPED:
            return f"checkpoint of step {event.get('step', '?')} skipped" + _because(event)
        case EventKind.CHECKPOINT_REFUSED:
            return f"checkpoint of step {event.get('step', '?')} was not used" + _because(event)
        case EventKind.EVALUATED:
            return f"{set_name(event)} loss" + _evaluated(event)
        case EventKind.STEP_SKIPPED:
            return f"step {event.get('step', '?')} skipped" + _because(event)
        case EventKind.ROLLED_BACK:
            return _rolled_back(event)
        case EventKind.CORRUPTED:
            return _corrupted(event)
        case EventKind.STRAGGLER:
            return _slow(event)
        case EventKind.INJECTED:
            return f"fault injected on rank {event.get('rank', '?')}: {event.get('fault', 'a fault')}"
        case EventKind.WORKER_DIED:
            return _died(event, after_step)
        case EventKind.RESTARTED:
            return f"restarting: attempt {event.get('attempt', '?')}" + _because(event)
        case EventKind.GAVE_UP:
            return "no further restart" + _because(event)
        case EventKind.NODE_JOINED:
            ranks = event.get("ranks", "?")
            return f"{_node(event)} joined" + (f" with {ranks} rank{'' if ranks == 1 else 's'}" if ranks else "")
        case EventKind.NODE_LEAVING:
            return f"{_node(event)} will soon be gone" + _because(event)
        case EventKind.NODE_LOST:
            return f"{_node(event)} was lost" + _because(event)
        case EventKind.INCIDENT:
            return _incident(event)
        case EventKind.STOP_REQUESTED:
            then = "passed to the script's ranks" if "script" in event else "finishing the step, saving, then leaving"
            return f"got {signal_name(event.get('signal'))}: {then}"
        case EventKind.STOPPED:
            return "stopped" + _limit(event) + _after(event, after_step) + "; the same command resumes it"
        case EventKind.FINISHED:
            took = finite_number(event, "seconds")
            last = " in the last attempt" if (finite_number(event, "attempt") or 1) > 1 else ""
            spent = f", {format_seconds(took)}{last}" if took is not None else ""
            return "finished" + _after(event, after_step) + spent + _because(event)
        case EventKind.EXPORTED:
            return f"exported to {event.get('folder', '?')}"
        case EventKind.PROFILED:
            return _profiled(event)
        case EventKind.MEMORY_RECORDED:
            peak = finite_number(event, "peak_bytes")
            above = f": {format_bytes(peak)} above its start at peak" if peak is not None else ""
            return f"memory of step {event.get('step', '?')} recorded{above}; see {event.get('file', '?')}"
        case EventKind.HEALTH:
            return _health(event)
        case EventKind.WARNING:
            return str(event.get("message", "warning"))
    details = {key: value for key, value in event.items() if key not in ("kind", "time", "attempt")}
    return ", ".join([str(event.get("kind") or "event"), *(f"{key} {value}" for key, value in details.items())])


def set_name(event: Mapping[str, Any]) -> str:
    """Display name of an evaluation's set; events of older versions mean the held-out set."""
    name = event.get("set", HELD_OUT)
    return "held-out" if name == HELD_OUT else str(name)


def _incident(event: dict[str, Any]) -> str:
    """What failed and where, the action taken, and the recovery time until the next step, if steps are known."""
    said = f"{event.get('what', 'something failed')}; {event.get('done', 'all ranks restart')}"
    took, step = finite_number(event, "seconds"), event.get("step")
    if took is None:
        return said
    if step is None:
        return f"{said}, {format_seconds(took)} after detection"
    return f"{said}; training resumed with step {step} after {format_seconds(took)}"


def _because(event: dict[str, Any]) -> str:
    reason = event.get("reason")
    return f": {reason}" if reason else ""


def _node(event: dict[str, Any]) -> str:
    return f"node {event.get('node', '?')}" + (f" ({event['host']})" if event.get("host") else "")


def _after(event: dict[str, Any], after_step: int | None) -> str:
    step = after_step if event.get("step") is None else event["step"]
    return f" after step {step}" if step is not None else ""


def _limit(event: dict[str, Any]) -> str:
    """Which key has stopped a run, if one has; of a signal another event tells."""
    return f" by {event['reason']}" if str(event.get("reason")).startswith("train.") else ""


def _started(event: dict[str, Any]) -> str:
    parts = []
    world = finite_number(event, "world")
    if sizes := describe_parameters(event):
        parts.append(sizes)
    if world:
        parts.append(f"{world:.0f} rank{'s' if world > 1 else ''}")
    if event.get("device"):
        parts.append(f"on {event['device']}")
    return f": {', '.join(parts)}" if parts else ""


def describe_parameters(event: dict[str, Any]) -> str:
    """Parameter count of a `run_started` event, with that of adapters if they are trained."""
    whole, trained = finite_number(event, "parameters"), finite_number(event, "trainable")
    if not whole:
        return ""
    return f"{format_count(whole)} parameters" + (
        f" and {format_count(trained)} in adapters" if trained and trained != whole else ""
    )


def _pids(event: dict[str, Any]) -> str:
    pids = event.get("pids")
    if isinstance(pids, dict):
        pids = list(pids.values())
    if not isinstance(pids, list) or not pids:
        return ""
    shown = ", ".join(str(pid) for pid in pids[:8]) + (", ..." if len(pids) > 8 else "")
    return f" with {len(pids)} rank{'s' if len(pids) > 1 else ''} (pid {shown})"


def _measured(event: dict[str, Any]) -> str:
    """Measured speed of each device; of many, the slowest and the fastest."""
    rows = event.get("devices")
    rates = [
        (rate, f"rank {row.get('rank', '?')} ({row.get('model', 'a device')}) {format_count(rate)}")
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and (rate := finite_number(row, "sequences_per_s"))
    ]
    shown = rates if len(rates) <= 4 else [min(rates), max(rates)]
    speeds = f": sequences/s of {', '.join(text for _, text in shown)}" if rates else ""
    few = "" if len(shown) == len(rates) else f", the slowest and the fastest of {len(rates)}"
    took = finite_number(event, "seconds")
    return "devices measured" + (f" in {format_seconds(took)}" if took is not None else "") + speeds + few


def _shared(event: dict[str, Any]) -> str:
    """The batch split from a step on, its reason, and the predicted step times before and after."""
    shares, parts = event.get("shares"), event.get("parts")
    said = "batch rebalanced" if event.get("kind") == EventKind.WORK_REBALANCED else "batch split"
    said += f" from step {event.get('step', '?')} on"
    if not isinstance(shares, list) or not shares:
        return said
    said += f": {format_shares(shares)}"
    each = finite_number(event, "parts")
    said += f" in {each:.0f} micro-batches each" if each is not None and each > 1 else ""
    said += f" in {format_shares(parts)} micro-batches" if isinstance(parts, list) and parts else ""
    said += f" ({event['why']})" if event.get("why") else ""
    before, after = finite_number(event, "before_s"), finite_number(event, "after_s")
    if before is None or after is None:
        return said
    return said + f"; predicted step {format_seconds(after)}, was {format_seconds(before)}"


def format_shares(numbers: list[Any]) -> str:
    """Shares in order of rank, `8+8`; of more than eight ranks the least and the largest, `1 to 10`."""
    known = [value for each in numbers if (value := finite_number({"n": each}, "n")) is not None]
    return "+".join(map(str, numbers)) if len(numbers) <= 8 or not known else f"{min(known)} to {max(known)}"


def _compared(event: dict[str, Any]) -> str:
    """Measured and predicted step time, the term that differs most, and memory."""
    thought, took = finite_number(event, "predicted_s"), finite_number(event, "measured_s")
    if not thought or took is None:
        return "a step was compared with its prediction"
    said = (
        f"a step takes {format_seconds(took)}, {format_difference(took, thought)} {format_seconds(thought)} predicted"
    )
    said += f" from {event['basis']}" if event.get("basis") else ""
    for row in event.get("terms") or []:
        if isinstance(row, dict) and row.get("name") == event.get("off") and event.get("off"):
            measured, predicted = finite_number(row, "measured_s") or 0.0, finite_number(row, "predicted_s") or 0.0
            said += f"; largest difference in {event['off']}: "
            said += f"{format_seconds(measured)} instead of {format_seconds(predicted)}"
    held, thought_of = finite_number(event, "measured_bytes"), finite_number(event, "predicted_bytes")
    if held and thought_of:
        said += f"; memory {format_bytes(held)}, {format_difference(held, thought_of)} {format_bytes(thought_of)}"
    return said


def _limits(event: dict[str, Any]) -> str:
    most = event.get("most")
    pairs = [f"rank {rank} at most {few}" for rank, few in most.items()] if isinstance(most, dict) else []
    return f": {', '.join(pairs)}" if pairs else ""


def _cost(event: dict[str, Any]) -> str:
    written, took = finite_number(event, "bytes"), finite_number(event, "seconds")
    parts = [format_bytes(written)] if written is not None else []
    parts += [format_seconds(took)] if took is not None else []
    return f" ({' in '.join(parts)})" if parts else ""


def _profiled(event: dict[str, Any]) -> str:
    """The consecutive phases of a step on rank 0; collectives are within them."""
    phases = event.get("phases")
    pairs = phases.items() if isinstance(phases, dict) else ()
    shares = [
        f"{name} {format_seconds(mine)}"
        for name, values in pairs
        if name not in WITHIN and isinstance(values, list) and values and (mine := finite_number({"s": values[0]}, "s"))
    ]
    of_step = f": {', '.join(shares)} of a step" if shares else ""
    steps = f"{event.get('first', '?')} to {event.get('last', '?')}"
    return f"steps {steps} profiled{of_step}; traces in {event.get('folder', '?')}"


def _evaluated(event: dict[str, Any]) -> str:
    loss = finite_number(event, "loss")
    if loss is None:
        return f" is not a number{_after(event, None)}"
    beside = describe_scores(event)
    return f" {loss:.4f}{f', {beside}' if beside else ''}{_after(event, None)}"


def _rolled_back(event: dict[str, Any]) -> str:
    back = f"rolled back from step {event.get('from_step', '?')} to the checkpoint of step {event.get('step', '?')}"
    first, last = event.get("first"), event.get("last")
    past = "" if first is None else f"; data of steps {first} to {last} skipped"
    return back + _because(event) + past


def _corrupted(event: dict[str, Any]) -> str:
    rows = [row for row in event.get("devices") or [] if isinstance(row, dict)]
    names = ", ".join(
        f"rank {row.get('rank', '?')} ({row.get('device', '?')} of {row.get('host', '?')})" for row in rows
    )
    sure = all(row.get("certain") for row in rows)
    who = names if sure else f"one of {names}"
    repair = "repaired from another rank" if event.get("repaired") else "not repaired"
    what = event.get("parameters") or "parameters"
    return f"silent corruption after step {event.get('step', '?')}: wrong {what} on {who}; {repair}"


def _slow(event: dict[str, Any]) -> str:
    ranks = event.get("ranks") or ["?"]
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    for_s, times = finite_number(event, "seconds"), finite_number(event, "factor")
    since = f" for {format_seconds(for_s)}" if for_s is not None else ""
    slower = f"{times:.1f} times" if times is not None else "many times"
    return f"{names} took {slower} its best time{since}; check its node, or drain it"


def _died(event: dict[str, Any], after_step: int | None) -> str:
    pid = f" on {event['host']}" if event.get("host") else ""
    pid += f" (pid {event['pid']})" if event.get("pid") is not None else ""
    reason = str(event.get("reason") or "")
    if event.get("type") in ("Hang", "Deadlock"):
        return f"rank {event.get('rank', '?')}{pid} hung: {reason}"
    if event.get("signal"):
        cause = f"was killed by {signal_name(event['signal'])}"
    elif event.get("exit_code") == ExitCode.OUT_OF_MEMORY:
        cause = f"ran out of memory (exit code {int(ExitCode.OUT_OF_MEMORY)})"
    elif event.get("exit_code") is not None:
        cause = f"ended with exit code {event['exit_code']}"
    else:
        cause = "died"
    for said in (cause, cause.removeprefix("was ")):  # the agent's reason may begin with the same cause
        reason = reason.removeprefix(said).removeprefix(" and").lstrip(" ;")
    because = f": {reason}" if reason else ""
    return f"rank {event.get('rank', '?')}{pid} {cause}{_after(event, after_step)}{because}"


def _health(event: dict[str, Any]) -> str:
    host, after = event.get("host", "this node"), event.get("after")
    when = f" after {after}" if after else ""
    findings = event.get("findings")
    said = (
        [str(each.get("sentence")) for each in findings if isinstance(each, dict)] if isinstance(findings, list) else []
    )
    if not said:
        return f"health check of {host}{when}: ok"
    return f"health check of {host}{when}: {'; '.join(dict.fromkeys(said))}"
