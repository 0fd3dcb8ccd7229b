"""`phalanx plan`: find the layout of a recipe on a cluster, and simulate long jobs with failures."""

import contextlib
import json
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.data import Overrides, expand_user
from phalanx.config import load
from phalanx.config.operations import ResilienceSection
from phalanx.core.durations import parse_duration
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.records import read_steps
from phalanx.core.renamed import rename_words
from phalanx.core.run_paths import RunPaths
from phalanx.launch.auto_layout import read_folder_spec
from phalanx.layout import hardware
from phalanx.models import hf_config
from phalanx.planner import (
    advice,
    failures,
    large_jobs,
    measured_cluster,
    parse_cluster,
    plan_file,
    present_cluster,
    tables,
)
from phalanx.planner import calibrate as calibration
from phalanx.planner.advice import PlanQuery
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.cost import RecoverySource
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS
from phalanx.planner.failures import DEVICE_MTBF_S, LEAST_S, FailureModel, ObservedFailures
from phalanx.planner.plan import SearchResult
from phalanx.planner.recipe_keys import free_layout
from phalanx.report.logs import open_terminal
from phalanx.storage import files as storage
from phalanx.storage import mirror

STEP_S = 10.0  # for a simulated job without a recipe
CHECKPOINT_S = 10.0
KEPT: dict[RecoverySource, str] = {
    "checkpoints": "checkpoints alone", "memory": "steps in the memory of their node", "copies": "copies of steps",
}  # fmt: skip
# Parameters that only a simulation reads; only a plan; and only the question of a plan, optional for a simulation.
SIMULATED = (
    "gpus", "per_node", "days", "keep", "detect", "restart", "checkpoint_time", "commit_time", "copies_every", "spares",
    "stragglers_every", "stalls_every", "seed",
)  # fmt: skip
PLAN_OPTIONS = ("tokens", "price", "wish", "out")
PLAN_INPUT_OPTIONS = ("cluster_text", "hardware_path")


