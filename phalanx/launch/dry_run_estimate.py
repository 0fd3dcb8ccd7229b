"""Dry run without torch, by formulas, for plain recipes of the Llama family, also with adapters. Others run with fake
tensors.

`phalanx.autotune.dry_run` runs a pass with fake tensors, which takes longer than the import of torch. Here the same
sizes come from the formulas of `planner.memory`. A test compares the two.
"""

import math
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
)
from phalanx.config.load import update_config
from phalanx.config.model_spec import build_model_spec
from phalanx.config.optimizers import find_optimizer
from phalanx.config.resolve import has_vocabulary_of_tokenizer, resolve_autos
from phalanx.config.schema import Config
from phalanx.data.tokenizer import predict_vocab_size
from phalanx.layout.memory_model import (
    FROZEN,
    GRADIENTS,
    MASTERS,
    ON_THEIR_WAY,
    OPTIMIZER_STATE,
    PARAMETERS,
    ElementBytes,
    head_gradient_bytes,
)
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import hf_config
from phalanx.models.families.catalog import adapter_count, block_options, flops_per_token, parameter_shapes
from phalanx.models.families.family import BlockOptions
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, DEVICE_KINDS
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.memory import estimate_device_memory
from phalanx.planner.predict import choice_of
from phalanx.planner.recipe_keys import work_of
from phalanx.planner.work import StepWork
from phalanx.storage import files as storage
from phalanx.storage.local_copies import fetch_folder, is_remote

KIND = DEVICE_KINDS["A100-80GB"]  # any with bf16 gives the same sizes
# Numbers of sequences of the two passes that are traced, to separate fixed costs from costs per sequence
SIZES = (1, 3)
MOMENTS = 2  # of AdamW
ITEMS = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER_STATE, FROZEN, ON_THEIR_WAY)


def dry_run(config: Config, ranks: int) -> dict[str, Any]:
    """Sizes of the run that `config` describes on `ranks` ranks, as JSON-able tables; bytes are of one rank.

    Without a `train.dtype` it assumes accelerators with bf16. Reads at most a tokenizer and a config.json. Raises
    ConfigError for everything that the run itself would reject before it reads data.
    """
    found = estimate_by_formula(config, ranks)
    if found is None:
        from phalanx.autotune import dry_run as walked

        found = walked.dry_run(config, ranks)
    return found


def estimate_by_formula(config: Config, ranks: int) -> dict[str, Any] | None:
    """The estimate without torch; None if there is no formula for the recipe. Raises ConfigError."""
    if config.model.from_hf is not None and storage.is_url(config.model.from_hf):
        return None
    config, _ = resolve_autos(config, device="accelerator", world=ranks)
    if not _is_plain(config, ranks):
        return None
    to_train = False
    folder = None
    if config.model.from_hf is not None:
        folder = fetch_folder(config.model.from_hf, config.data.cache, weights=False)
    if has_vocabulary_of_tokenizer(config):
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
    """Whether the formulas were verified for the recipe's keys beside its model."""
    parallel = config.parallel
    engine = "single" if ranks == 1 else "sharded"
    return (
        config.task.kind == "language"
        and config.model.code is None
        and (config.model.lora is None or config.model.lora.adapter is None)
        and not (is_remote(config.data.tokenizer) and has_vocabulary_of_tokenizer(config))
        and config.parallel.axes.model_parallel_size * parallel.context * parallel.expert == 1
        and parallel.engine == engine
        and config.comm.compress == "none"
        and not isinstance(config.balance.optimizer_state, list)
        and find_optimizer(config.optim.name).replays
        and config.train.dtype != "fp64"
    )


def _has_formula(config: Config, spec: ModelSpec) -> bool:
    """Whether the planner's model of a pass holds for the model."""
    windowed = spec.sliding_window is not None and spec.sliding_window < config.data.seq_len
    nothing_moves = config.memory.activations == "offload" and spec.layers <= config.memory.offload_prefetch_blocks
    options = block_options(spec)
    usual = options == BlockOptions(qkv_bias=options.qkv_bias, qk_norm=options.qk_norm)
    usual &= spec.moe is None  # tokens sorted by expert take additional memory
    plain = usual and spec.dropout == 0.0 and not windowed and not nothing_moves
    if spec.lora is None or not plain:
        return plain
    # The first block keeps little if nothing in its attention is trained. And if the feed-forward part is narrow, a
    # pass has its peak in attention, whose transients the planner does not model.
    return bool({"q", "k", "v"} & set(spec.lora.targets)) and spec.intermediate >= max(
        2.5 * spec.hidden, 1.5 * spec.heads * spec.head_dim
    )


def _sizes(config: Config, spec: ModelSpec, ranks: int, to_train: bool) -> RunSizes:
    shapes = parameter_shapes(spec)
    parts = count_by_part({name: math.prod(shape) for name, shape in shapes.items()})
    whole, adapters = sum(parts.values()), adapter_count(spec)
    trained = adapters or whole
    parts |= {ADAPTERS: adapters} if adapters else {}
    cluster = ClusterSpec((NodeGroup(1, ranks, KIND),))
    work, choice = work_of(config, spec, cluster), choice_of(config, cluster)
    passes = {
        mode: _pass(work, choice_of(update_config(config, {"memory.activations": mode}), cluster)) for mode in MODES
    }
    once, each = passes[activation_mode_to_assume(config)]
    micro_batch = micro_batch_to_assume(config, ranks)
    memory, committed = _state(work, choice, ranks)
    needs, each_bytes = {}, ElementBytes(work.width, work.gather_bytes, work.master_bytes)
    head_gradient = head_gradient_bytes(0 if adapters else work.table_parameters, each_bytes)
    if ranks > 1 and config.parallel.zero == "auto":
        for zero in (1, 2):
            tried = choice_of(update_config(config, {"parallel.zero": zero}), cluster)
            needs[str(zero)] = int((sum(_state(work, tried, ranks)[0].values()) + head_gradient) / STATE_MEMORY_SHARE)
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
    """Peak bytes added by a forward and backward pass: once, and per sequence."""
    peaks = []
    for sequences in SIZES:
        parts = estimate_device_memory(
            work, KIND, choice, 1, 0, work.layers, sequences, 1, 1.0, DEFAULT_CONSTANTS
        ).parts
        peaks.append(int(parts["activations"] + parts["logits"]))
    each = (peaks[1] - peaks[0]) // (SIZES[1] - SIZES[0])
    return max(0, peaks[0] - each * SIZES[0]), each


def _state(work: StepWork, choice: LayoutChoice, ranks: int) -> tuple[dict[str, int], int]:
    """Bytes of a rank besides activations, by item, and how many of them are committed in a step."""
    # As a dry run has it, there are several micro-batches.
    found = estimate_device_memory(
        work, KIND, choice, ranks, 0, work.layers, 1, 2, 1.0 / (choice.shard_degree or ranks), DEFAULT_CONSTANTS
    )
    parts = {name: int(found.parts[name]) for name in ITEMS if name in found.parts}
    return parts, int(found.state_bytes)
