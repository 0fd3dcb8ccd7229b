"""Commands train, export, generate, hardware, run and report. Only commands that need torch import it."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli import help
from phalanx.cli.config import RecipeFile
from phalanx.cli.data import Overrides
from phalanx.cli.jobs import RunFolder
from phalanx.config import load, schema
from phalanx.core import faults
from phalanx.core.errors import ConfigError
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths, Url, redact_url
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.storage import files as storage
from phalanx.storage import hub, mirror, permissions

app = typer.Typer()
NodeCount = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="Number of nodes; run this command on each.",
        rich_help_panel=help.SEVERAL_NODES,
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(min=0, help="Rank of this node, from 0.", rich_help_panel=help.SEVERAL_NODES),
]
Spares = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Spare nodes beyond --nodes, which replace a lost one.",
        rich_help_panel=help.SEVERAL_NODES,
    ),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Rendezvous: tcp://HOST:PORT of node 0, or file:///FOLDER on a shared file system.",
        rich_help_panel=help.SEVERAL_NODES,
    ),
]
RendezvousTimeout = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="Seconds that nodes wait for a missing one. Default: 600.",
        rich_help_panel=help.SEVERAL_NODES,
    ),
]
PROMPT = "def "


def _run_dir(text: str) -> str:
    """Parse --run-dir. An empty value, such as an unset shell variable, would be the working folder."""
    if not text:
        raise ConfigError("--run-dir is empty; give a folder, or remove it")
    if storage.is_url(text) and "?" in text:
        raise ConfigError(
            f"--run-dir {redact_url(text)} has a query (?...), to which no file name can be appended; set its "
            "options in the environment or the store's configuration, and remove it"
        )
    return text


@contextlib.contextmanager
def _open_run(run: str) -> Iterator[RunPaths]:
    """Open the records of a run, for commands that also write into its folder."""
    if not storage.is_url(run):
        permissions.restrict_permissions(Path(run))
    with mirror.open_records(run) as paths:
        yield paths


@app.command(rich_help_panel=help.TRAIN)
def train(
    context: typer.Context,
    recipe_path: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Local ranks. Default: one per accelerator; one without accelerators."),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            parser=_run_dir,
            metavar="PATH",
            help="Run folder or URL. Default: runs/ and the recipe's name.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print parameters, memory and FLOPs, without training. Reads no data.",
            rich_help_panel=help.TRYING,
        ),
    ] = False,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Train a tiny copy of the recipe on CPU; without --run-dir its folder's name ends in -shrunk.",
            rich_help_panel=help.TRYING,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print JSON.", rich_help_panel=help.TRYING)
    ] = False,
    verbose: help.Verbose = False,
    node_count: NodeCount = None,
    node_rank: NodeRank = None,
    spares: Spares = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help="Inject a fault, such as kill:rank=1,step=7. May be repeated.",
            rich_help_panel=help.TRYING,
        ),
    ] = None,
) -> None:
    """Train a model; resume the run if its folder exists.

    Uses all accelerators, or CPU ranks. Under torchrun or srun it joins the started ranks.
    """
    from phalanx.launch import child_run, outcome, prepare, rendezvous_options, run

    if as_json and not dry_run:
        raise ConfigError("--json has no effect without --dry-run; add it, or remove --json")
    meeting = rendezvous_options.parse_rendezvous_options(
        node_count, node_rank, rendezvous, rendezvous_timeout, context.obj, spares
    )
    if meeting is not None and dry_run:
        raise ConfigError("--nodes has no effect with --dry-run; use one of them")
    planned = faults.parse_faults(inject or [])
    for name in (name for name, given in (("--inject", planned), ("--verbose", verbose)) if given and dry_run):
        raise ConfigError(f"{name} has no effect with --dry-run; use one of them")
    wanted = load.load_recipe(recipe_path, overrides or [])
    place = run_dir if run_dir is not None else f"runs/{recipe_path.stem}"
    if shrink:
        wanted = outcome.shrink_recipe(wanted, show=not as_json)
        place = run_dir if run_dir is not None else f"{place}-shrunk"
    if dry_run:
        laid = None
        if wanted.parallel.layout == "auto":
            wanted, ranks, laid = prepare.choose_local_layout(wanted, RunPaths(Path(place)), ranks, on_cpu=shrink)
        _dry_run(wanted, ranks or 1, as_json, laid)
        return
    paths = child_run.prepare_run_folder(wanted, place)
    if meeting is None:
        meeting = rendezvous_options.rendezvous_from_allocation(paths, os.environ, spares)
    raise typer.Exit(
        run.train(wanted, paths, ranks, os.environ, meeting, on_cpu=shrink, planned=planned, verbose=verbose)
    )


def _dry_run(wanted: schema.Config, ranks: int, as_json: bool, laid: dict[str, Any] | None) -> None:
    from phalanx.launch.dry_run_estimate import dry_run
    from phalanx.report import run_size

    found = {**dry_run(wanted, ranks), "planned": laid}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        run_size.print_run_size(found)


@app.command(rich_help_panel=help.MODEL)
def export(
    run: RunFolder,
    folder: Annotated[str, typer.Argument(help="The folder or URL to write, which must not exist.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64. Default: as imported, else the compute type.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="For a run that trains adapters: merge them into the whole model.")
    ] = False,
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint of this step. Default: the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the lowest held-out loss (see checkpoint.best).")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME[@BRANCH]", help="Push it to the Hugging Face hub, too; new: private."),
    ] = None,
) -> None:
    """Export a run's checkpoint as a Hugging Face folder; adapters as a PEFT folder."""
    from phalanx.report.logs import phase_progress
    from phalanx.trainer.best_checkpoint import find_best_evaluation
    from phalanx.trainer.export import EXPORT_DTYPES, export_run
    from phalanx.trainer.run_folder import read_run_config

    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
    target = Url(folder.rstrip("/"), storage.TIMEOUT_S) if storage.is_url(folder) else Path(folder)
    if push is not None:
        hub.prepare_push(push, target)
    with phase_progress() as progress, _open_run(run) as paths:
        show = functools.partial(progress, "export")
        wanted = find_best_evaluation(paths).step if best else step
        if best and wanted is None:
            raise ConfigError(f"{redact_url(run)} has no evaluation, so no best checkpoint; remove --best")
        step = export_run(paths, target, dtype, show, merge=merge, note=paths.url is None, step=wanted)
        if paths.url is not None:
            mirror.append_event(paths, EventKind.EXPORTED, folder=str(target), step=step)
        trained = read_run_config(paths)
    adapter = trained is not None and trained.model.lora is not None and not merge
    own = trained is not None and trained.task.code is not None
    made = "PEFT adapter folder" if adapter else "folder" if own else "Hugging Face folder"
    typer.echo(f"step {step} of {redact_url(run)} is now the {made} {redact_url(folder)}")
    if push is not None:
        typer.echo(f"pushed as {hub.push_folder(Path(folder), push, f'Step {step}')}")


