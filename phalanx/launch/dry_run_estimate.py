"""A dry run without torch, for what the planner has a model of: plain recipes of the Llama family, also with adapters.
Others are walked.

`phalanx.autotune.dry_run` walks a pass with fake tensors, and takes as long as torch takes to be imported, and longer.
Here the same sizes come from formulas: exact ones, but for activations and for shares of the state, which are those of
`planner.memory`. A test compares the two.
"""

import math
from pathlib import Path
from typing import Any

from phalanx.autotune.run_size import (
    ADAPTERS,
    MODES,
    STATE_MEMORY_SHARE,
    RunSizes,
    activation_mode_to_assume,
    build_tables,
    count_by_part,
    describe_shape,
    micro_batch_to_assume,
    single_engine_bytes,
)
from phalanx.config.load import update_config
from phalanx.config.model_spec import build_model_spec
from phalanx.config.optimizers import OPTIMIZERS
from phalanx.config.resolve import resolve_autos
from phalanx.config.schema import Config
from phalanx.data.tokenizer import predict_vocab_size
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import hf_config
from phalanx.models.families.catalog import adapter_count, family_of, flops_per_token, parameter_shapes
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, DEVICE_KINDS
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.memory import estimate_device_memory
from phalanx.planner.predict import choice_of
from phalanx.planner.recipe_keys import work_of
from phalanx.planner.work import StepWork
from phalanx.storage import files as storage

KIND = DEVICE_KINDS["A100-80GB"]  # any with bf16: of what is asked here nothing differs between them
SIZES = (1, 3)  # sequences of the passes that are told apart, as where they are walked
MOMENTS = 2  # of AdamW
# What the planner calls a share of the state, and what a dry run does.
NAMES = {
    "weights": "weights in use",
    "gradients": "gradients",
    "master weights": "master weights",
    "optimizer state": "optimizer state",
    "weights on their way": "weights on their way",
}


def dry_run(config: Config, ranks: int) -> dict[str, Any]:
    """Sizes of the run that `config` describes on `ranks` ranks, as JSON-able tables; bytes are of one rank.

    Without a `train.dtype` it is reckoned for accelerators with bf16. Reads at most a tokenizer and a config.json.
    Raises ConfigError for what the run itself would refuse before it looks at data.
    """
    found = estimate_by_formula(config, ranks)
    if found is None:
        from phalanx.autotune import dry_run as walked

        found = walked.dry_run(config, ranks)
    return found


def estimate_by_formula(config: Config, ranks: int) -> dict[str, Any] | None:
    """The same without torch; None where there is no formula for it. Raises ConfigError."""
    if config.model.from_hf is not None and storage.is_url(config.model.from_hf):
        return None
    config, _ = resolve_autos(config, device="accelerator", world=ranks)
    if not _is_plain(config, ranks):
        return None
    to_train = False
    folder = None if config.model.from_hf is None else Path(config.model.from_hf).expanduser()
    if config.model.vocab_size == "auto" and config.model.preset is None and folder is None:
        config = update_config(config, {"model.vocab_size": predict_vocab_size(config.data)})
        to_train = config.data.tokenizer in ("train", "auto")
    theirs = None
    if folder is not None:
        theirs = hf_config.spec_from_config(hf_config.read_config(folder), str(folder / "config.json"))
    spec = build_model_spec(config, theirs)
    if not _has_formula(config, spec):
        return None
    return build_tables(config, ranks, _sizes(config, spec, ranks, to_train))


def _is_plain(config: Config, ranks: int) -> bool:
    """Whether what the recipe asks for, beside its model, has been compared with a walk."""
    parallel = config.parallel
    engine = "single" if ranks == 1 else "sharded"
    return (
        config.task.kind == "language"
        and config.model.code is None
        and (config.model.lora is None or config.model.lora.adapter is None)
        and not storage.is_url(config.data.tokenizer)
        and config.parallel.axes.model_parallel_size == 1
        and parallel.engine == engine
        and config.comm.compress == "none"
        and not isinstance(config.balance.optimizer_state, list)
        and OPTIMIZERS[config.optim.name].replays
        and config.train.dtype != "fp64"
    )


