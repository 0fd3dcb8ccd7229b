"""Plain words for what the records say: one sentence per event, and numbers as people write them."""

import math
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import HELD_OUT


class EventMark(NamedTuple):
    """How an event is shown: a symbol, its twin for terminals without Unicode, and a tone.

    Tones: "bad", "warn", "good", "info" and "quiet"; each display gives them colours of its own.
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
    """The mark of a kind of event; a kind that this version does not know gets a quiet one."""
    return _MARKS[EventKind(kind)] if kind in _MARKS else EventMark("·", "-", "quiet")


def format_seconds(value: float) -> str:
    """A duration given in seconds, in two units at most: `85 ms`, `4.2 s`, `3 min 05 s`, `2 h 10 min`, `3 d 04 h`."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms" if value > 0 else "0 s"
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_clock(value: float) -> str:
    """A duration given in seconds as a clock shows it: `1:05`, `2:03:09`."""
    whole = max(0, round(value))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def format_bytes(count_bytes: float) -> str:
    """A number of bytes in binary units: `512 B`, `1.5 MiB`, `79.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count_bytes < 999.5:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.4g} TiB"


def format_count(value: float) -> str:
    """A large number in three digits: `950`, `12.4k`, `1.24M`, `8.03B`, `15T`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.4g}T"


def format_perplexity(loss: float) -> str:
    """e to the loss (nats per token), as text; a loss too large for a double has none worth printing."""
    return f"{math.exp(loss):,.1f}" if loss < 20 else "over 1e8"


