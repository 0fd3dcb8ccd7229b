"""Plain words for what the records say: one sentence per event, and numbers as people write them."""

import math
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.core.events import Kind
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import HELD_OUT


class Mark(NamedTuple):
    """How an event is shown: a symbol, its twin for terminals without Unicode, and a tone.

    Tones: "bad", "warn", "good", "info" and "quiet"; each display gives them colours of its own.
    """

    symbol: str
    ascii: str
    tone: str


_MARKS = {
    Kind.RUN_STARTED: Mark("▶", ">", "info"),
    Kind.RESOLVED: Mark("·", "-", "quiet"),
    Kind.PLANNED: Mark("◆", "*", "info"),
    Kind.COMPARED: Mark("◆", "*", "info"),
    Kind.ATTEMPT_STARTED: Mark("·", "-", "quiet"),
    Kind.RESUMED: Mark("↻", "@", "info"),
    Kind.MEASURING: Mark("·", "-", "quiet"),
    Kind.MEASURED: Mark("◆", "*", "info"),
    Kind.DEVICES_CHANGED: Mark("!", "!", "warn"),
    Kind.MEMORY_LIMITED: Mark("!", "!", "warn"),
    Kind.SHARED: Mark("·", "-", "quiet"),
    Kind.RESHARED: Mark("⇄", "=", "info"),
    Kind.ORDERED: Mark("·", "-", "quiet"),
    Kind.CHECKPOINT_SAVED: Mark("·", "-", "quiet"),
    Kind.CHECKPOINT_FAILED: Mark("!", "!", "bad"),
    Kind.CHECKPOINT_SKIPPED: Mark("!", "!", "warn"),
    Kind.CHECKPOINT_REFUSED: Mark("!", "!", "warn"),
    Kind.EVALUATED: Mark("◆", "*", "info"),
    Kind.STEP_SKIPPED: Mark("!", "!", "warn"),
    Kind.ROLLED_BACK: Mark("↻", "@", "warn"),
    Kind.CORRUPTED: Mark("✗", "X", "bad"),
    Kind.SLOW: Mark("!", "!", "warn"),
    Kind.INJECTED: Mark("!", "!", "warn"),
    Kind.WORKER_DIED: Mark("✗", "X", "bad"),
    Kind.RESTARTED: Mark("↻", "@", "warn"),
    Kind.GAVE_UP: Mark("✗", "X", "bad"),
    Kind.NODE_JOINED: Mark("·", "-", "quiet"),
    Kind.NODE_LOST: Mark("✗", "X", "bad"),
    Kind.INCIDENT: Mark("↻", "@", "warn"),
    Kind.SIGNALLED: Mark("!", "!", "warn"),
    Kind.STOPPED: Mark("■", "#", "warn"),
    Kind.FINISHED: Mark("✓", "+", "good"),
    Kind.EXPORTED: Mark("✓", "+", "good"),
    Kind.PROFILED: Mark("◇", "*", "info"),
    Kind.MEMORY_RECORDED: Mark("◇", "*", "info"),
    Kind.HEALTH: Mark("◆", "*", "info"),
    Kind.WARNING: Mark("!", "!", "warn"),
}


WITHIN = ("gather", "reduce")  # phases of a profile that happen inside the others


def mark(kind: str) -> Mark:
    """The mark of a kind of event; a kind that this version does not know gets a quiet one."""
    return _MARKS[Kind(kind)] if kind in _MARKS else Mark("·", "-", "quiet")


def seconds(value: float) -> str:
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


def clock(value: float) -> str:
    """A duration given in seconds as a clock shows it: `1:05`, `2:03:09`."""
    whole = max(0, round(value))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def size(count_bytes: float) -> str:
    """A number of bytes in binary units: `512 B`, `1.5 MiB`, `79.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count_bytes < 999.5:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.4g} TiB"


def count(value: float) -> str:
    """A large number in three digits: `950`, `12.4k`, `1.24M`, `8.03B`, `15T`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.4g}T"


def perplexity(loss: float) -> str:
    """e to the loss (nats per token), as text; a loss too large for a double has none worth printing."""
    return f"{math.exp(loss):,.1f}" if loss < 20 else "over 1e8"


