"""Export of a run's checkpoint to a Hugging Face folder, tensor by tensor."""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.checkpoint.disk.load import Checkpoint, find_newest_valid, list_steps, open_and_verify, step_folder
from phalanx.config.schema import Config
from phalanx.core.errors import CheckpointError, ConfigError, PhalanxError, RunError
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths, Url
from phalanx.data.cache import temporary_folder
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import hf_config
from phalanx.models.hf_export import copy_tokenizer, export, export_plain, new_folder
from phalanx.models.hf_layout import find_adapter_places
from phalanx.models.hf_weights import Weights
from phalanx.models.model import Architecture, Model
from phalanx.models.peft import save_adapter
from phalanx.models.user_model import build_on_meta, hf_name, shapes_of
from phalanx.parallel.model_buffers import RunningStatistics, fill_buffers, read_statistics
from phalanx.parallel.parallelize import DTYPES
from phalanx.storage import files as storage
from phalanx.trainer.run_folder import next_attempt, read_run_config
from phalanx.workload import adapters, local_copies
from phalanx.workload.workload import find_model_shape, make_workload, read_model_shape, resolve_model_class

EXPORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def export_run(
    paths: RunPaths,
    folder: Path | Url,
    dtype: str | None,
    progress: Callable[[int, int], None] | None = None,
    note: bool = True,
    merge: bool | None = False,
    step: int | None = None,
) -> int:
    """Write the newest valid checkpoint of a run, or that of `step`, as a Hugging Face folder; returns its step.

    `dtype`: bf16, fp16, fp32 or fp64; None: that of the folder the run started from, else the recipe's compute type.
    A run of a task of the user's own is written under its own names, with its code and options beside it.
    A run that trains adapters is written as an adapter of PEFT's, by default in the type of its masters, or with
    `merge` as a whole model, each matrix added up in float32 and rounded once; None: merge where there are adapters.
    `progress(done, total)` in bytes; `note` leaves an event in the run's records. At most one tensor is in memory, and
    of an export to a URL one shard on the local disk; there config.json (or adapter_config.json) is written last, so
    that a folder without it is no model. Raises RunError when `paths` holds no run, CheckpointError when it has no
    checkpoint to export, ConfigError when there is nothing to merge.
    """
    wanted = _require_config(paths)
    if wanted.task.kind == "custom":
        return _export_custom(wanted, paths, folder, dtype, progress, note, merge, step)
    config = local_copies.use_local_copies(wanted)
    original = hf_config.read_config(paths.hf_config.parent) if config.model.from_hf else None
    spec, code = read_model_shape(config, paths), resolve_model_class(config, paths)
    if merge and spec.lora is None:
        raise ConfigError(
            f"--merge is for a run that trains adapters, and {paths.display_name} trains the weights themselves"
        )
    if merge is not False if spec.lora is not None else dtype is None:
        local_copies.fetch_local_copies(wanted)  # the base weights are read
    checkpoint = _newest(paths) if step is None else _of_step(paths, step)
    read: Callable[[str], torch.Tensor] = functools.partial(_read, checkpoint)
    if spec.lora is not None and merge is False:
        stored = EXPORT_DTYPES[dtype] if dtype is not None else DTYPES[_master_dtype(config)]
        with open_export_target(folder, config) as (local, _), new_folder(local) as temporary:
            named = functools.partial(hf_name, model_class=code)
            base = adapters.base_name(wanted), adapters.read_base_fingerprint(paths)
            save_adapter(temporary, spec.lora, spec.layers, read, stored, named, *base, find_adapter_places(code, spec))
            copy_tokenizer(paths.tokenizer, temporary)
        return _finish_export(checkpoint, paths, folder, note)
    read = (
        _make_reusing_reader(checkpoint)
        if spec.lora is None
        else adapters.make_merged_reader(config, spec, code, paths, read)
    )
    out_dtype = EXPORT_DTYPES[dtype] if dtype is not None else _natural_dtype(config, code)
    total = sum(math.prod(shape) for shape in shapes_of(code, spec).values()) * out_dtype.itemsize
    done = 0

    def report(count_bytes: int) -> None:
        nonlocal done
        done += count_bytes
        if progress is not None:
            progress(done, total)

    ids = _special_ids(paths.tokenizer)
    with open_export_target(folder, config) as (local, finished):
        export(
            local,
            spec,
            read,
            out_dtype,
            original_config=original,
            tokenizer_folder=paths.tokenizer,
            bos_id=ids.get("bos"),
            eos_id=ids.get("eos"),
            progress=report,
            model_class=code,
            finished=finished,
        )
    return _finish_export(checkpoint, paths, folder, note)


