"""Tables of a plan and of a simulated job, 100 columns wide."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.planner.advice import TERM_NAMES
from phalanx.planner.plan_file import as_overrides
from phalanx.report.formats import format_bytes, format_count, format_seconds

BAR = 30  # characters of a step
LEAST_SHARE = 0.0005  # fraction of the time below which an item is not shown
LEAST_GAIN = 1.005  # speedup below which a change is reported as useless
FEW_STAGES = 8  # whose numbers are listed


def render_plan(record: Mapping[str, Any]) -> RenderableType:
    """The whole of a plan."""
    parts: list[RenderableType] = [_head(record), Text(), _grid(_layout(record)), Text(), _time(record), Text()]
    parts += [_memory(record["expected"]["memory"]), Text(), _grid(_further(record))]
    if record["runners_up"]:
        parts += [Text(), _runners_up(record)]
    if "explain" in record:
        parts += [Text(), *render_explanation(record)]
    return Group(*parts)


def _head(record: Mapping[str, Any]) -> Text:
    model, expected, used = record["model"], record["expected"], record["used"]
    return Text.assemble(
        (f"{format_count(model['parameters'])} parameters on {used['text']}\n", "bold"),
        (f"{format_seconds(expected['step_s'])} a step", "bold green"),
        f" of {format_count(model['global_batch'] * model['seq_len'])} tokens: "
        f"{format_count(expected['tokens_per_s'])} tokens/s, ",
        f"{format_count(expected['tokens_per_s_per_device'])} a device, MFU {100 * expected['mfu']:.1f} %",
    )


def _layout(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    used, keys = record["used"], record["keys"]
    tensor, pipeline = keys["parallel.tensor"], keys["parallel.pipeline"]
    copies = f"{used['copies']} cop{'y' if used['copies'] == 1 else 'ies'} of the model"
    shape = [copies, *([f"{pipeline} stages"] if pipeline > 1 else []), *([f"{tensor} slices"] if tensor > 1 else [])]
    context, expert = keys.get("parallel.context", 1), keys.get("parallel.expert", 1)  # older plans
    divided = [f"rows shared by {context}"] if context > 1 else []
    divided += [f"experts divided over {expert * tensor}"] if expert > 1 else []
    rows = [
        (
            "layout",
            f"{', '.join([' x '.join(shape), *divided])} on {_several(used['devices'], 'device')}, in "
            f"{record['model']['precision']}",
        )
    ]
    rows.append(("", f"keys of {record['out']}: {' '.join(as_overrides(_short(keys)))}"))
    stages, shares, state = keys["parallel.layers_per_stage"], keys["balance.batch"], keys["balance.optimizer_state"]
    if stages != "auto" and (len(set(stages)) > 1 or len(stages) <= FEW_STAGES):
        rows.append(("layers of stages", _runs(stages)))
    if shares != "auto":
        rows.append(("sequences of copies", _runs(shares)))
    if state != "auto":
        parts = _runs(f"{100 * part / sum(state):.3g} %" for part in state)
        rows.append(("parts of the state", f"{parts}; all wait for the update of the largest"))
    if record["idle"]:
        rows.append(("idle", record["idle"]))
    return rows


def _short(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Without lists, which may have a thousand numbers, and without defaults."""
    plain = {
        "parallel.tensor": 1, "parallel.sequence_parallel": True, "parallel.pipeline": 1, "parallel.schedule": "1f1b",
        "optim.double_buffer": False, "parallel.context": 1, "parallel.expert": 1,
    }  # fmt: skip
    return {key: value for key, value in keys.items() if not isinstance(value, list) and plain.get(key) != value}


def _runs(numbers: Iterable[int | str]) -> str:
    """`3 x 27, 10`: neighbours alike together."""
    alike = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    shown = [f"{times} x {number}" if times > 1 else f"{number}" for number, times in alike]
    return ", ".join(shown if len(shown) <= FEW_STAGES else [*shown[: FEW_STAGES - 1], f"... {shown[-1]}"])