def number(event: dict[str, Any], key: str) -> float | None:
    """A finite number of a record, or None where it is missing, null, not finite or not a number."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def sentence(event: dict[str, Any], after_step: int | None = None) -> str:
    """One event in plain words, without its mark and its time.

    `after_step` is the last step known when the event happened, for events that carry none. Details that are missing
    (an older or a foreign writer) are left out; a kind that this version does not know is spelled out with its details.
    """
    match event.get("kind"):
        case Kind.RUN_STARTED:
            return "run started" + _started(event)
        case Kind.RESOLVED:
            return f"{event.get('key', 'a setting')} = {event.get('value')}" + _because(event)
        case Kind.PLANNED:
            again = " as at the last start" if event.get("again") else ""
            why = f"; {event['why']}" if event.get("why") else ""
            return f"layout{again}: {event.get('layout', '?')}{why}; phalanx plan says more"
        case Kind.COMPARED:
            return _compared(event)
        case Kind.ATTEMPT_STARTED:
            return f"attempt {event.get('attempt', '?')} started" + _pids(event)
        case Kind.RESUMED:
            step = event.get("step", "?")
            if event.get("memory"):
                return f"resumed from step {step}, which was kept in memory"
            return f"resumed from the checkpoint of step {step}"
        case Kind.MEASURING:
            return "measuring the devices" + _because(event)
        case Kind.MEASURED:
            return _measured(event)
        case Kind.DEVICES_CHANGED:
            return "the run goes on with other devices, for which the work is divided anew" + _because(event)
        case Kind.SHARED | Kind.RESHARED:
            return _shared(event)
        case Kind.ORDERED:
            rate = number(event, "bytes_per_s")  # named where it is that of the network
            at = "what was measured" if rate is None else f"a link of {size(rate)}/s"
            return f"transfers in a new order from step {event.get('step', '?')} on, for {at}"
        case Kind.MEMORY_LIMITED:
            return "micro-batches are smaller where memory ran out before" + _limits(event)
        case Kind.CHECKPOINT_SAVED:
            how = "was there already" if event.get("already_there") else "saved" + _cost(event)
            return f"checkpoint of step {event.get('step', '?')} {how}"
        case Kind.CHECKPOINT_FAILED:
            return f"checkpoint of step {event.get('step', '?')} could not be saved" + _because(event)
        case Kind.CHECKPOINT_SKIPPED:
            return f"no checkpoint of step {event.get('step', '?')} was begun" + _because(event)
        case Kind.CHECKPOINT_REFUSED:
            return f"checkpoint of step {event.get('step', '?')} was not used" + _because(event)
        case Kind.EVALUATED:
            return f"{set_name(event)} loss" + _evaluated(event)
        case Kind.STEP_SKIPPED:
            return f"step {event.get('step', '?')} skipped" + _because(event)
        case Kind.ROLLED_BACK:
            return _rolled_back(event)
        case Kind.CORRUPTED:
            return _corrupted(event)
        case Kind.SLOW:
            return _slow(event)
        case Kind.INJECTED:
            return f"injected on rank {event.get('rank', '?')}, as asked for: {event.get('fault', 'a fault')}"
        case Kind.WORKER_DIED:
            return _died(event, after_step)
        case Kind.RESTARTED:
            return f"starting again: attempt {event.get('attempt', '?')}" + _because(event)
        case Kind.GAVE_UP:
            return "not started again" + _because(event)
        case Kind.NODE_JOINED:
            ranks = event.get("ranks", "?")
            return f"{_node(event)} joined" + (f" with {ranks} rank{'' if ranks == 1 else 's'}" if ranks else "")
        case Kind.NODE_LOST:
            return f"{_node(event)} was lost" + _because(event)
        case Kind.INCIDENT:
            return _incident(event)
        case Kind.SIGNALLED:
            then = (
                "finishing the step, saving, then leaving" if "script" not in event else "the script's ranks get it too"
            )
            return f"got {signal_name(event.get('signal'))}: {then}"
        case Kind.STOPPED:
            return "stopped" + _after(event, after_step) + "; the same command goes on from here"
        case Kind.FINISHED:
            took = number(event, "seconds")
            last = " in the last attempt" if (number(event, "attempt") or 1) > 1 else ""
            spent = f", {seconds(took)}{last}" if took is not None else ""
            return "finished" + _after(event, after_step) + spent + _because(event)
        case Kind.EXPORTED:
            return f"exported to {event.get('folder', '?')}"
        case Kind.PROFILED:
            return _profiled(event)
        case Kind.MEMORY_RECORDED:
            peak = number(event, "peak_bytes")
            above = f": {size(peak)} above its start at most" if peak is not None else ""
            return f"memory of step {event.get('step', '?')} recorded{above}; see {event.get('file', '?')}"
        case Kind.HEALTH:
            return _health(event)
        case Kind.WARNING:
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
    took, step = number(event, "seconds"), event.get("step")
    if took is None:
        return said
    if step is None:
        return f"{said}, {seconds(took)} after it was seen"
    return f"{said}; training went on with step {step} after {seconds(took)}"


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
    world = number(event, "world")
    if sizes := parameters(event):
        parts.append(sizes)
    if world:
        parts.append(f"{world:.0f} rank{'s' if world > 1 else ''}")
    if event.get("device"):
        parts.append(f"on {event['device']}")
    return f": {', '.join(parts)}" if parts else ""


def parameters(event: dict[str, Any]) -> str:
    """How many parameters the run of a `run_started` event has, and how many in adapters where it trains those."""
    whole, trained = number(event, "parameters"), number(event, "trainable")
    if not whole:
        return ""
    return f"{count(whole)} parameters" + (f" and {count(trained)} in adapters" if trained and trained != whole else "")


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
        (rate, f"rank {row.get('rank', '?')} ({row.get('model', 'a device')}) {count(rate)}")
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and (rate := number(row, "sequences_per_s"))
    ]
    shown = rates if len(rates) <= 4 else [min(rates), max(rates)]
    speeds = f": sequences/s of {', '.join(text for _, text in shown)}" if rates else ""
    few = "" if len(shown) == len(rates) else f", the slowest and the fastest of {len(rates)}"
    took = number(event, "seconds")
    return "devices measured" + (f" in {seconds(took)}" if took is not None else "") + speeds + few


def _shared(event: dict[str, Any]) -> str:
    """Shares from a step on, why, and what a step was expected to take before and after; of many ranks the extremes."""
    shares, parts = event.get("shares"), event.get("parts")
    again = "new shares" if event.get("kind") == Kind.RESHARED else "shares"
    if not isinstance(shares, list) or not shares:
        return f"{again} from step {event.get('step', '?')} on"
    said = f"{again} from step {event.get('step', '?')} on: {_by_rank(shares)}"
    each = number(event, "parts")
    said += f" in {each:.0f} micro-batches each" if each is not None and each > 1 else ""
    said += f" in {_by_rank(parts)} micro-batches" if isinstance(parts, list) and parts else ""
    said += f", {event['why']}" if event.get("why") else ""
    before, after = number(event, "before_s"), number(event, "after_s")
    if before is not None and after is not None:
        said += f"; a step should take {seconds(after)} instead of {seconds(before)}"
    return said


def _by_rank(numbers: list[Any]) -> str:
    known = [value for each in numbers if (value := number({"n": each}, "n")) is not None]
    return "+".join(map(str, numbers)) if len(numbers) <= 8 or not known else f"{min(known)} to {max(known)}"


def _compared(event: dict[str, Any]) -> str:
    """A step's time beside what was expected of it, the part that is off, and memory likewise."""
    thought, took = number(event, "predicted_s"), number(event, "measured_s")
    if not thought or took is None:
        return "a step was compared with what was expected of it"
    said = f"a step takes {seconds(took)}, {apart(took, thought)} {seconds(thought)} predicted"
    said += f" from {event['basis']}" if event.get("basis") else ""
    for row in event.get("terms") or []:
        if isinstance(row, dict) and row.get("name") == event.get("off") and event.get("off"):
            measured, predicted = number(row, "measured_s") or 0.0, number(row, "predicted_s") or 0.0
            said += f"; off is {event['off']}: {seconds(measured)} instead of {seconds(predicted)}"
    held, thought_of = number(event, "measured_bytes"), number(event, "predicted_bytes")
    if held and thought_of:
        said += f"; memory {size(held)}, {apart(held, thought_of)} {size(thought_of)}"
    return said


