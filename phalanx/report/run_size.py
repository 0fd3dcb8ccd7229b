"""Tables of a dry run for a terminal: parameters, memory, FLOPs."""

from typing import Any

from rich.table import Table
from rich.text import Text

from phalanx.core.records import EventKind
from phalanx.report import event_text, formats
from phalanx.report.logs import open_terminal


def print_run_size(found: dict[str, Any]) -> None:
    """Print the tables of `phalanx.launch.dry_run_estimate`, with its assumptions."""
    terminal = open_terminal()
    model, assumed, work, disk = (found[name] for name in ("model", "assumed", "work", "disk"))
    ranks = assumed["ranks"]
    memory = [(name, formats.format_bytes(value)) for name, value in found["memory"].items()]
    kept = [(name, formats.format_bytes(value)) for name, value in found["host_memory"].items()]
    table = Table.grid(padding=(0, 3, 0, 0))
    for title, rows in {
        "parameters": _parameters(model),
        **({"layout": _layout(found["layout"])} if found["layout"] else {}),
        _whose(ranks, bool(found["layout"])): [
            *memory,
            ("together", formats.format_bytes(found["memory_total"])),
        ],
        **({"in host memory for each rank": kept} if kept else {}),
        f"activations of one {'sequence' if work['unit'] == 'tokens' else 'sample'}": [
            (f"memory.activations={mode}", formats.format_bytes(value)) for mode, value in found["sequence"].items()
        ],
        **({"longest row": _longest_rows(found["longest_rows"])} if found.get("longest_rows") else {}),
        "work": _work(work),
        "disk": [
            ("a checkpoint", f"{formats.format_bytes(disk['checkpoint'])}, {disk['checkpoints_kept']} kept"),
            ("an export", formats.format_bytes(disk["export"])),
            *([("its adapter only", formats.format_bytes(disk["adapter"]))] if disk["adapter"] else []),
        ],
    }.items():
        table.add_row(Text(title, style="bold cyan"))
        for name, value in rows:
            table.add_row(f"  {name}", value, style="bold" if name == "together" else None)
    terminal.print(Text(model["shape"], style="bold"))
    terminal.print(table)
    if found.get("planned") is not None:
        terminal.print(Text(event_text.describe_event({"kind": EventKind.LAYOUT_CHOSEN, **found["planned"]})))
    for note in size_notes(assumed, bool(kept)):
        terminal.print(note, style="dim")


def size_notes(assumed: dict[str, Any], keeps: bool = False) -> list[str]:
    """The assumptions, and what the numbers exclude."""
    zero = "" if assumed["zero"] is None else f" with parallel.zero {assumed['zero']}"
    found = [
        f"Estimated for {assumed['dtype']}, engine {assumed['engine']}{zero}, {assumed['micro_batch']} sample"
        f"{'s' if assumed['micro_batch'] > 1 else ''} at a time, memory.activations={assumed['activations']}."
    ]
    if assumed["by_formula"]:
        state = "" if assumed["zero"] is None else ", as the shares of the state,"
        found.append(f"Activations and loss{state} are estimates from the planner's formulas.")
    if assumed["zero_needs"]:
        one, two = (assumed["zero_needs"][zero] for zero in ("1", "2"))
        # few units save nothing
        between = f"2 where it has {formats.format_bytes(two)}, " if two < one else ""
        found.append(
            f"parallel.zero is auto: the run takes 1 where each rank has {formats.format_bytes(one)} free, "
            f"{between}else 3."
        )
    if assumed["micro_batch_measured"]:
        found.append(
            "train.micro_batch is auto: the run measures what fits; each further sequence takes the same memory."
        )
    if assumed["activations_measured"]:
        found.append("memory.activations is auto: the run takes the first mode that fits; estimated for none.")
    if assumed["vocabulary_trained"]:
        found.append("The tokenizer is not trained yet: a small text gives it fewer tokens than assumed here.")
    if assumed["labels_assumed"]:
        found.append("task.labels is auto: the data define the labels; the head is estimated for two.")
    if keeps:
        found.append(
            "Copies in host memory outlive the ranks (resilience.in_memory_checkpoints, "
            "resilience.replicate_every); auto keeps them if they fit. On CPUs host memory has the state itself, "
            "and gradients beside replicas."
        )
    found.append(
        "Not included: savings of compilation, unused blocks of the allocator, buffers of collectives, the driver "
        "and torch itself; allow a fifth of the device for them. FLOPs are those of the model, without recomputation."
    )
    return found