def _export_custom(
    config: Config,
    paths: RunPaths,
    folder: Path | Url,
    dtype: str | None,
    progress: Callable[[int, int], None] | None,
    note: bool,
    merge: bool | None,
    step: int | None,
) -> int:
    """Export a custom network: its parameters under their own names, a config.json of its options, and its code."""
    if merge:
        raise ConfigError(
            f"--merge is for a run that trains adapters, and {paths.display_name} trains the weights themselves"
        )
    checkpoint = _newest(paths) if step is None else _of_step(paths, step)
    shapes = {name: tuple(shape) for name, (shape, _) in checkpoint.parameters.items()}
    statistics = read_statistics(checkpoint.header)
    shapes |= {name: tuple(values.shape) for name, values in statistics.items()}
    read = _make_reusing_reader(checkpoint)
    out_dtype = EXPORT_DTYPES[dtype] if dtype is not None else DTYPES[_compute_dtype(config)]
    total, done = sum(math.prod(shape) for shape in shapes.values()) * out_dtype.itemsize, 0

    def report(count_bytes: int) -> None:
        nonlocal done
        done += count_bytes
        if progress is not None:
            progress(done, total)

    about = {"task": {"code": paths.task_code.name, "options": config.task.options}, "step": checkpoint.header["step"]}
    texts = {
        paths.task_code.name: paths.task_code.read_text(encoding="utf-8"),
        "config.json": json.dumps(about, indent=2) + "\n",
    }
    with open_export_target(folder, config) as (local, finished):
        export_plain(
            local, shapes, lambda name: statistics[name] if name in statistics else read(name), out_dtype, texts,
            progress=report, finished=finished,
        )  # fmt: skip
    return _finish_export(checkpoint, paths, folder, note)


def load_trained_model(paths: RunPaths, step: int | None = None) -> Model:
    """Load the model of a run's newest valid checkpoint, or of that of `step`, on the CPU in float32 (float64 for
    an fp64 run), in evaluation mode, with adapters merged into it. Raises as `export_run` does."""
    wanted = _require_config(paths)
    config = local_copies.use_local_copies(wanted)
    spec = find_model_shape(config, paths)
    if spec is not None and spec.lora is not None:
        local_copies.fetch_local_copies(wanted)
    checkpoint = _newest(paths) if step is None else _of_step(paths, step)
    with contextlib.closing(checkpoint):
        read: Callable[[str], torch.Tensor] = functools.partial(_read, checkpoint)
        if spec is not None and spec.lora is not None:
            code = resolve_model_class(config, paths)
            read = adapters.make_merged_reader(config, spec, code, paths, read)
            model: Model = build_on_meta(replace(spec, lora=None), code)
        else:
            model = make_workload(config, spec, paths).model()
        model = model.to_empty(device="cpu").to(DTYPES[_master_dtype(config)]).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(read(name).view_as(parameter))
        if spec is None:
            fill_buffers(model, "cpu", DTYPES[_master_dtype(config)])
            RunningStatistics(model).restore(checkpoint.header)
    return model


@dataclass(frozen=True)
class TrainedRun:
    """A run's checkpoint: `read(name, kind)` gives a parameter (kind `param`), or what the optimizer keeps of it, whole
    and as it is stored; `kinds` are those that there are, `step` is its step, `spec` and `config` are the run's."""

    config: Config
    spec: ModelSpec
    step: int
    kinds: frozenset[str]
    read: Callable[[str, str], torch.Tensor]


def open_trained_run(paths: RunPaths, step: int | None = None) -> TrainedRun:
    """The newest valid checkpoint of a run of a language model, or that of `step`. Raises as `export_run` does, and
    ConfigError where the run trains adapters or a task of the user's own."""
    config = _require_config(paths)
    spec = find_model_shape(config, paths)
    if spec is None or spec.lora is not None:
        raise ConfigError(f"{paths.display_name} trains no whole language model; export it, and convert the export")
    checkpoint = _newest(paths) if step is None else _of_step(paths, step)
    kinds = frozenset(checkpoint.kinds(next(iter(checkpoint.parameters))))
    return TrainedRun(config, spec, int(checkpoint.header["step"]), kinds, functools.partial(_read, checkpoint))


def _require_config(paths: RunPaths) -> Config:
    """The configuration of a run. Raises RunError if the folder has none."""
    config = read_run_config(paths)
    if config is None:
        raise RunError(f"{paths.display_name} holds no run (it has no {paths.config.name}); name a run folder")
    return config


def _newest(paths: RunPaths) -> Checkpoint:
    refused: list[str] = []
    checkpoint = find_newest_valid(paths.checkpoints, None, lambda kind, details: refused.append(details["reason"]))
    if checkpoint is None:
        why = f" ({refused[0]})" if refused else ""
        raise CheckpointError(f"{paths.display_name} has no usable checkpoint to export{why}; train it first")
    return checkpoint


