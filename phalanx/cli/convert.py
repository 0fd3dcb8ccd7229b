"""`phalanx convert`: checkpoints of other programs."""

import enum
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.core.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.compat.megatron.export import MegatronSource
    from phalanx.config.schema import OptimSection

_DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}


class Target(enum.StrEnum):
    """What a checkpoint becomes."""

    hf = "hf"
    run = "run"
    megatron = "megatron"


class Layout(enum.StrEnum):
    """Names of tensors."""

    te = "te"
    local = "local"
    megatron_llama = "megatron-llama"


class Format(enum.StrEnum):
    """Of Megatron's --ckpt-format."""

    torch = "torch"
    torch_dist = "torch_dist"


def convert_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint of Megatron (torch_dist too), a folder of torch.distributed.checkpoint (torchtitan, "
            "FSDP2), or a file of HetSeq; for Megatron a Hugging Face folder, or a run with Adam's state."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; nothing may be there yet.")],
    config: Annotated[
        Path | None, typer.Option(help="A folder with the model's config.json, and its tokenizer.")
    ] = None,
    to: Annotated[
        Target,
        typer.Option(
            help="hf: a Hugging Face folder; run: a run folder, with Adam's state, to resume from; megatron: a "
            "checkpoint of Megatron's."
        ),
    ] = Target.hf,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of a Hugging Face folder, or of a run's weights for Megatron, such as bfloat16. Default: as stored."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="The step that was trained last. Default: as stored.")] = None,
    tensor: Annotated[int, typer.Option(min=1, help="For Megatron: tensor ranks.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="For Megatron: pipeline ranks.")] = 1,
    layers_per_stage: Annotated[
        str | None, typer.Option(help="For Megatron: layers of each pipeline rank, such as 9,11,12, for --pipeline.")
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(help="For Megatron: names of Megatron-core (te: with Transformer Engine) or of Megatron-LLaMA."),
    ] = Layout.te,
    ckpt_format: Annotated[
        Format,
        typer.Option(
            help="For Megatron: torch, a file for each rank, or torch_dist, Megatron-core's distributed checkpoint, "
            "which any number of ranks loads."
        ),
    ] = Format.torch,
) -> None:
    """Write a checkpoint of another program as a Hugging Face folder, or as one that a run resumes from; and a Hugging
    Face folder or a run for Megatron."""
    if to is Target.megatron:
        if config is not None:
            raise ConfigError("--config is for checkpoints of other programs; remove it")
        ranks = tensor, pipeline, layers_per_stage, layout.value, ckpt_format.value
        typer.echo(_to_megatron(source, target, dtype, step, *ranks))
        return
    if (tensor, pipeline, layers_per_stage, layout, ckpt_format) != (1, 1, None, Layout.te, Format.torch):
        raise ConfigError(
            "--tensor, --pipeline, --layers-per-stage, --layout and --ckpt-format are for --to megatron; remove them, "
            "or add that"
        )
    from phalanx.compat.convert import convert_checkpoint

    typer.echo(convert_checkpoint(source, target, config=config, to_run=to is Target.run, dtype=dtype, step=step))


def _to_megatron(
    source: Path, target: Path, dtype: str | None, step: int | None, tensor: int, pipeline: int,
    layers_per_stage: str | None, layout: str, ckpt_format: str,
) -> str:  # fmt: skip
    from phalanx.compat.megatron.export import export_megatron, open_hf_source
    from phalanx.core.run_paths import RunPaths

    if layers_per_stage is not None and not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", layers_per_stage):
        raise ConfigError(f"--layers-per-stage {layers_per_stage} is no list of numbers such as 9,11,12")
    stages = pipeline if layers_per_stage is None else [int(count) for count in layers_per_stage.split(",")]
    if isinstance(stages, list) and pipeline not in (1, len(stages)):
        raise ConfigError(f"--layers-per-stage {layers_per_stage} is of {len(stages)} stages, not {pipeline}; set one")
    run = RunPaths(source).config.is_file()
    if not run and (dtype is not None or step is not None):
        raise ConfigError(f"--dtype and --step are for a run, and {source} is none; remove them")
    opened = _open_run(source, dtype, step) if run else open_hf_source(source)
    export_megatron(opened, target, tensor, stages, layout, ckpt_format)
    ranks = f"{tensor} tensor and {stages if isinstance(stages, int) else len(stages)} pipeline ranks"
    ranks = "any ranks" if ckpt_format == Format.torch_dist else ranks
    state = f", with Adam's state of step {opened.adam.step}" if opened.adam else ""
    return f"{source} is now the Megatron checkpoint {target} of {ranks}{state}"


def find_decay_style(optim: "OptimSection", source: Path) -> str:
    """Megatron's name of a schedule. Raises ConfigError where it has none."""
    if optim.schedule == "polynomial" and optim.power == 1.0:
        return "linear"
    if optim.schedule not in _DECAY_STYLES:
        raise ConfigError(
            f"{source} was trained by optim.schedule {optim.schedule}, which Megatron does not have; export its "
            "weights (phalanx export), and convert the export"
        )
    return _DECAY_STYLES[optim.schedule]


def _open_run(source: Path, dtype: str | None, step: int | None) -> "MegatronSource":
    """A run's checkpoint, with Adam's state."""
    from phalanx.compat.megatron.export import MegatronSource
    from phalanx.compat.megatron.optimizer_state import AdamSettings
    from phalanx.compat.trained_state import MOMENTS, PARAM
    from phalanx.core.run_paths import RunPaths
    from phalanx.models.hf_weights import DTYPES as STORED
    from phalanx.trainer.export import EXPORT_DTYPES, open_trained_run

    if dtype is not None and dtype not in STORED:
        raise ConfigError(f"--dtype {dtype} is not known; choose one of {', '.join(STORED)}")
    paths = RunPaths(source)
    run = open_trained_run(paths, step)
    optim, train = run.config.optim, run.config.train
    if run.kinds != {PARAM, *MOMENTS}:
        raise ConfigError(
            f"{source} was trained by optim.name {optim.name}, which does not keep Adam's state; export its weights "
            "(phalanx export), and convert the export"
        )
    if run.step < 1:
        raise ConfigError(f"{source} has trained no step yet; export its weights, and convert the export")
    steps = optim.decay_steps if isinstance(optim.decay_steps, int) else train.steps
    adam = AdamSettings(
        step=run.step, lr=optim.lr, min_lr=optim.lr * optim.min_lr_ratio, betas=(optim.beta1, optim.beta2),
        eps=optim.eps, weight_decay=float(optim.weight_decay), decay_style=find_decay_style(optim, source),
        done=train.batches.first_sequence(run.step + 1), warmup=train.batches.first_sequence(optim.warmup_steps + 1),
        decay=train.batches.first_sequence(steps + 1),
    )  # fmt: skip
    kept = STORED[dtype] if dtype is not None else EXPORT_DTYPES["bf16" if train.dtype == "mixed" else train.dtype]
    return MegatronSource(
        str(source), run.spec, lambda name, kind, rows: run.read(name, kind)[rows].clone(), kept, paths.tokenizer, adam
    )
