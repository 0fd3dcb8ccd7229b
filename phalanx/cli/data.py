"""Commands of `phalanx data`: prepare token files ahead of a run, and inspect them."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli import help
from phalanx.config import load, resolve, schema
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import redact_url
from phalanx.storage import files as storage

if TYPE_CHECKING:
    from phalanx.data.prepare import PreparedData

data_app = typer.Typer(help="Prepare training data ahead of a run, and inspect it.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Keys to change, such as optim.lr=3e-4.", autocompletion=help.complete_keys
    ),
]


def expand_user(path: Path, what: str) -> Path:
    """Expand ~ and ~user in a path. Raises ConfigError for an unknown user."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{what} {path} is in the home of an unknown user; write the full path") from None


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
    """Tokenise sources, or all data of a recipe, into token files, which a run with the same settings reuses.

    After an interruption, the same command continues with the next part.
    """
    options = {
        "tokenizer": tokenizer, "tokenizer_vocab": vocab, "text_key": text_key, "held_out": held_out, "cache": cache,
        "workers": workers,
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    if _is_recipe(sources[0]):
        if given:
            key, value = next(iter(given.items()))
            raise ConfigError(f"a recipe has its own settings; write data.{key}={value} after it instead of the option")
        wanted = _recipe_for_data(load.load_recipe(Path(sources[0]), sources[1:]))
    else:
        if recipes := [source for source in sources if _is_recipe(source)]:
            raise ConfigError(f"{recipes[0]} is a recipe after a source; give the recipe alone to prepare its data")
        # A whole recipe, for validation; its model is not used.
        model: dict[str, Any] = {"hidden": 2, "layers": 1, "heads": 1}
        whole = load.build_config({"model": model, "data": {"source": sources, **given}}, "the command line")
        if _are_shards(sources):
            model["architecture"], given["format"] = "bert", "masked"
            whole = load.build_config({"model": model, "data": {"source": sources, **given}}, "the command line")
        wanted = _recipe_for_data(whole)
    try:
        done = _prepare_data(wanted)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command continues with the next part", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    for name, folder in _sets_of(done).items():
        typer.echo(_size_of(name, folder))


@data_app.command("inspect")
def data_inspect(
    subject: Annotated[str, typer.Argument(metavar="SET|RECIPE", help="A folder of token files, or a recipe.")],
    overrides: Overrides = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer folder for samples. Default: the tokenizer of the set.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Documents of each set to show as text.")] = 2,
) -> None:
    """Inspect token sets: counts, lengths, target tokens, and some documents as text."""
    from phalanx.data import inspect
    from phalanx.data.packing import PackingOptions
    from phalanx.report import tables
    from phalanx.report.logs import open_terminal

    form = None
    if _is_recipe(subject):
        whole = _recipe_for_data(load.load_recipe(Path(subject), overrides or []))
        done, wanted = _prepare_data(whole), whole.data
        talks = wanted.format in ("chat", "prompt")
        form = PackingOptions(wanted.seq_len, talks, wanted.isolate_documents, wanted.too_long == "drop")
        folders, tokenizer = _sets_of(done), tokenizer or done.tokenizer_folder
    elif overrides:
        raise ConfigError(f"{overrides[0]} is for a recipe, but {subject} is a token set; remove it")
    elif storage.is_url(subject):
        raise ConfigError(f"{redact_url(subject)} is a URL; give a folder, or a recipe whose data.cache is that URL")
    else:
        folders, known = inspect.find_token_sets(expand_user(Path(subject), "the token set").absolute())
        tokenizer = tokenizer or known
    found = [inspect.compute_stats(name, folder, tokenizer, form, samples) for name, folder in folders.items()]
    tables.print_datasets(open_terminal(), found)


@data_app.command("batch")
def data_batch(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the config.yaml of a run.")],
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(min=1, help="The step, as the console counts them: the first is 1.")] = 1,
    skipped: Annotated[
        int, typer.Option(min=0, help="Batches skipped before it, from the run's rolled_back events.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all token ids.")] = False,
) -> None:
    """Show the samples of a step's global batch: source, tokens and beginning of each.

    The same on any number of ranks; in order of rank each takes a contiguous slice.
    """
    from phalanx.data import loader
    from phalanx.data.loader import Loader
    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.report import tables
    from phalanx.report.logs import open_terminal
    from phalanx.workload.workload import make_workload, read_model_shape

    wanted = _recipe_for_data(load.load_recipe(recipe_path, overrides or []))
    done = _prepare_data(wanted, aside=as_json)
    if wanted.model.vocab_size == "auto" and not wanted.model.from_hf and not wanted.model.preset:
        wanted = load.update_config(wanted, {"model.vocab_size": done.vocab_size})
    wanted, _ = resolve.resolve_autos(wanted, device="cpu", world=1)
    if wanted.task.kind in ("tag", "classify") and wanted.task.labels == "auto":
        wanted = load.update_config(wanted, {"task.labels": ["one", "other"]})  # which does not affect a batch's tokens
    sets = make_workload(wanted, read_model_shape(wanted)).train_data(done.train)
    train = wanted.train
    ordered = Loader(sets, train.global_batch, train.seed, rank=0, schedule=train.batches)
    found = loader.list_samples(ordered, step - 1, skipped)
    if as_json:
        typer.echo(json.dumps({"step": step, "samples": [dataclasses.asdict(one) for one in found]}))
        return
    tokenizer = load_tokenizer(done.tokenizer_folder)
    folders = [str(folder) for folder, _ in done.train]
    tables.print_batch(open_terminal(), step, found, [loader.preview_text(one, tokenizer) for one in found], folders)


