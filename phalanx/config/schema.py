"""Every knob of a run, typed and inert.

A recipe is a YAML file with the sections below (`load.py` reads it). Fields marked `trajectory` define the loss
curve: a run folder keeps them for good; all others may differ between two starts of the same run.
"""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from phalanx.config.fields import (
    Auto,
    Count,
    CountOrZero,
    Fraction,
    Positive,
    Section,
    Share,
    Steps,
    Text,
    as_shares,
    as_stages,
    as_work,
    knob,
    reject_bool,
)  # fmt: skip
from phalanx.config.model import DataSection, ModelSection, TaskSection
from phalanx.config.operations import (
    CallbackSection,
    CheckpointSection,
    CommSection,
    ReportSection,
    ResilienceSection,
    SlurmSection,
    StorageSection,
)
from phalanx.layout.mesh_axes import MeshAxes


class TrainSection(Section):
    """How long and in what portions."""

    steps: CountOrZero = knob(1000, "optimizer steps; 0 only writes a checkpoint of the starting weights")
    global_batch: Count = knob(32, "sequences of one step, on any cluster", trajectory=True)
    micro_batch: Count | Auto = knob("auto", "sequences of one forward pass on one rank; auto: the most that fits")
    seed: CountOrZero = knob(0, "initial weights, data order and dropout", trajectory=True)
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64", "mixed"] = knob(
        "auto",
        "compute type; master weights stay fp32 under bf16 and fp16; mixed: the best that each device has; "
        "auto: bf16 on accelerators that have it, else fp16, fp32 on CPU, mixed where devices differ",
        trajectory=True,
    )
    loss_scale: Annotated[float, Field(ge=0.001, le=1e30), BeforeValidator(reject_bool)] = knob(
        65536.0, "fp16: first factor of the loss; halved when a gradient overflows", trajectory=True
    )
    loss_scale_growth_interval: Count = knob(
        2000, "fp16: steps without overflow after which it doubles", trajectory=True
    )
    tf32: bool = knob(False, "fp32 products in TF32, where the device has that: faster, and rounded", trajectory=True)
    deterministic: bool = knob(False, "only kernels that give the same bits each time; slower")
    compile: bool | Auto = knob("auto", "torch.compile each block; auto: on accelerators where a trial succeeds")
    eval_every: CountOrZero = knob(0, "steps between evaluations on held-out data; 0: only at the end")
    patience: CountOrZero = knob(
        0, "evaluations in a row with no lower held-out loss after which training ends; 0: it goes on to train.steps"
    )
    eval_sequences: CountOrZero = knob(64, "held-out sequences of one evaluation of each set; 0: none at all")
    profile: Steps | None = knob(None, "first-last steps to trace with torch.profiler, such as 10-12")
    memory_snapshot: CountOrZero = knob(0, "step whose allocations are recorded in a memory snapshot; 0: none")


class OptimSection(Section):
    """The update rule and its learning rate."""

    name: Text = knob(
        "adamw",
        "adamw, adamw8bit (moments in 8 bits), or an element-wise class of torch.optim, such as sgd or adadelta",
        trajectory=True,
    )
    options: dict[Text, bool | int | float] = knob(
        {}, "further arguments of that class, such as momentum", trajectory=True
    )
    lr: Positive = knob(3e-4, "peak learning rate", trajectory=True)
    beta1: Fraction = knob(0.9, "decay of the gradient's mean", trajectory=True)
    beta2: Fraction = knob(0.95, "decay of the gradient's square", trajectory=True)
    eps: Positive = knob(1e-8, "added to the root of the squared gradient", trajectory=True)
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(reject_bool)] | Auto = knob(
        "auto",
        "decay of matrices, not of norms and other vectors; auto: 0.1 for adamw and adamw8bit, 0 for other rules",
        trajectory=True,
    )
    clip_norm: Positive | None = knob(1.0, "largest norm of the whole gradient; null: no clipping", trajectory=True)
    schedule: Literal["cosine", "linear", "constant", "polynomial", "wsd"] = knob(
        "cosine", "decay after warm-up; wsd: warm-up, stable, decay at the end", trajectory=True
    )
    power: Positive = knob(2.0, "exponent of the polynomial schedule", trajectory=True)
    decay_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), BeforeValidator(reject_bool)] = knob(
        0.2, "wsd: the last share of decay_steps, in which the learning rate falls", trajectory=True
    )
    decay_shape: Literal["linear", "sqrt", "cosine"] = knob(
        "linear", "wsd: how it falls; sqrt: as 1 - sqrt(share done)", trajectory=True
    )
    warmup_steps: CountOrZero = knob(0, "steps of linear warm-up", trajectory=True)
    double_buffer: bool = knob(
        False,
        "keep the state of the step before beside the new one, so that sharded ranks may update before all is reduced",
    )
    decay_steps: Count | Auto = knob(
        "auto", "step at which the decay ends; auto: train.steps at the start", trajectory=True
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(reject_bool)] = knob(
        0.1, "learning rate at the end of the decay, as a share of lr", trajectory=True
    )