def _whose(ranks: int, unlike: bool) -> str:
    if unlike:
        return f"memory of the fullest of {ranks} ranks"
    return f"memory of one of {ranks} ranks" if ranks > 1 else "memory"


def _longest_rows(by_gib: dict[str, int]) -> list[tuple[str, str]]:
    def shown(length: int) -> str:
        return f"{formats.format_count(length)} positions" if length else "none fits"

    return [(f"on devices of {gib} GiB", shown(length)) for gib, length in by_gib.items()]


def _layout(layout: dict[str, Any]) -> list[tuple[str, str]]:
    tensor, pipeline, copies = layout["tensor"], layout["pipeline"], layout["copies"]
    what = [f"pipeline {pipeline} ({layout['schedule']})"] if pipeline > 1 else []
    if tensor > 1:
        what.append(f"tensor {tensor}{' with' if layout['sequence'] else ' without'} sequence")
    what.append(f"{copies} cop{'y' if copies == 1 else 'ies'}")
    rows = [("ranks", " x ".join(what))]
    of_slice = " in each slice" if tensor > 1 else ""
    for number, rank in enumerate(layout["ranks"]):
        layers = ", ".join(
            f"{start} to {stop - 1}" if stop - start > 1 else f"{start}" for _, start, stop in rank["stages"]
        )
        name = f"place {number}: layers {layers}" if pipeline > 1 else "each"
        parameters, memory = formats.format_count(rank["parameters"]), formats.format_bytes(rank["memory"])
        held = f"{parameters} parameters{of_slice}, {memory}"
        rows.append((name, held))
    return rows


def _parameters(model: dict[str, Any]) -> list[tuple[str, str]]:
    whole = model["parameters"]
    rows = [
        (name, f"{formats.format_count(count)}  {100 * count / whole:4.1f} %") for name, count in model["parts"].items()
    ]
    trained = f"{formats.format_count(model['trained'])}  {100 * model['trained'] / whole:.3g} %"
    return [("all", f"{whole:,}"), *rows, ("trained", trained)]


def _work(work: dict[str, Any]) -> list[tuple[str, str]]:
    unit, flops = work["unit"], f"{work['flops_per_token']:.3g}"
    step, run = f"{work['sequences_per_step']:,} samples", f"{work['epochs']} epochs of the data, not counted here"
    if work["steps"] is not None:
        run = f"{work['steps']:,} steps, {formats.format_count(work['tokens'])} {unit}"
    if unit == "tokens":
        step = f"{work['sequences_per_step']:,} sequences, {formats.format_count(work['tokens_per_step'])} tokens"
        flops += f", {work['flops_per_token_causal']:.3g} with causal attention"
    if work["rampup_batch"] is not None:
        start, increment, samples = work["rampup_batch"]
        step += f"; the first {samples:,} sequences in steps of {start:,}, growing by {increment:,}"
    if not work["flops_per_token"]:
        return [("a step", step), ("the run", run), ("FLOPs", "not known")]
    return [
        ("a step", step),
        ("the run", run),
        (f"FLOPs of a {unit[:-1]}", flops),
        ("FLOPs of a step", f"{work['flops_per_step']:.3g}"),
        *([] if work["flops"] is None else [("FLOPs of the run", f"{work['flops']:.3g}")]),
    ]