def finite_number(event: dict[str, Any], key: str) -> float | None:
    """A finite number of a record, or None where it is missing, null, not finite or not a number."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def describe_event(event: dict[str, Any], after_step: int | None = None) -> str:
    """One event in plain words, without its mark and its time.

    `after_step` is the last step known when the event happened, for events that carry none. Details that are missing
    (an older or a foreign writer) are left out; a kind that this version does not know is spelled out with its details.
    """
    match event.get("kind"):
        case EventKind.RUN_STARTED:
            return "run started" + _started(event)
        case EventKind.AUTO_RESOLVED:
            return f"{event.get('key', 'a setting')} = {event.get('value')}" + _because(event)
        case EventKind.LAYOUT_CHOSEN:
            again = " as at the last start" if event.get("again") else ""
            why = f"; {event['why']}" if event.get("why") else ""
            return f"layout{again}: {event.get('layout', '?')}{why}; phalanx plan says more"
        case EventKind.PREDICTION_CHECKED:
            return _compared(event)
        case EventKind.ATTEMPT_STARTED:
            return f"attempt {event.get('attempt', '?')} started" + _pids(event)
        case EventKind.RESUMED:
            step = event.get("step", "?")
            if event.get("memory"):
                return f"resumed from step {step}, which was kept in memory"
            return f"resumed from the checkpoint of step {step}"
        case EventKind.MEASURING:
            return "measuring the devices" + _because(event)
        case EventKind.MEASURED:
            return _measured(event)
        case EventKind.DEVICES_CHANGED:
            return "the run goes on with other devices, for which the work is divided anew" + _because(event)
        case EventKind.WORK_SPLIT | EventKind.WORK_REBALANCED:
            return _shared(event)
        case EventKind.COMM_SCHEDULE_CHANGED:
            rate = finite_number(event, "bytes_per_s")  # named where it is that of the network
            at = "what was measured" if rate is None else f"a link of {format_bytes(rate)}/s"
            return f"transfers in a new order from step {event.get('step', '?')} on, for {at}"
        case EventKind.MEMORY_LIMITED:
            return "micro-batches are smaller where memory ran out before" + _limits(event)
        case EventKind.CHECKPOINT_SAVED:
            how = "was there already" if event.get("already_there") else "saved" + _cost(event)
            return f"checkpoint of step {event.get('step', '?')} {how}"
        case EventKind.CHECKPOINT_FAILED:
            return f"checkpoint of step {event.get('step', '?')} could not be saved" + _because(event)
        case EventKind.CHECKPOINT_SKIPPED:
            return f"no checkpoint of step {event.get('step', '?')} was begun" + _because(event)
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
            return f"injected on rank {event.get('rank', '?')}, as asked for: {event.get('fault', 'a fault')}"
        case EventKind.WORKER_DIED:
            return _died(event, after_step)
        case EventKind.RESTARTED:
            return f"starting again: attempt {event.get('attempt', '?')}" + _because(event)
        case EventKind.GAVE_UP:
            return "not started again" + _because(event)
        case EventKind.NODE_JOINED:
            ranks = event.get("ranks", "?")
            return f"{_node(event)} joined" + (f" with {ranks} rank{'' if ranks == 1 else 's'}" if ranks else "")
        case EventKind.NODE_LOST:
            return f"{_node(event)} was lost" + _because(event)
        case EventKind.INCIDENT:
            return _incident(event)
        case EventKind.STOP_REQUESTED:
            then = (
                "finishing the step, saving, then leaving" if "script" not in event else "the script's ranks get it too"
            )
            return f"got {signal_name(event.get('signal'))}: {then}"
        case EventKind.STOPPED:
            return "stopped" + _after(event, after_step) + "; the same command goes on from here"
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
            above = f": {format_bytes(peak)} above its start at most" if peak is not None else ""
            return f"memory of step {event.get('step', '?')} recorded{above}; see {event.get('file', '?')}"
        case EventKind.HEALTH:
            return _health(event)
        case EventKind.WARNING:
            return str(event.get("message", "warning"))
    details = {key: value for key, value in event.items() if key not in ("kind", "time", "attempt")}
    return ", ".join([str(event.get("kind") or "event"), *(f"{key} {value}" for key, value in details.items())])


def set_name(event: Mapping[str, Any]) -> str:
    """The set that an evaluation was on, as it is shown; what older writers evaluated was held out."""
    name = event.get("set", HELD_OUT)
    return "held-out" if name == HELD_OUT else str(name)


def signal_name(value: object) -> str:
    """`SIGKILL` for 9, "9" or "SIGKILL"; a number without a name stays `signal 99`."""
    text = str(value)
    if not text.isdecimal():
        return text
    known = {int(member): member.name for member in signal.Signals}
    return known.get(int(text), f"signal {text}")


def _incident(event: dict[str, Any]) -> str:
    """What failed, where, what was done, and how long it took until a step was done again, where steps are told of."""
    said = f"{event.get('what', 'something failed')}; {event.get('done', 'the ranks start again')}"
    took, step = finite_number(event, "seconds"), event.get("step")
    if took is None:
        return said
    if step is None:
        return f"{said}, {format_seconds(took)} after it was seen"
    return f"{said}; training went on with step {step} after {format_seconds(took)}"


def _because(event: dict[str, Any]) -> str:
    reason = event.get("reason")
    return f": {reason}" if reason else ""


def _node(event: dict[str, Any]) -> str:
    return f"node {event.get('node', '?')}" + (f" ({event['host']})" if event.get("host") else "")


def _after(event: dict[str, Any], after_step: int | None) -> str:
    step = after_step if event.get("step") is None else event["step"]
    return f" after step {step}" if step is not None else ""


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
    """How many parameters the run of a `run_started` event has, and how many in adapters where it trains those."""
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
    """Devices that differ, each with its speed; of many the slowest and the fastest."""
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
    """Shares from a step on, why, and what a step was expected to take before and after; of many ranks the extremes."""
    shares, parts = event.get("shares"), event.get("parts")
    again = "new shares" if event.get("kind") == EventKind.WORK_REBALANCED else "shares"
    if not isinstance(shares, list) or not shares:
        return f"{again} from step {event.get('step', '?')} on"
    said = f"{again} from step {event.get('step', '?')} on: {_by_rank(shares)}"
    each = finite_number(event, "parts")
    said += f" in {each:.0f} micro-batches each" if each is not None and each > 1 else ""
    said += f" in {_by_rank(parts)} micro-batches" if isinstance(parts, list) and parts else ""
    said += f", {event['why']}" if event.get("why") else ""
    before, after = finite_number(event, "before_s"), finite_number(event, "after_s")
    if before is not None and after is not None:
        said += f"; a step should take {format_seconds(after)} instead of {format_seconds(before)}"
    return said


def _by_rank(numbers: list[Any]) -> str:
    known = [value for each in numbers if (value := finite_number({"n": each}, "n")) is not None]
    return "+".join(map(str, numbers)) if len(numbers) <= 8 or not known else f"{min(known)} to {max(known)}"


def _compared(event: dict[str, Any]) -> str:
    """A step's time beside what was expected of it, the part that is off, and memory likewise."""
    thought, took = finite_number(event, "predicted_s"), finite_number(event, "measured_s")
    if not thought or took is None:
        return "a step was compared with what was expected of it"
    said = (
        f"a step takes {format_seconds(took)}, {format_difference(took, thought)} {format_seconds(thought)} predicted"
    )
    said += f" from {event['basis']}" if event.get("basis") else ""
    for row in event.get("terms") or []:
        if isinstance(row, dict) and row.get("name") == event.get("off") and event.get("off"):
            measured, predicted = finite_number(row, "measured_s") or 0.0, finite_number(row, "predicted_s") or 0.0
            said += f"; off is {event['off']}: {format_seconds(measured)} instead of {format_seconds(predicted)}"
    held, thought_of = finite_number(event, "measured_bytes"), finite_number(event, "predicted_bytes")
    if held and thought_of:
        said += f"; memory {format_bytes(held)}, {format_difference(held, thought_of)} {format_bytes(thought_of)}"
    return said