def plan_command(
    context: typer.Context,
    recipe_path: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A YAML file, such as recipes/llama-3-8b.yaml."),
    ] = None,
    overrides: Overrides = None,
    cluster_text: Annotated[
        str | None,
        typer.Option("--cluster", metavar="TEXT", help="Such as '4x(8xA100-80GB), 2x(8xV100-32GB), 200Gb/s'."),
    ] = None,
    hardware_path: Annotated[
        Path | None, typer.Option("--hardware", metavar="FILE", help="Instead: measurements of `phalanx hardware`.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Number of training tokens, such as 300B.")] = None,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Price of a device for an hour, in any currency.")
    ] = None,
    wish: Annotated[
        str | None, typer.Option("--explain", metavar="KEY=VALUE", help="Compare this layout with the best one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("plan.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Simulate a job with failures over weeks; with a recipe, with the plan's steps."
        ),
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="With --simulate: number of devices. Default: the plan's.")
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="With --simulate: devices per node.")] = 8,
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of the whole job, such as 3h.")
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, max=3650.0, help="With --simulate: simulated time.")] = 30.0,
    keep: Annotated[
        RecoverySource | None,
        typer.Option(
            help="With --simulate: state that survives a failure: checkpoints, each step in memory, or copies on "
            "two nodes. Default: from the recipe's resilience; without a recipe, checkpoints."
        ),
    ] = None,
    detect: Annotated[str, typer.Option(metavar="TIME", help="With --simulate: time to detect a failure.")] = "1s",
    restart: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="With --simulate: time from detection to the first new step. Default: 60s, or as in --run.",
        ),
    ] = None,
    checkpoint_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --simulate: time that a checkpoint blocks training."),
    ] = None,
    commit_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --simulate, without a recipe: time to keep a step in memory."),
    ] = None,
    copies_every: Annotated[
        int,
        typer.Option(
            min=1,
            max=large_jobs.MOST_STEPS,
            help="With --simulate --keep copies, without a recipe: steps between copies (resilience.replicate_every).",
        ),
    ] = 1,
    spares: Annotated[int, typer.Option(min=0, help="With --simulate: spare nodes.")] = 4,
    stragglers_every: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --simulate: interval of stragglers, each slow for an hour.")
    ] = None,
    stalls_every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --simulate: interval of stalls of the whole job, half a minute each."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --simulate: random seed of the failures.")] = 0,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Use the recovery and checkpoint times of this run."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="RUN",
            help="Calibrate from the steps of a run, and write --hardware (hardware.json).",
        ),
    ] = None,
) -> None:
    """Find the fastest layout of a recipe on a cluster, with its predicted step time and memory.

    Keys given as KEY=VALUE are fixed; layout keys of the recipe are chosen again.
    """
    if calibrate is not None:
        if recipe_path is not None:
            raise ConfigError("--calibrate takes no recipe; remove it")
        _refuse_unread(
            context, (*SIMULATED, *PLAN_OPTIONS, "cluster_text", "simulate", "mtbf", "run"), "with --calibrate"
        )
        _calibrate(calibrate, Path("hardware.json") if hardware_path is None else hardware_path, as_json)
        return
    if not simulate:
        _refuse_unread(context, SIMULATED, "without --simulate")
    else:
        _refuse_unread(context, PLAN_OPTIONS, "with --simulate, which writes no plan")
        if recipe_path is None:
            _refuse_unread(context, PLAN_INPUT_OPTIONS, "without a recipe")
            if keep != "copies":
                _refuse_unread(context, ("copies_every",), "without --keep copies")
            if keep in (None, "checkpoints"):
                _refuse_unread(context, ("commit_time",), "without --keep memory or copies")
        else:
            _refuse_unread(context, ("per_node",), "for the devices of a plan")
            _refuse_unread(context, ("commit_time",), "with a recipe, whose plan has the time to keep a step")
            _refuse_unread(context, ("copies_every",), "with a recipe, whose resilience.replicate_every sets it")
    mtbf_s = None if mtbf is None else parse_duration(mtbf, "--mtbf")
    lived = None if run is None else _read_experience(run)
    failures = FailureModel(mtbf_s) if lived is None else lived.to_failure_model(mtbf_s)
    wanted = plan_file.PlanOptions(
        None if tokens is None else parse_cluster.parse_amount(tokens, "--tokens"), price, wish, lived
    )
    if price is not None and not price <= parse_cluster.MOST_AMOUNT:
        raise ConfigError(f"--price {price} is not a price; give the price of a device for an hour, such as 2.5")
    if price is not None and tokens is None:
        raise ConfigError("--price needs the number of tokens; add --tokens, such as --tokens 300B")
    if recipe_path is None and not simulate:
        raise ConfigError("no recipe given; give one, such as recipes/llama-3-8b.yaml, or add --simulate")
    found = None
    if recipe_path is not None:
        found = _find_plan(recipe_path, overrides or [], cluster_text, hardware_path, keep, failures)
    terminal = open_terminal()
    if found is not None and not found[2].plans:
        question, cluster, nothing = found
        if nothing.shortfall is None:
            raise ConfigError(advice.explain_no_layout(question, cluster))
        told = plan_file.short_record(question, cluster, nothing.shortfall)
        if as_json:
            typer.echo(json.dumps(told, indent=2))
        else:
            terminal.print(tables.render_shortfall(told))
        raise typer.Exit(ExitCode.CONFIG)
    if simulate:
        job = _job(found, gpus, per_node, mtbf_s, days, keep, spares, seed, lived)
        if commit_time is not None:
            job = replace(job, commit_s=parse_duration(commit_time, "--commit-time"))
        if found is None:
            job = replace(job, copies_every=copies_every)
        job = replace(
            job,
            detect_s=parse_duration(detect, "--detect"),
            restart_s=job.restart_s if restart is None else parse_duration(restart, "--restart"),
            checkpoint_s=job.checkpoint_s
            if checkpoint_time is None
            else parse_duration(checkpoint_time, "--checkpoint-time"),
            straggler_every_s=_parse_interval(stragglers_every, "--stragglers-every"),
            stall_every_s=_parse_interval(stalls_every, "--stalls-every"),
        )
        resilience = ResilienceSection() if found is None else found[0].config.resilience
        told = large_jobs.simulate_job(job, resilience, found)
        terminal.print(tables.render_simulation(told)) if not as_json else typer.echo(json.dumps(told, indent=2))
        return
    assert found is not None and recipe_path is not None
    question, cluster, plans = found
    told = plan_file.plan_record(question, cluster, plans, wanted, recipe_path.name)
    text = json.dumps(told, indent=1, allow_nan=False) + "\n"
    try:
        write_atomic(_file(out, "--out"), text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}); give another file with --out") from None
    if as_json:
        typer.echo(text, nl=False)
    else:
        terminal.print(tables.render_plan({**told, "out": str(out)}))