@data_app.command("megatron")
def data_megatron(
    token_set: Annotated[Path, typer.Argument(metavar="SET", help="A folder of token files.")],
    prefix: Annotated[Path, typer.Argument(help="PREFIX.bin and PREFIX.idx are written.")],
) -> None:
    """Export a token set as a Megatron indexed dataset."""
    from phalanx.data.megatron_dataset import write_indexed_dataset
    from phalanx.data.record_files import TokenFile

    count = write_indexed_dataset(TokenFile(expand_user(token_set, "the token set")), expand_user(prefix, "the prefix"))
    typer.echo(f"{count:,} documents are now in {prefix}.bin and {prefix}.idx")


def _is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _are_shards(sources: list[str]) -> bool:
    """Whether the sources are HDF5 files, which have masked sequences only."""
    from phalanx.data.records import FileKind
    from phalanx.data.sources import list_files

    return any(file.kind == FileKind.SHARDS for file in list_files(sources))


def _recipe_for_data(whole: schema.Config) -> schema.Config:
    """The recipe with its tokenizer chosen, for its data."""
    from phalanx.data.tokenizer import default_tokenizer
    from phalanx.workload import local_copies

    if whole.task.code is not None:
        raise ConfigError(
            f"task.code {whole.task.code} reads its own data; there are no token files to prepare or inspect"
        )
    wanted = local_copies.fetch_local_copies(whole, weights=False)
    if wanted.data.tokenizer == "auto":
        chosen, _ = default_tokenizer(wanted.model.from_hf)
        wanted = load.update_config(wanted, {"data.tokenizer": chosen})
    return wanted


def _prepare_data(wanted: schema.Config, aside: bool = False) -> "PreparedData":
    from phalanx.data.prepare import prepare_for
    from phalanx.report.logs import phase_progress

    with phase_progress(aside=aside) as progress:
        return prepare_for(wanted, progress)


def _sets_of(done: "PreparedData") -> dict[str, Path]:
    """The token sets by name; those of a mixture are numbered."""
    several = len(done.train) > 1
    train = {f"train {number}" if several else "train": folder for number, (folder, _) in enumerate(done.train, 1)}
    return train | done.held_out


def _size_of(name: str, folder: Path) -> str:
    from phalanx.data.record_files import RecordFile

    file = RecordFile(folder)
    vocabulary = file.facts["vocab_size"]
    return f"{name}: {file.values:,} tokens in {file.count:,} documents, vocabulary {vocabulary:,}, in {folder}"