def format_difference(value: float, than: float) -> str:
    """`3.1 % more than`, or less; `as much as` where they differ by less than a thousandth."""
    more = value / than - 1
    if abs(more) < 0.0005:
        return "as much as"
    return f"{100 * abs(more):.3g} % {'more' if more > 0 else 'less'} than"


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
    """The phases of rank 0 that tile a step; collectives lie within them."""
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


def eval_scores(event: dict[str, Any]) -> dict[str, float]:
    """The scores of an evaluation, such as its accuracy."""
    found = event.get("scores")
    return (
        {str(name): value for name in found if (value := finite_number(found, name)) is not None}
        if isinstance(found, dict)
        else {}
    )


def describe_scores(event: dict[str, Any]) -> str:
    """What an evaluation says beside its loss: its scores; without any, of tokens the perplexity."""
    if found := eval_scores(event):
        return ", ".join(f"{name} {value:.4f}" for name, value in found.items())
    loss = finite_number(event, "loss")
    return (
        f"perplexity {format_perplexity(loss)}" if loss is not None and event.get("unit", "tokens") == "tokens" else ""
    )


def _rolled_back(event: dict[str, Any]) -> str:
    back = f"went back from step {event.get('from_step', '?')} to the checkpoint of step {event.get('step', '?')}"
    first, last = event.get("first"), event.get("last")
    past = "" if first is None else f"; the data of steps {first} to {last} are passed over"
    return back + _because(event) + past


def _corrupted(event: dict[str, Any]) -> str:
    rows = [row for row in event.get("devices") or [] if isinstance(row, dict)]
    names = ", ".join(
        f"rank {row.get('rank', '?')} ({row.get('device', '?')} of {row.get('host', '?')})" for row in rows
    )
    sure = all(row.get("certain") for row in rows)
    who = names if sure else f"one of {names}"
    mended = "repaired from another rank" if event.get("repaired") else "not repaired"
    what = event.get("parameters") or "parameters"
    return f"silent corruption behind step {event.get('step', '?')}: {who} held another {what} than it must; {mended}"


def _slow(event: dict[str, Any]) -> str:
    ranks = event.get("ranks") or ["?"]
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    for_s, times = finite_number(event, "seconds"), finite_number(event, "factor")
    since = f" for {format_seconds(for_s)}" if for_s is not None else ""
    slower = f"{times:.1f} times" if times is not None else "many times"
    return f"{names} has needed {slower} as long as at its best{since}; its node is worth looking at, or being drained"


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
    for said in (cause, cause.removeprefix("was ")):  # the agent's reason may begin with the same words
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
        return f"nothing was found to be wrong with {host}{when}"
    return f"health of {host}{when}: {'; '.join(dict.fromkeys(said))}"