def _refuse_unread(context: typer.Context, unread: Collection[str], why: str) -> None:
    """Raises ConfigError for options on the command line without effect, by their parameters' names."""
    said = [each.opts[0] for each in context.command.params if each.name in unread and _is_given(context, each.name)]
    if said:
        raise ConfigError(
            f"{' and '.join(said)} {'has' if said[1:] == [] else 'have'} no effect {why}; remove "
            f"{'it' if said[1:] == [] else 'them'}"
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _find_plan(
    path: Path,
    overrides: list[str],
    text: str | None,
    file: Path | None,
    keep: RecoverySource | None,
    failures: FailureModel,
) -> tuple[PlanQuery, ClusterSpec, SearchResult]:
    """The search of a command line and its results."""
    if (text is None) == (file is None):
        raise ConfigError(
            "a plan needs one cluster; give --cluster, such as --cluster '4x(8xA100-80GB), 200Gb/s', or --hardware "
            "with a file that `phalanx hardware` wrote"
        )
    known = None if file is None else hardware.read_hardware(_file(file, "--hardware"))
    if known is None:
        cluster = parse_cluster.parse_cluster(str(text)).merge_alike_groups()
    else:
        cluster = measured_cluster.cluster_from_hardware(known, measured_cluster.constants_from_hardware(known))
    config = load.load_recipe(path, overrides)
    overrides = rename_words(overrides)
    config = free_layout(config, overrides)
    if keep is not None:
        config = load.update_config(config, large_jobs.keys_for(keep, config.resilience))
    constants = DEFAULT_CONSTANTS if known is None else measured_cluster.constants_from_hardware(known)
    question = PlanQuery(config, read_folder_spec(config), tuple(overrides), constants, failures=failures)
    return question, cluster, question.search(cluster)


def _job(
    found: tuple[PlanQuery, ClusterSpec, SearchResult] | None, gpus: int | None, per_node: int, mtbf_s: float | None,
    days: float, keep: RecoverySource | None, spares: int, seed: int,
    experience_of_run: ObservedFailures | None = None,
) -> large_jobs.LargeJob:  # fmt: skip
    """The simulated job: the plan's devices and steps, or those of the command line with an assumed step."""
    job = large_jobs.LargeJob(
        devices=gpus or 0, per_node=per_node, mtbf_s=0.0, days=days, step_s=STEP_S, step_assumed=True,
        keep=keep or "checkpoints", checkpoint_s=CHECKPOINT_S, spares=spares, seed=seed,
    )  # fmt: skip
    if experience_of_run is not None:
        # The detection time within a recovery is unknown.
        restart_s = job.restart_s if experience_of_run.recovery_s is None else experience_of_run.recovery_s
        checkpoint_s = (
            job.checkpoint_s if experience_of_run.checkpoint_s is None else max(LEAST_S, experience_of_run.checkpoint_s)
        )
        job = replace(job, restart_s=restart_s, checkpoint_s=checkpoint_s)
    if found is None:
        if gpus is None:
            raise ConfigError("--simulate needs the number of devices; give --gpus, or a recipe and a cluster")
        large_jobs.check_device_count(gpus, per_node)
        if gpus <= per_node:
            job = replace(job, possible=tuple(each for each in large_jobs.RECOVERY_SOURCES if each != "copies"))
        if job.keep not in job.possible:
            raise ConfigError(
                f"--keep {job.keep} needs a second node, but --gpus {gpus} is one node of {per_node} devices; "
                "remove --keep, or give more --gpus"
            )
    if found is not None:
        question, _, plans = found
        best = plans.best
        if gpus not in (None, best.devices):
            raise ConfigError(f"--gpus {gpus} and a plan for {best.devices} devices are two clusters; use one of them")
        kept = best.estimate.recovers_from
        if keep not in (None, kept):
            raise ConfigError(
                f"--keep {keep} is not possible on {parse_cluster.format_cluster(best.cluster)}: the plan has "
                f"{KEPT[kept]}, for lack of a second node or of memory; remove it"
            )
        alone = best.cluster.node_of(best.devices - 1) == 0  # devices of one node fail together
        job = replace(
            job.with_plan(best, question),
            devices=best.devices,
            per_node=best.devices if alone else math.gcd(best.devices, *best.cluster.node_sizes),
            checkpoint_s=question.failures.checkpoint_costs(best.estimate, best.devices).checkpoint_s,
            keep=kept,
            group=best.choice.group_devices * best.choice.expert,
        )
    return replace(job, mtbf_s=mtbf_s if mtbf_s is not None else DEVICE_MTBF_S / job.devices)


def _file(path: Path, option: str) -> Path:
    """Path of the file of an option. Raises ConfigError if it cannot be a file."""
    if not path.name:
        raise ConfigError(f"{option} {path} is a folder; give a file in it")
    return expand_user(path, option)


def _parse_interval(text: str | None, what: str) -> float:
    return math.inf if text is None else parse_duration(text, what)


@contextlib.contextmanager
def _open_run_records(run: str) -> Iterator[RunPaths]:
    """Open the records of a run, an existing folder or a URL, for reading."""
    with mirror.open_records(run if storage.is_url(run) else str(expand_user(Path(run), "the run"))) as paths:
        yield paths


def _read_experience(run: str) -> ObservedFailures:
    with _open_run_records(run) as paths:
        return failures.read_observed_failures(paths)


def _calibrate(run: str, out: Path, as_json: bool) -> None:
    """Write the devices, links and host that a run measured."""
    file = _file(out, "--hardware")
    with _open_run_records(run) as paths:
        lesson = calibration.calibrate_run(_read_calibration_run(paths))
    try:
        hardware.write_hardware(file, lesson.hardware)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}); give another file with --hardware") from None
    if as_json:
        typer.echo(json.dumps(hardware.to_json(lesson.hardware) | {"said": list(lesson.findings)}, indent=2))
        return
    for line in calibration.describe_calibration(lesson):
        typer.echo(line)
    typer.echo(f"written to {out}; phalanx plan --hardware {out} uses it")


def _read_calibration_run(paths: RunPaths) -> calibration.MeasuredRun:
    """Configuration and plan of a run folder. Raises ConfigError if one is missing."""
    try:
        told = json.loads(paths.plan.read_text(encoding="utf-8"))
        nodes = present_cluster.parse_node_devices(told["for"]["nodes"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise ConfigError(
            f"{paths.display_name} has no {paths.plan.name} with the devices of the run; give the folder of a run "
            "of a built-in model that `phalanx train` started itself"
        ) from None
    if not paths.config.exists():
        raise ConfigError(
            f"{paths.display_name} has no {paths.config.name} with the configuration of the run; give the folder "
            "of a run"
        )
    config = load.load_saved_recipe(paths.config)
    spec = None
    if config.model.from_hf is not None:
        spec = hf_config.spec_from_config(hf_config.read_config(paths.hf_config.parent), str(paths.hf_config))
    steps = calibration.last_attempt_steps(read_steps(paths.metrics))
    return calibration.MeasuredRun(
        paths.name, config, nodes, hardware.read_hardware_if_valid(paths.hardware), steps, spec
    )