def _time(record: Mapping[str, Any]) -> Table:
    terms, step_s = record["expected"]["terms"], record["expected"]["step_s"]
    table = _table("where a step goes")
    for name, value in sorted(terms.items(), key=lambda term: -term[1]):
        if value > LEAST_SHARE * step_s:
            share = value / step_s
            table.add_row(
                TERM_NAMES[name], format_seconds(value), f"{100 * share:.1f} %", Text("█" * round(BAR * share), "cyan")
            )
    return table


def _memory(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("memory of the fullest device")
    for row in rows:
        parts = sorted(row["parts"].items(), key=lambda part: -part[1])
        largest = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts[:3])
        share = row["bytes"] / row["of_bytes"]
        stage = f", stage {row['stage']}" if row["stage"] else ""
        table.add_row(f"{row['kind']}{stage}", format_bytes(row["bytes"]), f"{100 * share:.0f} %", largest)
    return table


def _further(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    saving, rows = record["saving"], []
    assumed = ", the rate of Llama 3's on as many devices" if saving["mtbf_assumed"] else ""
    rows.append(
        (
            "saving",
            f"{_every(saving['checkpoint_steps'])} ({format_seconds(saving['checkpoint_s'])} each"
            f"{_shown_by(saving['checkpoint_from'], ', reckoned')}) for a failure every "
            f"{format_seconds(saving['mtbf_s'])}{assumed} and recoveries of {format_seconds(saving['recovery_s'])}"
            f"{_shown_by(saving['recovery_from'], ' (assumed)')}: goodput {100 * saving['goodput']:.1f} %",
        )
    )
    if saving["commit_s"] is not None:
        rows.append(("", f"each step is committed in memory, {_committed(saving)}"))
    if saving["replicas"] is not None:
        rows.append(("", _replicated(saving["replicas"])))
    if "goal" in record:
        goal = record["goal"]
        money = "" if goal["money"] is None else f", {goal['money']:,.0f} at {goal['price']:g} an hour and device"
        rows.append(
            ("goal", f"{format_count(goal['tokens'])} tokens in {_days(goal['days'])}, failures included{money}")
        )
    helpful = [help_ for help_ in record["helps"] if help_["times"] > LEAST_GAIN]
    useless = [help_["what"] for help_ in record["helps"] if help_["times"] <= LEAST_GAIN]
    for number, help_ in enumerate(helpful):
        rows.append(
            ("" if number else "what would help", f"{help_['what']}: {100 * (help_['times'] - 1):.1f} % faster")
        )
    if useless:
        rows.append(("" if helpful else "what would help", f"not: {', '.join(useless)}"))
    return rows


def _every(steps: int | None) -> str:
    if not steps:
        return "a checkpoint at the end"
    return "a checkpoint after every step" if steps == 1 else f"a checkpoint every {steps} steps"


def _committed(saving: Mapping[str, Any]) -> str:
    if not saving["commit_s"]:
        return "while the next one computes"
    enough = saving["commit_steps"]
    return f"{format_seconds(saving['commit_s'])} each, reckoned" + (
        f"; each {enough:,}th would do" if enough > 1 else ""
    )


def _replicated(replicas: Mapping[str, Any]) -> str:
    which = "each" if replicas["every"] == 1 else f"each {replicas['every']:,}th"
    waits_s = replicas["waits_s"]
    beside = f"which makes a step {format_seconds(waits_s)} longer" if waits_s else "beside all else"
    sent = format_bytes(replicas["node_bytes"])
    return f"of {which} step a node sends {sent} to another one that keeps it too, {beside}"


def _shown_by(run: str | None, otherwise: str) -> str:
    return otherwise if run is None else f" in the run {run}"


def _days(days: float) -> str:
    return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days" if days >= 1 else format_seconds(86400 * days)


def _runners_up(record: Mapping[str, Any]) -> Table:
    table = _table("runners-up, and why they lost")
    best_s = record["expected"]["step_s"] / record["saving"]["goodput"]
    for other in record["runners_up"]:
        keys = other["keys"]
        what = f"{_degrees(keys)}, micro-batch {keys['train.micro_batch']}, {_kept(keys)}"
        where = f" on {other['cluster']}" if other["cluster"] != record["used"]["text"] else ""
        longer = other["step_s"] / other["goodput"] / best_s - 1
        why = "as fast" if longer < LEAST_SHARE else other["why"]
        table.add_row(what + where, f"+{100 * longer:.1f} %", why)
    return table


def _degrees(keys: Mapping[str, Any]) -> str:
    degrees = [f"{name} {keys[f'parallel.{name}']}" for name in ("tensor", "pipeline") if keys[f"parallel.{name}"] > 1]
    return ", ".join([*degrees, f"zero {keys['parallel.zero']}"])


def _kept(keys: Mapping[str, Any]) -> str:
    mode = keys["memory.activations"]
    return "all kept" if mode == "none" else mode if mode == "offload" else f"{mode} recomputation"


def render_explanation(record: Mapping[str, Any]) -> list[RenderableType]:
    """Show the cost of a requested key, compared with the best layout."""
    asked = record["explain"]
    if not asked["counts"]:
        return [Text(f"{asked['wish']} changes nothing that a plan reckons with", "green")]
    if not asked["fits"]:
        text = f"{asked['wish']} fits in no layout: {format_bytes(asked['missing_bytes'])} short on the {asked['kind']}"
        return [Text(text, "yellow")]
    if abs(asked["slower"]) < LEAST_SHARE:
        return [Text(f"{asked['wish']} costs nothing: it is in the best layout, or as good", "green")]
    theirs, ours = asked["expected"], record["expected"]
    # For other numbers of tokens, as many.
    scale = ours["tokens_per_s"] * ours["step_s"] / (theirs["tokens_per_s"] * theirs["step_s"])
    more, less = (f"takes {100 * abs(asked['slower']):.1f} % {word} for a token" for word in ("longer", "less"))
    much = more if asked["slower"] > 0 else less
    table = _table(f"{asked['wish']} {much}: {asked['why']}")
    for name in ours["terms"]:
        mine, other = ours["terms"][name], scale * theirs["terms"][name]
        if max(mine, other) > LEAST_SHARE * ours["step_s"]:
            table.add_row(TERM_NAMES[name], format_seconds(other), "instead of", format_seconds(mine))
    lost, mine = (1 - each["goodput"] for each in (asked, record["saving"]))
    if abs(lost - mine) > LEAST_SHARE:
        table.add_row("lost to failures", f"{100 * lost:.1f} %", "instead of", f"{100 * mine:.1f} %")
    words = f"with {' '.join(as_overrides(_short(asked['keys'])))}"
    return [table, Text(words, "dim")]


def render_shortfall(record: Mapping[str, Any]) -> RenderableType:
    """Where nothing fits: how much is missing, and what to do."""
    lines = Text.assemble(
        ("nothing fits: ", "bold red"),
        f"the layout that needs the least takes {format_bytes(record['needed_bytes'])} on a {record['kind']}"
        f"{' of stage ' + str(record['stage']) if record['stage'] else ''}, {format_bytes(record['missing_bytes'])} "
        "more than it has",
    )
    table = _table("of that")
    for name, value in sorted(record["parts"].items(), key=lambda part: -part[1]):
        if value:
            table.add_row(name, format_bytes(value))
    ways = _table("the cheapest ways out, each of which fits")
    for way in record["ways_out"] or ["none was found: the model is too large for any number of these devices"]:
        ways.add_row(way)
    return Group(lines, Text(), table, Text(), ways)


# ----------------------------------------------------------------------------------------------------------- simulated


def render_simulation(record: Mapping[str, Any]) -> RenderableType:
    """A job over weeks: where its time went, and what would make it better."""
    job, span_s = record["job"], record["span_s"]
    style = "bold red" if record["ended"] else "bold green"
    head = Text.assemble(
        (
            f"{_several(job['devices'], 'device')} on {_several(job['nodes'], 'node')} for {format_seconds(span_s)}",
            "bold",
        ),
        f", a failure every {format_seconds(job['mtbf_s'])}\n",
        ("given up" if record["ended"] else f"goodput {100 * record['goodput']:.2f} %", style),
        f" ({100 * record['closed_form']:.2f} % by Daly's formula, of failures alone); "
        f"{record['steps']:,} steps of {format_seconds(job['step_s'])}{' (assumed)' if job['step_assumed'] else ''}, "
        f"{record['attempts']:,} attempts",
    )  # fmt: skip
    happened = (
        f"{record['hard']:,} nodes lost, {record['soft']:,} processes died, {record['stragglers']:,} stragglers, "
        f"{record['stalls']:,} stalls; {record['fewest']:,} nodes at the worst time"
    )
    rows = [("what happened", happened)]
    if record["ended"]:
        at_s, why = record["ended"]
        rows.append(("given up", f"after {format_seconds(at_s)}: {why}; {_remedy(why)}"))
    if job["checkpoint_steps"] is not None:
        every = f"a checkpoint every {job['checkpoint_steps']} steps, {format_seconds(job['checkpoint_s'])} each"
        rows.append(("saving", f"{every} ({'as asked for' if job['checkpoint_held'] else 'Young, Daly'})"))
    if job["commit_s"]:
        rows.append(("committing", f"{format_seconds(job['commit_s'])} of each step"))
    copies = "and in another node's too" if job["copies_every"] == 1 else f"each {job['copies_every']:,}th on two nodes"
    kept = {"checkpoints": "checkpoints alone", "memory": "each step in memory", "copies": copies}
    words = ", ".join(
        f"{kept[keep]} {100 * value:.2f} %{' (as here)' * (keep == job['keep'])}"
        for keep, value in record["if_kept"].items()
    )
    rows.append(("what is kept", f"{words}; by formula"))
    for aim, most_s in record["recovery_for"]:
        words = (
            f"a recovery of {format_seconds(most_s)}"
            if most_s
            else "no recovery is short enough: saving alone costs too much"
        )
        rows.append((f"for {100 * aim:g} %", words))
    table = _table("where the time goes")
    for name, value in sorted(record["seconds"].items(), key=lambda bucket: -bucket[1]):
        share = value / span_s
        if share > LEAST_SHARE / 5:
            table.add_row(name, format_seconds(value), f"{100 * share:.2f} %", Text("█" * round(BAR * share), "cyan"))
    mix = " in the same mix" if record["mixed"] else ""
    scale = _table(f"the same job on other numbers of devices{mix}, each failing as often")
    columns = (
        "devices",
        "a failure every",
        "a checkpoint every",
        "goodput",
        *(("tokens/s", "of ideal") if record["scaling"] and "tokens_per_s" in record["scaling"][0] else ()),
    )
    scale.add_row(*(Text(name, "dim") for name in columns))
    for row in record["scaling"]:
        cells = [
            f"{row['devices']:,}",
            format_seconds(row["mtbf_s"]),
            "never" if row["checkpoint_every_s"] is None else format_seconds(row["checkpoint_every_s"]),
            f"{100 * row['goodput']:.2f} %",
        ]
        if "tokens_per_s" in row:
            fits = row["tokens_per_s"] is not None
            cells += (
                [format_count(row["tokens_per_s"]), f"{100 * row['of_ideal']:.0f} %"] if fits else ["does not fit", ""]
            )
        scale.add_row(*cells)
    return Group(head, Text(), _grid(rows), Text(), table, Text(), scale)


def _remedy(why: str) -> str:
    """Advice for a simulated job that stopped early."""
    if why.startswith("nodes were lost"):
        return "have more --spares, or wait for those that come back (resilience.on_lost_node, wait_for_node_s)"
    return "raise resilience.max_restarts, or save more often"


# ---------------------------------------------------------------------------------------------------------------- forms


def _several(count_: int, what: str) -> str:
    return f"{count_:,} {what}{'s' * (count_ != 1)}"


def _table(title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold cyan", box=None, padding=(0, 2, 0, 0), show_header=False
    )
    return table


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table
