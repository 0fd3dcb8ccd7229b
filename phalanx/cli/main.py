"""The command line. It hands work to the rest; torch is imported only by commands that need it."""

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
from phalanx.storage import mirror, permissions

app = typer.Typer()
NodeCount = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="Nodes of the run, each of which is started by this command.",
        rich_help_panel=help.SEVERAL_NODES,
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(min=0, help="Which of the nodes this one is, from 0.", rich_help_panel=help.SEVERAL_NODES),
]
Spares = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Nodes beyond --nodes that wait, ready to take the place of a lost one.",
        rich_help_panel=help.SEVERAL_NODES,
    ),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where nodes meet: tcp://HOST:PORT of node 0, or file:///FOLDER they share.",
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
    """An empty one, as of a shell's variable that was never set, would be the working folder."""
    if not text:
        raise ConfigError("--run-dir is empty, so there is no folder to put the run into; name one or leave it out")
    if storage.is_url(text) and "?" in text:
        raise ConfigError(
            f"--run-dir {redact_url(text)} has a query (?...), behind which no file of the run could be named; give "
            "such options in the environment or the store's own configuration, and leave it out"
        )
    return text


@contextlib.contextmanager
def _open_run(run: str) -> Iterator[RunPaths]:
    """The files of a run that is read, beside which something is written."""
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
        typer.Option(min=1, help="Local ranks. Default: one per accelerator; one on a machine without."),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            parser=_run_dir,
            metavar="PATH",
            help="Where everything of this run goes, a folder or URL. Default: runs/ and the recipe's name.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what it would be: parameters, memory, FLOPs. Reads no data.",
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
    node_count: NodeCount = None,
    node_rank: NodeRank = None,
    spares: Spares = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help="Have something go wrong, such as kill:rank=1,step=7. May be repeated.",
            rich_help_panel=help.TRYING,
        ),
    ] = None,
) -> None:
    """Train a model; in a folder that holds the same run already, go on where it stopped.

    Uses the accelerators there are, or CPU ranks. Under torchrun or srun it joins the ranks that were started.
    """
    from phalanx.launch import child_run, outcome, prepare, rendezvous_options, run

    if as_json and not dry_run:
        raise ConfigError("--json belongs to --dry-run; add that or leave it out")
    meeting = rendezvous_options.parse_rendezvous_options(
        node_count, node_rank, rendezvous, rendezvous_timeout, context.obj, spares
    )
    if meeting is not None and dry_run:
        raise ConfigError("--dry-run looks at a recipe on this machine alone; leave --nodes out")
    planned = faults.parse_faults(inject or [])
    if planned and dry_run:
        raise ConfigError("--inject has nothing to happen in with --dry-run; leave one of them out")
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
    raise typer.Exit(run.train(wanted, paths, ranks, os.environ, meeting, on_cpu=shrink, planned=planned))


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
    folder: Annotated[str, typer.Argument(help="The folder or URL to write; nothing may be there yet.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64. Default: as imported, else the compute type.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run that trains adapters: the whole model with them in it.")
    ] = False,
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint of this step. Default: the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the least held-out loss (see checkpoint.best).")
    ] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder; adapters as a folder that PEFT loads."""
    from phalanx.report.logs import phase_progress
    from phalanx.trainer.best_checkpoint import find_best_evaluation
    from phalanx.trainer.export import EXPORT_DTYPES, export_run
    from phalanx.trainer.run_folder import read_run_config

    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
    target = Url(folder.rstrip("/"), storage.TIMEOUT_S) if storage.is_url(folder) else Path(folder)
    with phase_progress() as progress, _open_run(run) as paths:
        show = functools.partial(progress, "export")
        wanted = find_best_evaluation(paths).step if best else step
        if best and wanted is None:
            raise ConfigError(f"{redact_url(run)} has not been evaluated, so none of its checkpoints is the best")
        step = export_run(paths, target, dtype, show, merge=merge, note=paths.url is None, step=wanted)
        if paths.url is not None:
            mirror.append_event(paths, EventKind.EXPORTED, folder=str(target), step=step)
        trained = read_run_config(paths)
    adapter = trained is not None and trained.model.lora is not None and not merge
    own = trained is not None and trained.task.code is not None
    made = "PEFT adapter folder" if adapter else "folder" if own else "Hugging Face folder"
    typer.echo(f"step {step} of {redact_url(run)} is now the {made} {redact_url(folder)}")


@app.command(rich_help_panel=help.MODEL)
def generate(
    model: Annotated[str, typer.Argument(help="A run folder, a Hugging Face folder, an adapter folder, or a URL.")],
    prompt: Annotated[
        str | None,
        typer.Option(help='The text to go on from (default: "def "), or with --chat the one message to answer.'),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt a line (.jsonl: under the key prompt); prints JSON lines.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Converse by the chat template; Ctrl-C cuts an answer off, Ctrl-D ends.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: what the model is told before.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most, in one answer.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Draw among the likeliest tokens of this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among this many tokens; 0: among all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(min=1e-6, help="Above 1: avoid tokens that were there.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed writes the same text.")] = 0,
    tensor: Annotated[int, typer.Option(min=1, help="Of a run: local ranks that share every layer.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Of a run: stages, one behind the other.")] = 1,
) -> None:
    """Write text with a trained model, by the transformers library; by several ranks where no device holds it."""
    from phalanx.generate import distributed
    from phalanx.generate import text as generate_text
    from phalanx.report.logs import phase_progress

    if system is not None and not chat:
        raise ConfigError("--system is for a conversation; add --chat or leave it out")
    if prompt is not None and prompts is not None:
        raise ConfigError("--prompt and --prompts both say what to go on from; leave one of them out")
    sampling = generate_text.Sampling(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    show = functools.partial(phase_progress, aside=True)
    if tensor * pipeline > 1:
        if chat:
            raise ConfigError("--chat needs the model on one device; leave it out, or --tensor and --pipeline")
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
        typer.Option(min=1, help="Local ranks. Default: one per accelerator; one on a machine without."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("hardware.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, what is written and the shares.")] = False,
    node_count: NodeCount = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
) -> None:
    """Measure devices for a recipe's model, and show the shares that follow.

    Those of this machine, or of all nodes that this command is started on; node 0 then shows and writes what all have
    found. `phalanx train` does it by itself; with balance.hardware=FILE it takes what was measured before.
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
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script itself is given.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local ranks. Default: one per accelerator; one on a machine without.")
    ] = None,
    smp_config: Annotated[
        Path | None, typer.Option(help="Settings of SageMaker's model parallel library, a JSON file.")
    ] = None,
    node_count: NodeCount = None,
    node_rank: NodeRank = None,
    spares: Spares = None,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes with which it still goes on, without a spare. Default: --nodes.")
    ] = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="Times that ranks start again after failing early. Default: 3 on several nodes, or 0."
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            parser=_run_dir,
            metavar="PATH",
            help="Where nodes keep records; they share it. Default: runs/ and the script's name.",
        ),
    ] = None,
    no_health: Annotated[bool, typer.Option("--no-health", help="Start on nodes that are not fit, too.")] = False,
) -> None:
    """Run a script of your own on local ranks, one written for SageMaker's library too. Options come before it.

    On several nodes, each started by this command, it is started again from its own checkpoints when something dies.
    Under torchrun, srun or mpirun it is one of the ranks that were started.
    """
    from phalanx.compat import run as script_run
    from phalanx.launch import rendezvous_options, script_nodes

    meeting = rendezvous_options.parse_rendezvous_options(
        node_count, node_rank, rendezvous, rendezvous_timeout, context.obj, spares
    )
    if run_dir is not None and storage.is_url(run_dir):
        raise ConfigError(f"--run-dir {redact_url(run_dir)} is a URL; of a script, name a folder that all nodes share")
    paths = RunPaths(Path(run_dir if run_dir is not None else f"runs/{Path(script).stem}"))
    if meeting is None:
        meeting = rendezvous_options.rendezvous_from_allocation(paths, os.environ, spares)
    if meeting is not None:
        permissions.restrict_permissions(paths.root)
        meeting = replace(meeting, to_stderr=True)
        wanted = script_nodes.make_script_job(
            script, arguments or [], smp_config, meeting, min_nodes, max_restarts, not no_health
        )
        raise typer.Exit(script_nodes.run_script_on_node(wanted, paths, nproc, meeting))
    given = {"--min-nodes": min_nodes, "--run-dir": run_dir, "--no-health": no_health or None}
    for name in [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{name} belongs to a script on several nodes; give --nodes too, or leave it out")
    raise typer.Exit(script_run.run_script(script, arguments or [], os.environ, nproc, smp_config, max_restarts))


@app.command(rich_help_panel=help.WATCH)
def report(run: RunFolder) -> None:
    """Write report.html from a run's records alone; a run that is going on may be looked at too."""
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