def _of_step(paths: RunPaths, step: int) -> Checkpoint:
    there = list_steps(paths.checkpoints)
    if step not in there:
        known = ", ".join(str(other) for other in sorted(there)) or "none"
        raise CheckpointError(
            f"{paths.display_name} has no checkpoint of step {step} (it has {known}); choose one of these, or keep "
            "the best one with checkpoint.best=true"
        )
    checkpoint, why = open_and_verify(step_folder(paths.checkpoints, step), 0, 1, None)
    if checkpoint is None:
        raise CheckpointError(
            f"the checkpoint of step {step} of {paths.display_name} cannot be used ({why}); choose another"
        )
    return checkpoint


def _compute_dtype(config: Config) -> str:
    return "bf16" if config.train.dtype == "mixed" else config.train.dtype


def _finish_export(checkpoint: Checkpoint, paths: RunPaths, folder: Path | Url, note: bool) -> int:
    step = int(checkpoint.header["step"])
    checkpoint.close()
    if note:
        write_event(paths.events, EventKind.EXPORTED, max(1, next_attempt(paths) - 1), folder=str(folder), step=step)
    return step


def _natural_dtype(config: Config, code: type[Architecture]) -> torch.dtype:
    """The dtype of the imported weights, or the compute type."""
    if not config.model.from_hf:
        return DTYPES[_compute_dtype(config)]
    folder = Path(config.model.from_hf).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.from_hf {folder} is gone, so the dtype of its weights is unknown; choose one with --dtype "
            f"{'|'.join(EXPORT_DTYPES)}"
        )
    return Weights(folder, code).dtype()


def _master_dtype(config: Config) -> str:
    return "fp64" if config.train.dtype == "fp64" else "fp32"


def _read(checkpoint: Checkpoint, name: str, kind: str = "param") -> torch.Tensor:
    shape, dtype = checkpoint.parameters[name]
    out = torch.empty(math.prod(shape), dtype=getattr(torch, dtype))
    checkpoint.read_into(name, kind, 0, out.numel(), out)
    return out.view(shape)


def _make_reusing_reader(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """Like `_read`, but each tensor reuses the memory of the previous one: allocating takes longer than copying."""
    dtypes = {name: getattr(torch, dtype) for name, (_, dtype) in checkpoint.parameters.items()}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, (shape, _) in checkpoint.parameters.items()}
    memory = torch.empty(max(sizes.values()), dtype=torch.uint8)

    def read(name: str) -> torch.Tensor:
        out = memory[: sizes[name]].view(dtypes[name])
        checkpoint.read_into(name, "param", 0, out.numel(), out)
        return out

    return read


def _special_ids(tokenizer: Path) -> dict[str, int]:
    """Token ids of the beginning and end of a text, if the run's tokenizer names them."""
    try:
        config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        tokens = {entry["content"]: int(entry["id"]) for entry in added}
        named = {key: config.get(f"{key}_token") for key in ("bos", "eos")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    ids = {}
    for key, token in named.items():
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in tokens:
            ids[key] = tokens[text]
    return ids


# ---------------------------- target of an export: a local folder, or through a temporary one to a URL, file by file


WRITE_LAST = ("config.json", "adapter_config.json")  # the files that identify a folder as a model or an adapter


@contextlib.contextmanager
def open_export_target(folder: Path | Url, config: Config) -> Iterator[tuple[Path, Callable[[Path], None] | None]]:
    """Open the target of an export: a local folder to write to, and a function that moves a finished file away from it
    (None if it stays). At the end of the block, all files are at the URL, WRITE_LAST after the others. On failure the
    copied files are removed, if the store permits it. Raises ConfigError if the URL is not empty, and the errors of
    `storage`.
    """
    if isinstance(folder, Path):
        yield folder, None
        return
    if storage.list_folder(folder.text, timeout_s=folder.timeout_s):
        raise ConfigError(f"{folder} is not empty, so an export would mix with its files; choose a new URL")
    copied: list[str] = []

    def take(path: Path) -> None:
        copied.append((folder / path.name).text)
        storage.upload(path, copied[-1], folder.timeout_s)
        path.unlink()

    cache = storage.local_cache(config.data.cache)
    with temporary_folder(cache) as temporary:
        local = temporary / folder.name
        try:
            yield local, take
            for path in sorted(local.iterdir(), key=lambda path: (path.name in WRITE_LAST, path.name)):
                take(path)
        except BaseException:
            with contextlib.suppress(PhalanxError):
                storage.remove(copied, folder.timeout_s)
            raise
