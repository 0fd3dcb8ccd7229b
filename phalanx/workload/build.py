"""From a resolved configuration to the parts of a run: model, engine, task and loaders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.comm.compression import NO_COMPRESSION, wire_bytes_per_element
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.data.loader import Loader
from phalanx.engine.interface import Engine, InMemoryStore
from phalanx.engine.timing import UpdateTimer
from phalanx.layout.balance import Speed
from phalanx.layout.hardware import MeasuredLink
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.batch_norm import batch_norms
from phalanx.models.model import Model
from phalanx.parallel.fp8_ranges import Fp8Ranges
from phalanx.parallel.init_weights import Fill
from phalanx.parallel.model_part import ModelPart
from phalanx.parallel.parallelize import parallelize, precision_of
from phalanx.tasks.task import Task
from phalanx.workload.context_task import find_context_shares, join_speeds, make_context_task
from phalanx.workload.engines import StateWeights, make_engine_factory, make_sharding_spec
from phalanx.workload.expert_balance import ExpertBalance, make_expert_balance
from phalanx.workload.expert_counts import find_expert_counts
from phalanx.workload.fp8_history import Fp8History, make_fp8_history
from phalanx.workload.work_split import WorkSplit
from phalanx.workload.workload import Workload, make_workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config


@dataclass
class RunComponents:
    """What a run is made of."""

    workload: Workload
    model: Model
    engine: Engine
    model_part: ModelPart
    task: Task
    train: Loader
    held_out: dict[str, Loader]  # by name, those that make a sequence
    work_split: WorkSplit
    nominal_weight: int
    starting_weights: Fill
    updates: UpdateTimer
    expert_balance: ExpertBalance | None = None  # of a model with experts
    fp8_ranges: Fp8Ranges | None = None  # with train.fp8
    fp8_history: Fp8History | None = None  # with train.fp8 delayed

    def close(self) -> None:
        """End what works beside the main thread."""
        self.engine.close()
        self.train.close()
        if self.model_part.pipeline is not None:
            self.model_part.pipeline.close()


def build_components(
    config: "Config",
    spec: ModelSpec | None,
    mesh: Mesh,
    train_tokens: Sequence[tuple[Path, float]],
    held_out_tokens: Mapping[str, Path],
    paths: RunPaths | None = None,
    speeds: Sequence[Speed] | None = None,
    link: MeasuredLink | None = None,
    weights: StateWeights = None,
    keeper: InMemoryStore | None = None,
    prebuilt: tuple[Workload, Model] | None = None,
) -> RunComponents:
    """Build everything that holds no state of the run yet; the model is on meta.

    `train_tokens` are token sets with their weights in the mixture, `held_out_tokens` those to evaluate on by name;
    `paths` is where the run folder keeps the model's own code; `speeds` of the copies of the model (without
    parallel.tensor and parallel.pipeline each rank is one), with the limit of each, are what was measured of their
    devices, and nothing but train.micro_batch if not given; `link` what was between them; `weights` how much of the
    state each holds, if not all the same; `keeper` what the state is committed to; `prebuilt` the subject with its
    model on meta, where there are such already.
    """
    train = config.train
    assert train.micro_batch != "auto"
    assert config.parallel.engine != "auto"
    _check_dtype(train.dtype, mesh)
    if speeds is None:
        # Ranks that were not started by one launcher have each measured what fits.
        speeds = [Speed(1.0, most=int(most)) for most in mesh.data.gather(train.micro_batch)]
    assert len(speeds) == mesh.data.world, "a step is divided over copies of the model"
    context_shares, expert_counts = find_context_shares(config, speeds, mesh), find_expert_counts(config, spec, speeds)
    speeds = join_speeds(config, speeds)
    assert spec is None or (spec.lora is None) == (config.model.lora is None), "an `auto` of model.lora is left"
    subject = make_workload(config, spec, paths) if prebuilt is None else prebuilt[0]
    task, model = subject.task(), subject.model() if prebuilt is None else prebuilt[1]
    nominal_weight = task.nominal_weight(train.global_batch)
    start = subject.starting_weights(model)
    updates = UpdateTimer()
    if batch_norms(model):  # statistics are of all rows: a rank takes its own at once
        speeds = [replace(speed, most=train.global_batch) for speed in speeds]
    engine, parted = parallelize(
        model,
        config,
        mesh,
        updates.wrap_engine(make_engine_factory(config, weights, keeper)),
        nominal_weight,
        context_shares,
        expert_counts,
    )
    if mesh.context is not None:
        task = make_context_task(task, spec, mesh, context_shares, config.parallel.sequence_parallel is True)
    # What is evaluated on is the same for every seed.
    held_out = {
        name: Loader([(rows, 1.0)], train.global_batch, 0, mesh.row_group, held_out=True)
        for name, rows in (subject.eval_data(held_out_tokens) if train.eval_sequences else {}).items()
    }
    return RunComponents(
        workload=subject,
        model=model,
        engine=engine,
        model_part=parted,
        task=task,
        train=Loader(
            subject.train_data(train_tokens),
            train.global_batch,
            train.seed,
            mesh.row_group,
            schedule=train.batches,
            read_ahead=config.data.read_ahead,
        ),
        held_out={name: loader for name, loader in held_out.items() if loader.sequences},
        work_split=WorkSplit(
            # A rank works on rows of others, too: how long it takes does not say what its own rows take.
            "measured-once" if config.parallel.expert > 1 and config.balance.batch == "auto" else config.balance.batch,
            train.global_batch,
            speeds,
            mesh,
            _micro_batch_comm_s(link, model, config, mesh),
            config.parallel.lockstep,
            train.batches,
        ),
        nominal_weight=nominal_weight,
        starting_weights=parted.make_fill(start, by_rows=not config.model.from_hf),
        updates=updates,
        expert_balance=make_expert_balance(model, spec, mesh, engine, nominal_weight),
        fp8_ranges=Fp8Ranges(model, mesh.device, mesh.axes.tensor) if train.fp8 != "none" else None,
        fp8_history=make_fp8_history(model, config, mesh, engine),
    )


def _micro_batch_comm_s(link: MeasuredLink | None, model: Model, config: "Config", mesh: Mesh) -> float:
    """Seconds of a micro-batch's collectives by themselves. Where parameters are released, each is gathered for either
    pass; where gradients are not kept, each that is trained is reduced and scattered. Each is half of an all-reduce."""
    if link is None or mesh.world == 1:
        return 0.0
    sharding = make_sharding_spec(config) if config.parallel.engine == "sharded" else None
    gathers = 2 * (sharding is None or sharding.zero == 3)
    reduces = int(sharding is None or sharding.reduce == "per_micro_batch")
    precision = precision_of(config.train.dtype, mesh)
    elements = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    compress = NO_COMPRESSION if sharding is None else sharding.compress
    gathered, reduced = (
        wire_bytes_per_element(precision.transport, compress),
        wire_bytes_per_element(precision.master, compress),
    )
    moved = gathers * elements * gathered + reduces * trained * reduced
    return moved / 2 / link.bytes_per_s + (gathers + reduces) * len(model.units()) * link.latency_s


def _check_dtype(dtype: str, mesh: Mesh) -> None:
    """Ranks that were not started by one launcher have each resolved `train.dtype: auto` for their own device."""
    mine = float(["fp64", "fp32", "fp16", "bf16", "mixed"].index(dtype))
    if mesh.min([mine]) != mesh.max([mine]):
        raise ConfigError(
            f"the ranks do not agree on train.dtype (rank {mesh.rank} has {dtype}), since their devices differ; "
            "set train.dtype=mixed"
        )
