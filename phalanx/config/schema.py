"""Schema of a recipe: every key, with its type, default and documentation.

A recipe is a YAML file with the sections below (`load.py` reads it). Fields marked `trajectory` define the loss curve:
a run folder keeps them; others may change between two starts of a run.
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
    Duration,
    Fraction,
    Positive,
    Section,
    Share,
    Steps,
    Text,
    as_ramp,
    as_schedule,
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
    KubernetesSection,
    ReportSection,
    ResilienceSection,
    SlurmSection,
    StorageSection,
)
from phalanx.layout.balance import in_lockstep
from phalanx.layout.batch_ramp import BatchSchedule, make_batch_schedule
from phalanx.layout.mesh_axes import MeshAxes


class StepsSection(Section):
    """Steps and their sequences."""

    steps: CountOrZero = knob(1000, "optimizer steps; 0 only writes a checkpoint of the starting weights")
    epochs: Positive | None = knob(
        None, "instead of steps: passes over the training data, in sequences; the last step is filled up"
    )
    global_batch: Count = knob(32, "sequences of one step, on any cluster", trajectory=True)
    rampup_batch: Annotated[list[Count] | None, BeforeValidator(as_ramp)] = knob(
        None,
        "start, increment, samples: the batch of a step grows from start by increment to global_batch, evenly over "
        "samples sequences",
        trajectory=True,
    )
    micro_batch: Count | Auto = knob("auto", "sequences of one forward pass on one rank; auto: the largest that fits")
    seed: CountOrZero = knob(0, "initial weights, data order and dropout", trajectory=True)

    @property
    def batches(self) -> BatchSchedule:
        """The sequences of each step."""
        return make_batch_schedule(self.global_batch, self.rampup_batch)

    @property
    def most_steps(self) -> int:
        """Steps that the run may have, where the size of the data is not known yet."""
        return self.steps if self.epochs is None else 2**53


class TrainSection(StepsSection):
    """Training: steps, batch sizes, precision, evaluation."""

    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64", "mixed"] = knob(
        "auto",
        "compute type; master weights stay fp32 under bf16 and fp16; mixed: the best type of each device; auto: "
        "bf16 on accelerators that have it, else fp16, fp32 on CPU, mixed if devices differ",
        trajectory=True,
    )
    fp8: Literal["none", "block", "delayed"] = knob(
        "none",
        "matrix products of the blocks' linear layers in FP8. block: E4M3, scaled by blocks of 1 x 128 (inputs, "
        "gradients) and 128 x 128 (weights); gradients of weights in dtype. delayed: all products, E4M3 and for "
        "gradients E5M2, a tensor scaled by its largest magnitudes in the steps before",
        trajectory=True,
    )
    fp8_history: Annotated[Count, Field(le=1024)] = knob(
        16, "delayed: steps whose largest magnitudes set a scale (amax_history_len)", trajectory=True
    )
    fp8_margin: Annotated[CountOrZero, Field(le=16)] = knob(
        0, "delayed: how often these are doubled, as room for larger ones (margin)", trajectory=True
    )
    loss_scale: Annotated[float, Field(ge=0.001, le=1e30), BeforeValidator(reject_bool)] = knob(
        65536.0, "fp16: initial loss scale; halved when a gradient overflows", trajectory=True
    )
    loss_scale_growth_interval: Count = knob(
        2000, "fp16: steps without overflow after which the loss scale doubles", trajectory=True
    )
    tf32: bool = knob(False, "fp32 matrix products in TF32 if the device has it: faster, less precise", trajectory=True)
    deterministic: bool = knob(False, "only deterministic kernels; slower")
    compile: bool | Auto = knob("auto", "torch.compile each block; auto: on accelerators if a trial succeeds")
    stop_after: Duration | None = knob(
        None, "time after which a start saves and ends, with exit code 10, such as 3h; the next start continues"
    )
    stop_every: CountOrZero = knob(0, "a start also ends at each multiple of this number of steps; 0: off")
    eval_every: CountOrZero = knob(0, "steps between evaluations on held-out data; 0: only at the end")
    patience: CountOrZero = knob(
        0, "early stopping: evaluations in a row without a lower held-out loss after which training ends; 0: off"
    )
    eval_sequences: CountOrZero = knob(64, "held-out sequences of one evaluation of each set; 0: no evaluation")
    profile: Steps | None = knob(None, "first-last steps to trace with torch.profiler, such as 10-12")
    memory_snapshot: CountOrZero = knob(0, "step whose allocations are recorded in a memory snapshot; 0: none")


class OptimSection(Section):
    """The update rule and its learning rate."""

    name: Text = knob(
        "adamw",
        "adamw, adamw8bit (moments in 8 bits), an element-wise class of torch.optim, such as sgd or adadelta, or "
        "my.py:Class, a subclass of torch.optim.Optimizer",
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
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "polynomial", "wsd"] | Text, BeforeValidator(as_schedule)
    ] = knob(
        "cosine",
        "decay after warm-up; wsd: warm-up, stable, decay at the end; my.py:name: a function that returns the factor "
        "of lr in a step, from step 1",
        trajectory=True,
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
        "keep the previous optimizer state beside the new one, so that ranks update before all gradients are reduced",
    )
    decay_steps: Count | Auto = knob(
        "auto", "step at which the decay ends; auto: train.steps at the start", trajectory=True
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(reject_bool)] = knob(
        0.1, "learning rate at the end of the decay, as a share of lr", trajectory=True
    )


class ParallelSection(Section):
    """Parallelism: layout, engine, sharding, tensor and pipeline parallelism."""

    layout: Literal["given", "auto"] = knob(
        "given",
        "auto: the layout that `phalanx plan` finds fastest on the devices, except keys that the recipe sets; "
        "given: as the keys say",
    )
    engine: Literal["auto", "single", "sharded", "fsdp2"] = knob(
        "auto",
        "sharded: state and updates sharded over all ranks, in shares of any size; fsdp2: PyTorch's fully_shard; "
        "single: one rank, no communication",
    )
    zero: Literal["auto", 1, 2, 3] = knob(
        "auto",
        "ZeRO stage: what the engine sharded keeps in shards; 1: optimizer state; 2: also gradients; 3: also "
        "parameters; auto: the lowest with which the model takes at most half of each memory",
    )
    shard_degree: Count | Auto = knob(
        "auto",
        "hybrid sharding: neighbouring ranks that share one copy of the state; auto: all ranks",
    )
    grad_reduce: Literal["auto", "per_step", "per_micro_batch"] = knob(
        "auto",
        "when gradients are reduced over ranks; per_micro_batch keeps no full gradients, but communicates more; "
        "auto: per_step with zero 1, else per_micro_batch",
    )
    tensor: Count = knob(
        1,
        "tensor parallelism: neighbouring ranks that share every layer, each with a slice of its matrices; a "
        "divisor of the heads",
    )
    sequence_parallel: bool | Auto = knob(
        "auto",
        "sequence parallelism with tensor: split activations between the matrices along the sequence; auto: if "
        "data.seq_len divides",
    )
    pipeline: Count = knob(1, "pipeline parallelism: stages of blocks, each on its own ranks")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = knob(
        "1f1b",
        "pipeline schedule; gpipe: all forward, then all backward; 1f1b: alternating, with less memory; "
        "interleaved: two stages for each rank; zero_bubble: weight gradients fill the gaps",
    )
    layers_per_stage: Annotated[Literal["auto"] | list[Count], BeforeValidator(as_stages)] = knob(
        "auto", "blocks of each stage, in order; auto: equal times with the head counted, fewer on slower devices"
    )

    context: Count = knob(
        1,
        "context parallelism: neighbouring ranks that share every row, each with some of its positions; for rows that "
        "are too long for one",
    )
    context_by: Literal["auto", "heads", "gather", "ring"] = knob(
        "auto",
        "what attention exchanges over parallel.context; heads: all positions of some heads; gather: keys and values; "
        "ring: these from one rank after another, while the last ones are used; auto: by bytes, heads and memory",
    )
    expert: Count = knob(
        1,
        "expert parallelism: neighbouring ranks that divide the experts of each layer among them, and exchange tokens; "
        "each with its tensor ranks",
    )

    @property
    def resolve_sharding(self) -> tuple[int, Literal["per_step", "per_micro_batch"]]:
        """Values of `zero` and `grad_reduce`: an unresolved `auto` counts as the least sharding; of fsdp2 its
        equivalent."""
        zero = 3 if self.engine == "fsdp2" else 1 if self.zero == "auto" else self.zero
        if self.grad_reduce != "auto":
            return zero, self.grad_reduce
        # Micro-batches of a pipeline overlap: none has an end at which to reduce.
        return zero, "per_step" if zero == 1 or self.pipeline > 1 else "per_micro_batch"

    @property
    def axes(self) -> MeshAxes:
        """Ranks of one copy of the model, and of those that share rows or experts."""
        return MeshAxes(self.tensor, self.pipeline, self.context, self.expert)

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run the same number of micro-batches, since each has collectives (`in_lockstep`)."""
        return in_lockstep(*self.resolve_sharding) or self.expert > 1


