"""The command line. It hands work to the rest; torch is imported only by commands that need it."""

import contextlib
import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx import __version__, config, mirror, recipe, storage
from phalanx.errors import ConfigError, PhalanxError
from phalanx.records import ExitCode, Kind, RunPaths, Url, shown

if TYPE_CHECKING:
    from phalanx.data.prepare import Prepared

app = typer.Typer(
    name="phalanx",
    help="Train large models on the GPUs you really have, with one loss curve.",
    epilog="Any command takes --debug: errors then show where they come from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at recipes and their keys.", no_args_is_help=True)
data_app = typer.Typer(help="Prepare training data ahead of a run, and look at it.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, such as recipes/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to change, such as optim.lr=3e-4.")
]
RunFolder = Annotated[str, typer.Argument(help="A run folder, or its URL.")]


def _run_dir(text: str) -> str:
    """An empty one, as of a shell's variable that was never set, would be the working folder."""
    if not text:
        raise ConfigError("--run-dir is empty, so there is no folder to put the run into; name one or leave it out")
    if storage.is_url(text) and "?" in text:
        raise ConfigError(
            f"--run-dir {shown(text)} has a query (?...), behind which no file of the run could be named; give such "
            "options in the environment or the store's own configuration, and leave it out"
        )
    return text


def _run_paths(place: str, wanted: config.Config) -> RunPaths:
    """The files of a run that is to be trained in a folder or at a URL."""
    if storage.is_url(place):
        return mirror.working(place, wanted.data.cache, wanted.resilience.storage_timeout_s)
    return RunPaths(Path(place))


@contextlib.contextmanager
def _looked_at(run: str) -> Iterator[RunPaths]:
    """The files of a run that is only read; one at a URL is fetched for as long."""
    if not storage.is_url(run):
        yield RunPaths(Path(run))
        return
    with mirror.looked_at(run) as paths:
        yield paths


@app.command()
def train(
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
        bool, typer.Option("--dry-run", help="Only say what it would be: parameters, memory, FLOPs. Reads no data.")
    ] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Train a tiny copy of the recipe on CPU, in a run folder of its own.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    node_count: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Nodes of the run, each of which is started by this command.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of the nodes this one is, from 0.")] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where nodes meet: tcp://HOST:PORT of node 0, or file:///FOLDER they share."),
    ] = None,
    rendezvous_timeout: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds that nodes wait for a missing one. Default: 600.")
    ] = None,
) -> None:
    """Train a model; in a folder that holds the same run already, go on where it stopped.

    Uses the accelerators there are, or CPU ranks. Under torchrun or srun it joins the ranks that were started.
    """
    from phalanx import launch, nodes

    if as_json and not dry_run:
        raise ConfigError("--json belongs to --dry-run; add that or leave it out")
    meeting = nodes.meeting(node_count, node_rank, rendezvous, rendezvous_timeout, os.environ)
    if meeting is not None and dry_run:
        raise ConfigError("--dry-run looks at a recipe on this machine alone; leave --nodes out")
    wanted = recipe.load(recipe_path, overrides or [])
    place = run_dir if run_dir is not None else f"runs/{recipe_path.stem}"
    if shrink:
        wanted = launch.shrink(wanted, show=not as_json)
        place = f"{place.rstrip('/')}-shrunk"
    if dry_run:
        _dry_run(wanted, ranks or 1, as_json)
        return
    paths = _run_paths(place, wanted)
    if meeting is not None:
        raise typer.Exit(nodes.train(wanted, paths, ranks, meeting, os.environ, on_cpu=shrink))
    raise typer.Exit(launch.train(wanted, paths, ranks, os.environ, on_cpu=shrink))