def apart(value: float, than: float) -> str:
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
    written, took = number(event, "bytes"), number(event, "seconds")
    parts = [size(written)] if written is not None else []
    parts += [seconds(took)] if took is not None else []
    return f" ({' in '.join(parts)})" if parts else ""


def _profiled(event: dict[str, Any]) -> str:
    """The phases of rank 0 that tile a step; collectives lie within them."""
    phases = event.get("phases")
    pairs = phases.items() if isinstance(phases, dict) else ()
    shares = [
        f"{name} {seconds(mine)}"
        for name, values in pairs
        if name not in WITHIN and isinstance(values, list) and values and (mine := number({"s": values[0]}, "s"))
    ]
    of_step = f": {', '.join(shares)} of a step" if shares else ""
    steps = f"{event.get('first', '?')} to {event.get('last', '?')}"
    return f"steps {steps} profiled{of_step}; traces in {event.get('folder', '?')}"


def _evaluated(event: dict[str, Any]) -> str:
    loss = number(event, "loss")
    if loss is None:
        return f" is not a number{_after(event, None)}"
    beside = said_of(event)
    return f" {loss:.4f}{f', {beside}' if beside else ''}{_after(event, None)}"


def scores(event: dict[str, Any]) -> dict[str, float]:
    """The scores of an evaluation, such as its accuracy."""
    found = event.get("scores")
    return (
        {str(name): value for name in found if (value := number(found, name)) is not None}
        if isinstance(found, dict)
        else {}
    )


def said_of(event: dict[str, Any]) -> str:
    """What an evaluation says beside its loss: its scores; without any, of tokens the perplexity."""
    if found := scores(event):
        return ", ".join(f"{name} {value:.4f}" for name, value in found.items())
    loss = number(event, "loss")
    return f"perplexity {perplexity(loss)}" if loss is not None and event.get("unit", "tokens") == "tokens" else ""


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
    for_s, times = number(event, "seconds"), number(event, "factor")
    since = f" for {seconds(for_s)}" if for_s is not None else ""
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
