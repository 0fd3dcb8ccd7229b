"""Loading the model and the tokenizer for text generation, by the transformers library: of a run, a Hugging Face
folder or an adapter."""

import contextlib
import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.run_paths import VOCABULARY_FILES, RunPaths
from phalanx.models.hf_config import find_config_family, read_config
from phalanx.storage import files as storage
from phalanx.storage import hub, mirror
from phalanx.storage.local_copies import fetch_folder

ADAPTER = "adapter_config.json"  # identifies a folder of PEFT's adapter

# A context that yields a progress function (phase, done, total) for the work before the first token.
Phases = Callable[[], contextlib.AbstractContextManager[Callable[[str, int, int], None]]]


def no_progress() -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
    """Progress that is not shown."""
    return contextlib.nullcontext(lambda phase, done, total: None)


@contextlib.contextmanager
def load_model(model: Path | str, phases: Phases = no_progress) -> Iterator[tuple[Any, Any]]:
    """The tokenizer and the network of `model`: the folder or URL of a run (its newest checkpoint), or a Hugging
    Face folder or a name on the hub, of a model or of PEFT's adapter. Raises ConfigError if it is not a
    text-generating model."""
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
                "model"
            )


def _refuse_encoder(folder: Path) -> None:
    """Raises ConfigError for the folder of a BERT: transformers would generate meaningless text with it."""
    family = None
    with contextlib.suppress(ConfigError, RecursionError):  # transformers reports the error
        family = find_config_family(read_config(folder))
    if family is not None and not family.writes_text:
        raise ConfigError(
            f"{folder} holds a {family.title}, which writes no text; name a model that does, or load this one with the "
            "class of transformers that its config.json names"
        )


def _load_run(paths: RunPaths, folder: Path, phases: Phases) -> tuple[Any, Any]:
    """Load a run's newest checkpoint by way of `folder`. For a run with adapters only these are exported, and
    added to their base weights, since the whole model would be as large on the disk as in memory."""
    from phalanx.trainer.export import export_run
    from phalanx.trainer.run_folder import read_run_config
    from phalanx.workload.adapters import check_base_weights
    from phalanx.workload.local_copies import fetch_local_copies
    from phalanx.workload.workload import read_model_shape, resolve_model_class

    config = read_run_config(paths)
    if config is not None and config.task.kind == "custom":
        raise ConfigError(
            f"{paths.display_name} trained the network of a custom task ({config.task.code}), which writes no "
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
        resolve_model_class(config, paths).register()  # so that transformers knows a custom model class
    return _load(folder, None, phases)


@contextlib.contextmanager
def _open_model(model: Path | str) -> Iterator[RunPaths]:
    """The folder itself, or a copy of one on the hub or at a URL."""
    if hub.is_hub_name(str(model)):
        yield RunPaths(fetch_folder(str(model)))
        return
    if not storage.is_url(model):
        yield RunPaths(Path(model))
        return
    with mirror.open_remote_records(str(model)) as paths:
        yield paths


def _base_of(adapter: Path) -> Path:
    """The folder of an adapter's base model."""
    try:
        about = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))
        named, revision = about.get("base_model_name_or_path"), about.get("revision")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{adapter / ADAPTER} cannot be read ({shorten_error(error)}); fetch the folder again"
        ) from None
    try:
        base = fetch_folder(f"{named}@{revision}" if revision and hub.is_hub_name(str(named)) else str(named))
    except PhalanxError as error:
        raise ConfigError(f"{adapter} is an adapter of the model {named}, but {error}") from error
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
    except Exception as error:  # the library may raise any error for a missing or damaged file
        raise ConfigError(
            f"transformers cannot load a model and its tokenizer from {folder} ({shorten_error(error)}); fetch the "
            "folder's files again or name another"
        ) from error
    if adapter is not None:
        _merge(model, folder, adapter)
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    return tokenizer, model


def _merge(model: Any, base: Path, folder: Path) -> None:
    """Merge an adapter into its base weights, as an export of a run with adapters does."""
    import torch

    from phalanx.models.families.catalog import block_options
    from phalanx.models.hf_config import read_config, spec_from_config
    from phalanx.models.hf_layout import find_adapter_places, find_places
    from phalanx.models.lora import adapter_names, adapter_shapes, merge_adapter
    from phalanx.models.peft import Adapter
    from phalanx.models.peft_experts import name_stack
    from phalanx.models.user_model import hf_name, load_family_class, shapes_of

    spec = spec_from_config(read_config(base), str(base))
    code = load_family_class(spec.architecture)
    whole = shapes_of(code, spec)
    names, places = functools.partial(hf_name, model_class=code), find_places(code, spec, whole)
    adapter = Adapter(folder, spec.layers, names, find_adapter_places(code, spec))
    weights = dict(model.named_parameters())
    rank, shapes = adapter.lora.rank, dict[str, tuple[int, ...]]()
    transposed = block_options(spec).experts == "clamped"
    for matrix, a, b in adapter_names(adapter.lora, spec.layers):
        shapes |= dict(zip((a, b), adapter_shapes(whole[matrix], rank, transposed), strict=True))
    adapter.check_shapes(shapes)

    def tensor(name: str) -> torch.Tensor:
        return adapter.read(name, 0, math.prod(shapes[name])).view(shapes[name])

    with torch.no_grad():
        for matrix, a, b in adapter_names(adapter.lora, spec.layers):
            if matrix in places:
                part = places[matrix].find_in(weights[places[matrix].name])
            else:  # a stack, of which each matrix has a name in files
                _, index, _, target = matrix.split(".", 3)
                part = weights[name_stack(names, int(index), target)]
            merged = merge_adapter(part.reshape(whole[matrix]), tensor(a), tensor(b), adapter.lora.scale, transposed)
            part.copy_(merged.view_as(part))


def shorten_error(error: Exception) -> str:
    """Another library's error in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