class BalanceSection(Section):
    """Balance: each rank's share of the batch and of the optimizer state."""

    batch: Annotated[Literal["auto", "even", "measured-once"] | list[CountOrZero], BeforeValidator(as_work)] = knob(
        "auto",
        "sequences of a step for each rank; auto: by measured speed, rebalanced during the run; measured-once: by "
        "hardware.json only; even: equal; a list: the numbers by rank",
    )
    hardware: Text | None = knob(
        None,
        "a file of `phalanx hardware`; null: that of the run folder, measured at the start if missing",
    )
    optimizer_state: Annotated[Literal["auto", "even"] | list[Share], BeforeValidator(as_shares)] = knob(
        "auto",
        "optimizer state of each rank; auto: equal parts, less if memory is short; even: equal parts; a list: in "
        "proportion to these numbers, by rank",
    )
    context: Annotated[Literal["auto", "even"] | list[Share], BeforeValidator(as_shares)] = knob(
        "auto",
        "parallel.context: each rank's part of a row; auto: by measured speed where balance.batch measures it; even: "
        "equal parts; a list: in proportion to these numbers, by rank of a group",
    )
    experts: Annotated[Literal["auto", "even"] | list[Share], BeforeValidator(as_shares)] = knob(
        "auto",
        "parallel.expert: experts of each rank; auto: by measured speed where balance.batch measures it; even: equal "
        "numbers; a list: in proportion to these numbers, by rank of a group",
    )


class MemorySection(Section):
    """Activation memory: recomputation and offloading."""

    activations: Literal["none", "selective", "full", "offload", "auto"] = knob(
        "none",
        "activation checkpointing: what the backward pass recomputes; full: all but each block's input; selective: "
        "all but the results of attention and matrix products; offload: as full, with the inputs in host memory; "
        "auto: the first of none, selective, and offload or full that fits",
    )
    offload_prefetch_blocks: Count = knob(
        2,
        "activations=offload: blocks prefetched ahead of the backward pass; as many more stay on the device",
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
    k8s: KubernetesSection = KubernetesSection()


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