@app.command(rich_help_panel=help.MODEL)
def generate(
    model: Annotated[str, typer.Argument(help="A run folder, a Hugging Face folder, an adapter folder, or a URL.")],
    prompt: Annotated[
        str | None,
        typer.Option(help='The prompt (default: "def "), or with --chat a single message.'),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt on each line (.jsonl: key prompt); prints JSON lines.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat with the chat template; Ctrl-C stops an answer, Ctrl-D ends.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of one answer.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Nucleus sampling: the likeliest tokens of this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many tokens; 0: all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(min=1e-6, help="> 1: penalize repeated tokens.")] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed: the same seed gives the same text.")
    ] = 0,
    tensor: Annotated[int, typer.Option(min=1, help="For a run folder: tensor-parallel local ranks.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="For a run folder: pipeline stages.")] = 1,
) -> None:
    """Generate text with a trained model, with the transformers library; on several ranks if it exceeds one device."""
    from phalanx.generate import distributed
    from phalanx.generate import text as generate_text
    from phalanx.report.logs import phase_progress

    if system is not None and not chat:
        raise ConfigError("--system has no effect without --chat; add it, or remove --system")
    if prompt is not None and prompts is not None:
        raise ConfigError("--prompt cannot be combined with --prompts; use one of them")
    sampling = generate_text.Sampling(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    show = functools.partial(phase_progress, aside=True)
    if tensor * pipeline > 1:
        if chat:
            raise ConfigError("--chat cannot be combined with --tensor and --pipeline; use one of them")
        axes = MeshAxes(tensor, pipeline)
        text = prompt if prompt is not None else PROMPT
        raise typer.Exit(distributed.complete_over_ranks(model, axes, text, prompts, sampling))
    if prompts is not None:
        generate_text.complete_file(model, prompts, sampling, chat, system, show)
    elif chat:
        generate_text.converse(model, prompt, system, sampling, show)
    else:
        generate_text.complete_prompt(model, prompt if prompt is not None else PROMPT, sampling, show)


@app.command(rich_help_panel=help.MACHINES)
def hardware(
    context: typer.Context,
    recipe_path: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Local ranks. Default: one per accelerator; one without accelerators."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("hardware.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements and the shares as JSON.")] = False,
    node_count: NodeCount = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
) -> None:
    """Measure devices for a recipe's model, and show each one's share of the batch.

    With --nodes, run it on each node; node 0 then writes the results of all. `phalanx train` measures by itself; with
    balance.hardware=FILE it uses this file.
    """
    from phalanx.launch import measure_devices, rendezvous_options

    meeting = rendezvous_options.parse_rendezvous_options(
        node_count, node_rank, rendezvous, rendezvous_timeout, context.obj
    )
    wanted = load.load_recipe(recipe_path, overrides or [])
    raise typer.Exit(measure_devices.measure_hardware(wanted, ranks, out.expanduser(), as_json, meeting=meeting))


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    rich_help_panel=help.TRAIN,
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local ranks. Default: one per accelerator; one without accelerators.")
    ] = None,
    smp_config: Annotated[
        Path | None, typer.Option(help="Settings of SageMaker's model parallel library, a JSON file.")
    ] = None,
    node_count: NodeCount = None,
    node_rank: NodeRank = None,
    spares: Spares = None,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, help="Minimum number of nodes to continue with. Default: --nodes.")
    ] = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Restarts after early failures. Default: 3 on several nodes, else 0."),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            parser=_run_dir,
            metavar="PATH",
            help="Folder of records, shared by all nodes. Default: runs/ and the script's name.",
        ),
    ] = None,
    no_health: Annotated[bool, typer.Option("--no-health", help="Skip the health check of nodes.")] = False,
) -> None:
    """Run a training script on local ranks, also one written for SageMaker's library. Options come before it.

    Command lines of Megatron (pretrain_llama.py --...) and HetSeq (train.py --task bert ...) are trained as a recipe.
    With --nodes, run it on each node; after a failure the script restarts from its checkpoints. Under torchrun, srun or
    mpirun it joins the started ranks.
    """
    from phalanx.cli.command_lines import run_foreign_command
    from phalanx.launch import rendezvous_options, script_nodes

    run_foreign_command(script, arguments or [], run_dir, nproc, os.environ)
    meeting = rendezvous_options.parse_rendezvous_options(
        node_count, node_rank, rendezvous, rendezvous_timeout, context.obj, spares
    )
    if run_dir is not None and storage.is_url(run_dir):
        raise ConfigError(f"--run-dir {redact_url(run_dir)} is a URL; give a folder that all nodes share")
    paths = RunPaths(Path(run_dir if run_dir is not None else f"runs/{Path(script).stem}"))
    meeting = meeting or rendezvous_options.rendezvous_from_allocation(paths, os.environ, spares)
    if meeting is not None:
        permissions.restrict_permissions(paths.root)
        meeting = replace(meeting, to_stderr=True)
        wanted = script_nodes.make_script_job(
            script, arguments or [], smp_config, meeting, min_nodes, max_restarts, not no_health
        )
        raise typer.Exit(script_nodes.run_script_on_node(wanted, paths, nproc, meeting))
    given = {"--min-nodes": min_nodes, "--run-dir": run_dir, "--no-health": no_health or None}
    for name in [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{name} has no effect without --nodes; add it, or remove {name}")
    raise typer.Exit(
        script_nodes.run_script_alone(script, arguments or [], os.environ, nproc, smp_config, max_restarts)
    )


@app.command(rich_help_panel=help.WATCH)
def report(run: RunFolder) -> None:
    """Write report.html from a run's records, also while it runs."""
    from phalanx.report import html

    with _open_run(run) as paths:
        html.write_report(paths)
        if paths.url is not None:
            mirror.publish_file(paths, paths.report)
        typer.echo(f"wrote {paths.display_name}/{paths.report.name}" if paths.url else f"wrote {paths.report}")


def main() -> None:
    """The `phalanx` command, for entry points that an older version has installed."""
    from phalanx.cli import root

    root.main()