def _has_formula(config: Config, spec: ModelSpec) -> bool:
    """Whether the planner's model of a pass holds for the model."""
    windowed = spec.sliding_window is not None and spec.sliding_window < config.data.seq_len
    nothing_moves = config.memory.activations == "offload" and spec.layers <= config.memory.offload_prefetch_blocks
    options = family_of(spec).options
    usual = options.gated and options.causal and not options.post_norms
    plain = usual and spec.dropout == 0.0 and not windowed and not nothing_moves
    if spec.lora is None or not plain:
        return plain
    # The first block keeps little where nothing in its attention is trained. And where the feed-forward part is narrow,
    # a pass is at its height in attention, of which the planner has no transients.
    return bool({"q", "k", "v"} & set(spec.lora.targets)) and spec.intermediate >= max(
        2.5 * spec.hidden, 1.5 * spec.heads * spec.head_dim
    )


def _sizes(config: Config, spec: ModelSpec, ranks: int, to_train: bool) -> RunSizes:
    shapes = parameter_shapes(spec)
    parts = count_by_part({name: math.prod(shape) for name, shape in shapes.items()})
    whole, adapters = sum(parts.values()), adapter_count(spec)
    trained, frozen = (adapters, whole) if adapters else (whole, 0)
    parts |= {ADAPTERS: adapters} if adapters else {}
    cluster = ClusterSpec((NodeGroup(1, ranks, KIND),))
    work, choice = work_of(config, spec, cluster), choice_of(config, cluster)
    passes = {
        mode: _pass(work, choice_of(update_config(config, {"memory.activations": mode}), cluster)) for mode in MODES
    }
    once, each = passes[activation_mode_to_assume(config)]
    micro_batch = micro_batch_to_assume(config, ranks)
    if ranks == 1:
        master = work.master_bytes
        memory = single_engine_bytes(trained, frozen, trained * MOMENTS * master, work.width, master)
        committed = trained * (1 + MOMENTS) * master
    else:
        memory, committed = _sharded(work, choice, ranks)
    needs = {}
    if ranks > 1 and config.parallel.zero == "auto":
        for zero in (1, 2):
            tried = choice_of(update_config(config, {"parallel.zero": zero}), cluster)
            needs[str(zero)] = int(
                (sum(_sharded(work, tried, ranks)[0].values()) + _head_gradient_bytes(work)) / STATE_MEMORY_SHARE
            )
    memory |= {"activations": micro_batch * each, "loss and the head's gradient": once}
    return RunSizes(
        shape=describe_shape(spec),
        parts=parts,
        trained=trained,
        zero=None if ranks == 1 else choice.zero,
        zero_needs=needs,
        micro_batch=micro_batch,
        memory=memory,
        committed=committed,
        sequence={mode: found for mode, (_, found) in passes.items()},
        moments=MOMENTS,
        unit="tokens",
        positions=config.data.seq_len,
        flops=flops_per_token(spec, config.data.seq_len),
        vocabulary_trained=to_train,
        by_formula=True,
    )


def _pass(work: StepWork, choice: LayoutChoice) -> tuple[int, int]:
    """What a forward and backward pass adds at its height, in bytes: once, and for each sequence."""
    peaks = []
    for sequences in SIZES:
        parts = estimate_device_memory(
            work, KIND, choice, 1, 0, work.layers, sequences, 1, 1.0, DEFAULT_CONSTANTS
        ).parts
        peaks.append(int(parts["activations"] + parts["logits"]))
    each = (peaks[1] - peaks[0]) // (SIZES[1] - SIZES[0])
    return max(0, peaks[0] - each * SIZES[0]), each


def _sharded(work: StepWork, choice: LayoutChoice, ranks: int) -> tuple[dict[str, int], int]:
    """What one of several ranks holds besides activations, by what it holds, and what of it is kept of a step."""
    # As a dry run has it, there are several micro-batches.
    found = estimate_device_memory(
        work, KIND, choice, ranks, 0, work.layers, 1, 2, 1.0 / (choice.shard_degree or ranks), DEFAULT_CONSTANTS
    )
    parts = {name: int(found.parts[theirs]) for theirs, name in NAMES.items() if theirs in found.parts}
    return parts, int(found.state_bytes)


def _head_gradient_bytes(work: StepWork) -> int:
    """The gradient of the head, which the loss makes in the master's type before it is narrowed, unless it is
    frozen."""
    return work.vocabulary * work.hidden * (work.master_bytes + work.width) if work.lora is None else 0
