"""The tables of a dry run, JSON-able, from known sizes. Pure."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.schema import Config
from phalanx.layout.model_shape import ModelSpec
from phalanx.recovery.catalog import describe_budget, list_copy_options, needs_replicas

STATE_MEMORY_SHARE = (
    0.5  # of the free memory, that `parallel.zero: auto` lets the state take: the rest is for activations
)
MODES = ("none", "selective", "full", "offload")
DEVICE_GIB = (24, 40, 80, 141)  # of common accelerators
ADAPTERS = "adapters"  # the part of a model that they are


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """Of a run on some ranks; bytes are of the rank that holds most."""

    shape: str
    parts: Mapping[str, int]  # parameters of each part of the model
    trained: int  # parameters that are
    zero: int | None  # None where the engine has none
    zero_needs: Mapping[str, int]  # what must be free, for `auto` to become zero 1 or 2
    micro_batch: int
    memory: Mapping[str, int]
    committed: int  # what is kept of a step
    sequence: Mapping[str, int]  # activations of one sequence, by memory.activations
    moments: int  # numbers that the update rule keeps of a parameter
    unit: str
    positions: int  # of one sequence
    flops: tuple[int, int]  # of one position: all, and with causal attention
    layout: Mapping[str, Any] | None = None
    vocabulary_trained: bool = False
    labels_assumed: bool = False
    by_formula: bool = False  # memory by the planner's model of it, and not counted in a walk


def build_tables(config: Config, ranks: int, found: RunSizes) -> dict[str, Any]:
    """The tables of a dry run of a resolved configuration on so many ranks."""
    degree = None if config.parallel.shard_degree == "auto" else config.parallel.shard_degree
    several = needs_replicas(config.parallel.axes.state_parts(ranks, degree), range(ranks))  # with a rank on each node
    # Accelerators, for which this is reckoned, commit by copies, so that nothing is made again of gradients.
    keeps = list_copy_options(
        config.resilience.in_memory_checkpoints, config.resilience.replicate_every, several, replays=False
    )[0]
    tokens, steps = config.train.global_batch * found.positions, config.train.steps
    run_tokens = config.train.batches.first_sequence(steps + 1) * found.positions
    counted = config.train.epochs is None  # else the number of steps follows from the data, which is not read here
    master = 8 if config.train.dtype == "fp64" else 4
    stored = {"fp32": 4, "fp64": 8}.get(config.train.dtype, 2)
    adapters, parameters = found.parts.get(ADAPTERS, 0), sum(found.parts.values())
    return {
        "model": {
            "shape": found.shape,
            "parameters": parameters,
            "trained": found.trained,
            "parts": dict(found.parts),
        },
        "assumed": {
            "ranks": ranks,
            "engine": config.parallel.engine,
            "zero": found.zero,
            "zero_needs": dict(found.zero_needs),
            "dtype": config.train.dtype,
            "micro_batch": found.micro_batch,
            "micro_batch_measured": config.train.micro_batch == "auto",
            "activations": activation_mode_to_assume(config),
            "activations_measured": config.memory.activations == "auto",
            "vocabulary_trained": found.vocabulary_trained,
            "labels_assumed": found.labels_assumed,
            "by_formula": found.by_formula,
        },
        "layout": found.layout,
        "memory": dict(found.memory),
        "memory_total": sum(found.memory.values()),
        "host_memory": describe_budget(keeps, found.committed),
        "sequence": dict(found.sequence),
        "work": {
            "unit": found.unit,
            "sequences_per_step": config.train.global_batch,
            "rampup_batch": config.train.rampup_batch,
            "tokens_per_step": tokens,
            "steps": steps if counted else None,
            "epochs": config.train.epochs,
            "tokens": run_tokens if counted else None,
            "flops_per_token": found.flops[0],
            "flops_per_token_causal": found.flops[1],
            "flops_per_step": found.flops[0] * tokens,
            "flops": found.flops[0] * run_tokens if counted else None,
        },
        "disk": {
            "checkpoint": found.trained * master * (1 + found.moments),
            "checkpoints_kept": config.checkpoint.keep,
            "export": (parameters - adapters) * stored,
            "adapter": adapters * master,
        },
    }


def find_longest_rows(known: Mapping[int, int]) -> dict[str, int]:
    """The longest rows that fit on devices of so many GiB, of which a fifth is left free, from the bytes that rows of
    some lengths take: between neighbours they grow in proportion, and beyond the last; 0: not even short ones."""
    stretches = list(itertools.pairwise(sorted(known.items())))

    def longest(room: float) -> int:
        (short, least), (long, most) = [
            stretch for number, stretch in enumerate(stretches) if number == 0 or stretch[0][1] <= room
        ][-1]
        return max(0, int(short + (room - least) * (long - short) / (most - least)))

    return {str(gib): longest(gib * 2**30 * 0.8) for gib in DEVICE_GIB}


def max_samples_per_replica(config: Config, ranks: int) -> int:
    """Samples of a step that one copy of the model has at the most, where all copies are alike."""
    return -(-config.train.global_batch // config.parallel.axes.count_row_groups(ranks))


def micro_batch_to_assume(config: Config, ranks: int) -> int:
    """Samples at a time that memory is reckoned for: one, where the run measures how many fit."""
    wanted = 1 if config.train.micro_batch == "auto" else config.train.micro_batch
    return min(wanted, max_samples_per_replica(config, ranks))


def activation_mode_to_assume(config: Config) -> str:
    """What `memory.activations` is reckoned as: of `auto` the mode that a run tries first."""
    return "none" if config.memory.activations == "auto" else config.memory.activations


def describe_shape(spec: ModelSpec) -> str:
    return (
        f"{spec.architecture}: {spec.layers} layers, width {spec.hidden}, {spec.heads} heads ({spec.kv_heads} kv) of "
        f"{spec.head_dim}, feed-forward {spec.intermediate}, vocabulary {spec.vocab_size}"
    )


def count_by_part(counts: Mapping[str, int]) -> dict[str, int]:
    """Parameters by part of the model; names are those of models/llama.py."""
    parts: dict[str, int] = {}
    for name, count in counts.items():
        if "lora_" in name:
            part = ADAPTERS
        elif "norm" in name:
            part = "norms"
        elif name.startswith("layers."):
            part = name.split(".")[2]  # attention, mlp, or the name in a custom model
        else:
            part = name.split(".")[0]  # embed, head
        parts[part] = parts.get(part, 0) + count
    return parts