def _dry_run(wanted: config.Config, ranks: int, as_json: bool) -> None:
    from phalanx.report import sizes
    from phalanx.train import dry_run

    found = dry_run.dry_run(wanted, ranks)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        sizes.show(found)


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[str, typer.Argument(help="The folder or URL to write; nothing may be there yet.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64. Default: as imported, else the compute type.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run that trains adapters: the whole model with them in it.")
    ] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder; adapters as a folder that PEFT loads."""
    from phalanx.report.progress import phases
    from phalanx.train.export import EXPORT_DTYPES, export_run
    from phalanx.train.folder import saved_config

    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
    target = Url(folder.rstrip("/"), storage.TIMEOUT_S) if storage.is_url(folder) else Path(folder)
    with phases() as progress, _looked_at(run) as paths:
        show = functools.partial(progress, "export")
        step = export_run(paths, target, dtype, show, merge=merge, note=paths.url is None)
        if paths.url is not None:
            mirror.note(paths, Kind.EXPORTED, folder=str(target), step=step)
        trained = saved_config(paths)
    adapter = trained is not None and trained.model.lora is not None and not merge
    own = trained is not None and trained.task.code is not None
    made = "PEFT adapter folder" if adapter else "folder" if own else "Hugging Face folder"
    typer.echo(f"step {step} of {shown(run)} is now the {made} {shown(folder)}")


@app.command()
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
) -> None:
    """Write text with a trained model, by the transformers library."""
    from phalanx import generation
    from phalanx.report.progress import phases

    if system is not None and not chat:
        raise ConfigError("--system is for a conversation; add --chat or leave it out")
    if prompt is not None and prompts is not None:
        raise ConfigError("--prompt and --prompts both say what to go on from; leave one of them out")
    sampling = generation.Sampling(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    show = functools.partial(phases, aside=True)
    if prompts is not None:
        generation.complete_all(model, prompts, sampling, chat, system, show)
    elif chat:
        generation.converse(model, prompt, system, sampling, show)
    else:
        generation.complete(model, prompt if prompt is not None else "def ", sampling, show)


@app.command()
def hardware(
    recipe_path: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Local ranks. Default: one per accelerator; one on a machine without."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("hardware.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, what is written and the shares.")] = False,
) -> None:
    """Measure the devices of this machine for a recipe's model, and show the shares that follow.

    `phalanx train` does it by itself; with balance.hardware=FILE it takes what was measured before.
    """
    from phalanx import survey

    wanted = recipe.load(recipe_path, overrides or [])
    raise typer.Exit(survey.survey(wanted, ranks, out.expanduser(), os.environ, as_json))


@app.command()
def report(run: RunFolder) -> None:
    """Write report.html from a run's records alone; a run that is going on may be looked at too."""
    from phalanx.report import html

    with _looked_at(run) as paths:
        html.write(paths)
        if paths.url is not None:
            mirror.publish(paths, paths.report)
        typer.echo(f"wrote {paths.shown}/{paths.report.name}" if paths.url else f"wrote {paths.report}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    typer.echo(json.dumps(config.Config.model_json_schema(), indent=2))


@config_app.command("show")
def config_show(
    recipe_path: RecipeFile,
    overrides: Overrides = None,
) -> None:
    """Print a recipe with all defaults filled in; `auto` is what a run resolves when it starts."""
    typer.echo(recipe.to_yaml(recipe.load(recipe_path, overrides or [])), nl=False)


@config_app.command("presets")
def config_presets() -> None:
    """List the model shapes that `model.preset` knows."""
    from phalanx.models.spec import PRESETS, parameter_count

    for name, spec in PRESETS.items():
        shape = f"{spec.layers} layers, width {spec.hidden}, {spec.heads} heads ({spec.kv_heads} kv)"
        typer.echo(
            f"{name:16} {parameter_count(spec) / 1e9:7.2f} billion parameters, {shape}, vocabulary {spec.vocab_size}"
        )


@data_app.command("prepare")
def data_prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE|RECIPE", help="Sources as in data.source; or one recipe, and KEY=VALUE."),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer folder. Default: byte-level BPE trained on the sources.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=257, max=2**20, help="Vocabulary of a trained tokenizer. Default: 4096.")
    ] = None,
    text_key: Annotated[
        str | None, typer.Option(help="The key that holds the text of a record. Default: text.")
    ] = None,
    held_out: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="Share of documents kept for evaluation. Default: 0.02.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Where token files go, a folder or URL. Default: ~/.cache/phalanx.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that tokenise. Default: one per core.")] = None,
) -> None:
    """Tokenise sources, or all data of a recipe, into token files; a run with the same settings then starts at once.

    May be stopped at any time and started again: finished parts are kept.
    """
    options = {
        "tokenizer": tokenizer, "tokenizer_vocab": vocab, "text_key": text_key, "held_out": held_out, "cache": cache,
        "workers": workers,
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    if _is_recipe(sources[0]):
        if given:
            key, value = next(iter(given.items()))
            raise ConfigError(f"a recipe has its own settings; write data.{key}={value} behind it instead of an option")
        wanted = _data_of(recipe.load(Path(sources[0]), sources[1:]))
    else:
        if recipes := [source for source in sources if _is_recipe(source)]:
            raise ConfigError(
                f"{recipes[0]} is a recipe and stands behind a source; prepare all data of a recipe by naming it alone"
            )
        # A whole recipe, so that it is checked as one; of its model nothing is asked.
        model: dict[str, Any] = {"hidden": 2, "layers": 1, "heads": 1}
        if _are_shards(sources):
            model["architecture"], given["format"] = "bert", "masked"
        wanted = _data_of(recipe.check({"model": model, "data": {"source": sources, **given}}, "the command line"))
    try:
        done = _prepared(wanted)
    except KeyboardInterrupt:
        typer.echo("interrupted; the parts that are done are kept, and the same command goes on from there", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    for name, folder in _sets_of(done).items():
        typer.echo(_size_of(name, folder))


@data_app.command("inspect")
def data_inspect(
    subject: Annotated[str, typer.Argument(metavar="SET|RECIPE", help="A folder of token files, or a recipe.")],
    overrides: Overrides = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer folder for samples. Default: the one the set was made with.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Documents of each set to show as text.")] = 2,
) -> None:
    """Show what token sets hold: counts, lengths, what is learnt, and some documents as text."""
    from phalanx.data import inspect
    from phalanx.data.packing import Form
    from phalanx.report import dataset
    from phalanx.report.terminal import open_terminal

    form = None
    if _is_recipe(subject):
        whole = _data_of(recipe.load(Path(subject), overrides or []))
        done, wanted = _prepared(whole), whole.data
        talks = wanted.format in ("chat", "prompt")
        form = Form(wanted.seq_len, talks, wanted.isolate_documents, wanted.too_long == "drop")
        folders, tokenizer = _sets_of(done), tokenizer or done.tokenizer_folder
    elif overrides:
        raise ConfigError(f"{overrides[0]} changes a recipe, but {subject} is none; leave it out")
    elif storage.is_url(subject):
        raise ConfigError(
            f"{shown(subject)} is a URL, and token sets are looked at on this machine; name a folder, or a recipe "
            "whose data.cache is that URL"
        )
    else:
        folders, known = inspect.sets_of(Path(subject).expanduser().absolute())
        tokenizer = tokenizer or known
    found = [inspect.facts(name, folder, tokenizer, form, samples) for name, folder in folders.items()]
    dataset.show(open_terminal(), found)


@data_app.command("megatron")
def data_megatron(
    token_set: Annotated[Path, typer.Argument(metavar="SET", help="A folder of token files.")],
    prefix: Annotated[Path, typer.Argument(help="PREFIX.bin and PREFIX.idx are written.")],
) -> None:
    """Write a token set as an indexed dataset of Megatron's."""
    from phalanx.data.megatron import write_pair
    from phalanx.data.tokens import TokenFile

    count = write_pair(TokenFile(token_set.expanduser()), prefix.expanduser())
    typer.echo(f"{count:,} documents are now in {prefix}.bin and {prefix}.idx")


def _is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _are_shards(sources: list[str]) -> bool:
    """Whether HDF5 files are named, which hold nothing but masked sequences."""
    from phalanx.data.sources import SHARDS, list_files

    return any(file.kind == SHARDS for file in list_files(sources))


def _data_of(whole: config.Config) -> config.Config:
    """The recipe with its tokenizer chosen, for its data."""
    from phalanx.data.tokenizer import default_tokenizer
    from phalanx.train import copies

    if whole.task.code is not None:
        raise ConfigError(
            f"task.code {whole.task.code} reads its own data, as it is; there is nothing to prepare or to look at here"
        )
    wanted = copies.fetched(whole, weights=False)
    if wanted.data.tokenizer == "auto":
        chosen, _ = default_tokenizer(wanted.model.from_hf)
        wanted = recipe.update(wanted, {"data.tokenizer": chosen})
    return wanted


def _prepared(wanted: config.Config) -> "Prepared":
    from phalanx.data.prepare_records import prepare_for
    from phalanx.report.progress import phases

    with phases() as progress:
        return prepare_for(wanted, progress)


def _sets_of(done: "Prepared") -> dict[str, Path]:
    """The token sets by name; those of a mixture are numbered."""
    several = len(done.train) > 1
    train = {f"train {number}" if several else "train": folder for number, (folder, _) in enumerate(done.train, 1)}
    return train | done.held_out


def _size_of(name: str, folder: Path) -> str:
    from phalanx.data.inspect import opened

    file = opened(folder)
    return (
        f"{name}: {file.tokens:,} tokens in {file.documents:,} documents, vocabulary {file.vocab_size:,}, in {folder}"
    )


def _version(value: bool) -> None:
    if value:
        typer.echo(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


def _open_closed_streams() -> None:
    """Give standard streams that the caller closed (`>&-`) /dev/null; else the next file opened would become one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: the exit code has to do
        typer.secho(f"error: {text}", err=True, fg=typer.colors.RED)


def main() -> None:
    """The entry point: runs a command and turns its errors into a sentence and an exit code."""
    _open_closed_streams()
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(args=arguments, prog_name="phalanx")
    except PhalanxError as error:
        if debug:
            traceback.print_exc()
        _complain(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            hint = "this is a fault of Phalanx; --debug shows where"
            _complain(f"{type(error).__name__}: {error} ({hint})")
        sys.exit(ExitCode.FAILED)