class ParallelSection(Section):
    """How the work is spread over ranks."""

    layout: Literal["given", "auto"] = knob(
        "given",
        "auto: what `phalanx plan` finds fastest on the devices that are there, but for keys that the recipe writes; "
        "given: as the keys say",
    )
    engine: Literal["auto", "single", "sharded", "fsdp2"] = knob(
        "auto",
        "sharded: state and updates sharded over all ranks, in shares of any size; fsdp2: PyTorch's fully_shard; "
        "single: one rank, nothing to exchange",
    )
    zero: Literal["auto", 1, 2, 3] = knob(
        "auto",
        "what sharded keeps in shards between uses; 1: the optimizer's state; 2: gradients, too; 3: parameters, too; "
        "auto: the least with which the model takes no more than half of each memory",
    )
    shard_degree: Count | Auto = knob(
        "auto",
        "neighbouring ranks that hold one copy of the state together, as the next ones do; auto: all ranks hold one",
    )
    grad_reduce: Literal["auto", "per_step", "per_micro_batch"] = knob(
        "auto",
        "when gradients are summed over ranks; per_micro_batch keeps no whole gradients, but sends them each time; "
        "auto: per_step with zero 1, else per_micro_batch",
    )
    tensor: Count = knob(
        1, "neighbouring ranks that share every layer, each with a slice of its matrices; a divisor of the heads"
    )
    sequence_parallel: bool | Auto = knob(
        "auto",
        "with tensor, cut what is between the matrices along the sequence; auto: where data.seq_len divides",
    )
    pipeline: Count = knob(1, "stages, each some of the blocks on ranks of its own, one behind the other")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = knob(
        "1f1b",
        "which stage works on which micro-batch when; gpipe: all forward, then all backward; 1f1b: in turns, holding "
        "less; interleaved: two stages for each rank; zero_bubble: gradients of weights fill the gaps",
    )
    layers_per_stage: Annotated[Literal["auto"] | list[Count], BeforeValidator(as_stages)] = knob(
        "auto", "blocks of each stage, in order; auto: as even as the head lets them be, fewer where devices are slower"
    )

    @property
    def resolve_sharding(self) -> tuple[int, Literal["per_step", "per_micro_batch"]]:
        """`zero` and `grad_reduce`, where nobody has looked at memories with as little sharded as possible; of fsdp2
        what it amounts to."""
        zero = 3 if self.engine == "fsdp2" else 1 if self.zero == "auto" else self.zero
        if self.grad_reduce != "auto":
            return zero, self.grad_reduce
        # Micro-batches of a pipeline overlap, so that there is no end of one to reduce at.
        return zero, "per_step" if zero == 1 or self.pipeline > 1 else "per_micro_batch"

    @property
    def axes(self) -> MeshAxes:
        """How many ranks hold one copy of the model."""
        return MeshAxes(self.tensor, self.pipeline)


class BalanceSection(Section):
    """Which rank does how much."""

    batch: Annotated[Literal["auto", "even", "measured-once"] | list[CountOrZero], BeforeValidator(as_work)] = knob(
        "auto",
        "sequences of a step for each rank; auto: as each is measured, again and again; measured-once: by "
        "hardware.json alone; even: the same for all; a list: the numbers themselves, in order of rank",
    )
    hardware: Text | None = knob(
        None,
        "a file that `phalanx hardware` wrote; null: that of the run folder, measured at the start if it is missing",
    )
    optimizer_state: Annotated[Literal["auto", "even"] | list[Share], BeforeValidator(as_shares)] = knob(
        "auto",
        "which part of the optimizer's state each rank holds; auto: equal parts, less where memory is short; even: "
        "equal parts; a list: in proportion to these numbers, in order of rank",
    )


class MemorySection(Section):
    """Memory for time."""

    activations: Literal["none", "selective", "full", "offload", "auto"] = knob(
        "none",
        "what is computed again in the backward pass; full: all but each block's input; selective: all but the results "
        "of attention and of matrix products; offload: as full, and the inputs wait in the host's memory; auto: the "
        "first of none, selective, and offload or full that fits",
    )
    offload_prefetch_blocks: Count = knob(
        2,
        "blocks ahead of the backward pass for which inputs come back with activations=offload; so many more stay on "
        "the device",
    )


class Config(Section):
    """A checked recipe: the values of all keys by section, such as `config.train.steps`."""

    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    balance: BalanceSection = BalanceSection()
    memory: MemorySection = MemorySection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    storage: StorageSection = StorageSection()
    callback: CallbackSection = CallbackSection()
    report: ReportSection = ReportSection()
    slurm: SlurmSection = SlurmSection()


def iter_knobs(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, pydantic FieldInfo) of every knob."""
    for name, info in model.model_fields.items():
        section = get_section_type(info.annotation)
        if section is not None:
            yield from iter_knobs(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def get_knob(config: Config, key: str) -> Any:
    """The value of a dotted key; None below an absent optional section."""
    value: Any = config
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


def get_section_type(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return found[0] if found else None
