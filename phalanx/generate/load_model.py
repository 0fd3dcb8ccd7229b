"""The model and the tokenizer to write text with, by the transformers library: of a run, a Hugging Face folder or an
adapter's."""

import contextlib
import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, fetch_hint
from phalanx.core.run_paths import VOCABULARY_FILES, RunPaths
from phalanx.models.hf_config import find_config_family, read_config
from phalanx.storage import files as storage
from phalanx.storage import mirror

ADAPTER = "adapter_config.json"  # what makes a folder one of PEFT's

# A context that gives what is told (phase, done, total) of the work before the first word.
Phases = Callable[[], contextlib.AbstractContextManager[Callable[[str, int, int], None]]]


def no_progress() -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
    """Phases of which nobody is told."""
    return contextlib.nullcontext(lambda phase, done, total: None)


@contextlib.contextmanager
def load_model(model: Path | str, phases: Phases = no_progress) -> Iterator[tuple[Any, Any]]:
    """The tokenizer and the network of what `model` names: the folder or URL of a run (its newest checkpoint), or a
    local Hugging Face folder, of a model or of PEFT's adapter. Raises ConfigError where there is none that writes
    text."""
    with _open_model(model) as paths:
        folder = paths.root
        if paths.config.is_file():
            with tempfile.TemporaryDirectory() as temporary:
                yield _load_run(paths, Path(temporary) / "model", phases)
        elif (folder / ADAPTER).is_file():
            yield _load(_base_of(folder), folder, phases)
        elif (folder / "config.json").is_file():
            _refuse_encoder(folder)
            yield _load(folder, None, phases)
        else:
            raise ConfigError(
                f"{model} is neither a run folder nor a Hugging Face folder nor an adapter's; name one that holds a "
                f"model{fetch_hint(model)}"
            )


def _refuse_encoder(folder: Path) -> None:
    """Raises ConfigError for a BERT's folder: transformers would make a writer of it, whose text means nothing."""
    family = None
    with contextlib.suppress(ConfigError, RecursionError):  # transformers says what is wrong with it
        family = find_config_family(read_config(folder))
    if family is not None and not family.writes_text:
        raise ConfigError(
            f"{folder} holds a {family.title}, which writes no text; name a model that does, or load this one with the "
            "class of transformers that its config.json names"
        )


def _load_run(paths: RunPaths, folder: Path, phases: Phases) -> tuple[Any, Any]:
    """A run's newest checkpoint by way of `folder`; of a run with adapters these alone, added to the weights that they
    were trained beside, as the whole model would be as large on the disk as in memory."""
    from phalanx.trainer.export import export_run
    from phalanx.trainer.run_folder import read_run_config
    from phalanx.workload.adapters import check_base_weights
    from phalanx.workload.local_copies import fetch_local_copies
    from phalanx.workload.workload import read_model_shape, resolve_model_class

    config = read_run_config(paths)
    if config is not None and config.task.kind == "custom":
        raise ConfigError(
            f"{paths.display_name} trained the network of a task of its own ({config.task.code}), which writes no "
            "text; `phalanx export` gives its parameters"
        )
    if config is not None and config.task.kind in ("masked", "tag", "classify"):
        raise ConfigError(
            f"{paths.display_name} trained a BERT (task.kind {config.task.kind}), which writes no text; `phalanx "
            "export` makes a folder of it that transformers loads"
        )
    apart = config is not None and config.model.lora is not None and config.model.code is None
    with phases() as progress:
        show = functools.partial(progress, "export")
        export_run(paths, folder, None, show, note=False, merge=False if apart else None)
    if config is not None and apart:
        base = fetch_local_copies(config)
        check_base_weights(base, read_model_shape(base, paths), resolve_model_class(base, paths), paths)
        return _load(Path(str(base.model.from_hf)).expanduser(), folder, phases)
    if config is not None:
        resolve_model_class(config, paths).register()  # so that transformers knows a model of a user's own
    return _load(folder, None, phases)


@contextlib.contextmanager
def _open_model(model: Path | str) -> Iterator[RunPaths]:
    """The folder itself, or a copy of what lies at a URL."""
    if not storage.is_url(model):
        yield RunPaths(Path(model))
        return
    with mirror.open_remote_records(str(model)) as paths:
        yield paths


def _base_of(adapter: Path) -> Path:
    """The folder of the model that an adapter belongs to."""
    try:
        named = json.loads((adapter / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{adapter / ADAPTER} cannot be read ({shorten_error(error)}); fetch the folder again"
        ) from None
    base = Path(str(named)).expanduser()
    if not named or not (base / "config.json").is_file():
        raise ConfigError(
            f"{adapter} is an adapter of the model {named}, which is no folder on this machine; put the base model "
            f"there, or set base_model_name_or_path in {adapter / ADAPTER} to its folder"
        )
    return base


def _load(folder: Path, adapter: Path | None, phases: Phases) -> tuple[Any, Any]:
    with phases() as progress:
        progress("load", 0, 1)
        loaded = _load_from_hf(folder, adapter)
        progress("load", 1, 1)
    return loaded


def _load_from_hf(folder: Path, adapter: Path | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    own = adapter is not None and any((adapter / name).is_file() for name in VOCABULARY_FILES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(adapter if own else folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever the missing or damaged file happened to raise
        raise ConfigError(
            f"transformers cannot load a model and its tokenizer from {folder} ({shorten_error(error)}); fetch the "
            "folder's files again or name another"
        ) from error
    if adapter is not None:
        _merge(model, adapter)
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    return tokenizer, model


def _merge(model: Any, folder: Path) -> None:
    """Add an adapter to the weights that it belongs to, as an export of a run with adapters does."""
    import torch

    from phalanx.models.lora import adapter_names, merge_adapter
    from phalanx.models.peft import Adapter
    from phalanx.models.user_model import hf_name

    layers = int(model.config.num_hidden_layers)
    adapter = Adapter(folder, layers, hf_name)
    weights = dict(model.named_parameters())
    rank, shapes = adapter.lora.rank, dict[str, tuple[int, ...]]()
    for matrix, a, b in adapter_names(adapter.lora, layers):
        rows, columns = weights[hf_name(matrix)].shape
        shapes |= {a: (rank, columns), b: (rows, rank)}
    adapter.check_shapes(shapes)

    def tensor(name: str) -> torch.Tensor:
        return adapter.read(name, 0, math.prod(shapes[name])).view(shapes[name])

    with torch.no_grad():
        for matrix, a, b in adapter_names(adapter.lora, layers):
            weight = weights[hf_name(matrix)]
            weight.copy_(merge_adapter(weight, tensor(a), tensor(b), adapter.lora.scale))


def shorten_error(error: Exception) -> str:
    """What another library's error says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
