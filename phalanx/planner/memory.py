"""The memory model of the planner: bytes of a device in training by item, from the shapes of a model. Pure numbers.

What lasts from one micro-batch to the next is that of `layout.memory_model`; activations are counted here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.layout.context_exchange import TILE_QUERIES, TILE_SCORE_BYTES, count_held_keys
from phalanx.layout.memory_model import (
    GRADIENTS,
    MASTERS,
    OPTIMIZER_STATE,
    PARAMETERS,
    STATE_ITEMS,
    ElementBytes,
    Holdings,
    Sizes,
    count_fsdp_bytes,
    count_sharded_bytes,
    count_single_bytes,
    loss_chunk_tokens,
)
from phalanx.planner import compute_cost
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.device_catalog import CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork, adapter_widths, count_adapter_parameters
from phalanx.recovery import catalog
from phalanx.recovery.catalog import NO_COPIES, StateCopies, choose_copies, list_copy_options

# Of a device, that layouts of the sharded engine leave free: a run that runs out of memory costs more than
# a smaller micro-batch, and train.micro_batch=auto leaves twice as much.
MEMORY_MARGIN = 0.1
CHECKPOINT_COPY = "a checkpoint's copy"  # a temporary copy, beyond the memory of a step
# On a CPU: of steps that outlive the ranks, what is not in the master weights and the optimizer state already; and of
# another node's ranks.
IN_MEMORY_STEPS, REPLICAS = "kept steps", "replicas of other ranks"
IN_SHARES = (*STATE_ITEMS, IN_MEMORY_STEPS, REPLICAS)  # items that grow with a device's share of the state
OTHER_KEYS, TILE_SCORES = "keys and values of other ranks", "scores of attention"
READ_NORMS = (("q", "k", "v"), ("gate", "up"))  # matrices that read what one norm gives
# Of an element of what is dropped, while random bits are made: three words of 8 bytes for two, and their halves apart.
DRAW_BYTES = 20
LOGIT_BYTES = 6  # of an element of whole logits of two bytes: themselves, their logarithms, and the gradient


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a group of equal devices, by item, against their capacity; bytes."""

    devices: int
    kind: DeviceKind
    stage: int
    parts: dict[str, float]
    state_bytes: float = 0.0  # master weights and moments that it owns, once: the size of a commit or save
    keeps: StateCopies = (
        NO_COPIES  # how often its state, and that of another node's device, lies in memory that outlives ranks
    )

    @cached_property
    def total_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> float:
        """Free bytes; negative if memory is short."""
        return self.kind.memory_bytes - self.total_bytes


def parameters_of(
    work: StepWork, tensor: int, layers: int, first: bool, last: bool
) -> tuple[float, float, float, float]:
    """Parameters of a rank of a stage: all, those of a block, of the embedding, and of the head, where it has them. A
    tied head on another stage than the embedding holds the table once more."""
    block = work.cut_parameters / tensor + (work.block_parameters - work.cut_parameters)
    embedding = work.embedding_parameters / tensor if first else 0.0
    head = work.head_parameters / tensor if last else 0.0
    if last and work.tied and not first:
        head += work.table_parameters / tensor
    return layers * block + embedding + head, block, embedding, head


def band_bytes(work: StepWork, kind: DeviceKind, tensor: int, sequences: float) -> float:
    """What a block keeps of one of the `sequences` of a micro-batch beside all else, on average over layers, since
    attention with a window goes band by band: the results of bands, keys and values of the band before once more, and
    for all sequences together a mask of the pairs."""
    queries = compute_cost.attention_band(work, kind)
    if not queries:
        return 0.0
    before, pairs = work.seq_len - queries, queries * (2 * work.seq_len - queries)
    each = (work.seq_len * work.query_channels + 2 * before * work.key_channels) / tensor
    return work.windowed_share * work.width * (each + pairs / sequences)


def rope_bytes(work: StepWork, sequences: float) -> float:
    """What a block keeps of one of the `sequences` of a micro-batch of the angles that queries and keys are turned by:
    cosines and sines in fp32 for either. They are the same for all sequences, unless positions differ by row.
    """
    return 16.0 * work.head_channels * work.seq_len / (1.0 if work.own_positions else sequences)


def block_activations(work: StepWork, choice: LayoutChoice, bands: float = 0.0) -> tuple[float, float]:
    """(bytes that a block keeps of one sequence until its backward pass, bytes while it is computed again).

    `bands`: `band_bytes`, and `rope_bytes` where it has such. Inputs of matrices: `input_bytes`.

    Korthikanti et al. 2022, equation 1 and 2: tokens x hidden (10 + 24 / t) bytes and 5 heads seq_len^2 / t of
    attention that writes its scores, here counted tensor by tensor so that it holds for other widths, for gated
    feed-forward parts and without dropout. `selective` keeps the results of products and of attention, and where
    scores are written that is all it drops (as there); `full` keeps the block's input.
    """
    width, tensor, hidden = work.width, choice.tensor, work.hidden
    spread = tensor if choice.sequence else 1
    # Two norms: their inputs, in fp32, where the norm is this project's own, and once more normalised for the gradient
    # of its weight, if it is trained.
    normalised = width if work.lora is None else 0
    norm = 4 + normalised if choice.engine == "sharded" else width
    to_norms, to_down = input_bytes(work)
    outside = 2 * norm * hidden + to_norms + (2 * hidden if work.dropout else 0)
    # Queries, keys, values, attention's result; of the feed-forward part what its activation takes and gives, the other
    # factor, and what `down` takes.
    inside = width * (2 * work.query_channels + 2 * work.key_channels + (3 if work.gated else 1) * work.ffn) + to_down
    if work.qk_norm and choice.engine == "sharded":
        inside += (4 + normalised) * (work.query_channels + work.key_channels)
    dropped = work.dropout or work.attention_dropout
    scores = work.heads * work.seq_len * (2 * width - 2 + 3 if dropped else width)
    if work.attention_dropout and choice.engine == "sharded":
        # Exponentials in at least fp32, their normalized values, and the dropout mask.
        scores = work.heads * work.seq_len * (max(4, width) + width + 1)
    elif not compute_cost.writes_scores(work, choice):
        scores = 0
    everything = work.seq_len * (outside / spread + (inside + scores) / tensor) + bands
    if choice.recompute == "none":
        return everything, 0.0
    of_input = work.seq_len * width * hidden / spread
    # In fp32 the block's input is what its first norm keeps.
    again = everything - (of_input if width >= 4 and choice.engine == "sharded" else 0.0)
    if choice.recompute == "selective":
        if work.attention_dropout and choice.engine == "sharded":
            # Scores are products, which are kept, and a dry run shows that nearly all values derived from them are kept
            # as well.
            return work.seq_len * (outside / spread + (inside + scores) / tensor), 0.0
        if compute_cost.writes_scores(work, choice):
            return work.seq_len * (outside / spread + inside / tensor), work.seq_len * scores / tensor
        results = width * (
            work.query_channels + 2 * work.key_channels + work.query_channels + (2 if work.gated else 1) * work.ffn
        )
        # Products with A, and those with B that sum over more than an eighth of their columns (parallel.activations).
        rank = work.lora.rank if work.lora is not None else 0
        results += width * sum(rank + (rows if 8 * rank >= rows else 0) for _, rows in adapter_widths(work).values())
        kept = work.seq_len * (3 * width * hidden / spread + results / tensor)
        # Kept activations are counted once: only the block's input is added to those derived from it.
        return kept, again - kept + of_input
    return of_input, again


def input_bytes(work: StepWork) -> tuple[float, float]:
    """What a block keeps of one token for the gradients of its matrices: (of what norms give, and adapters make of
    inputs; of what the last matrix takes). What `o` takes is attention's result, which is kept anyway.

    A trained matrix needs its input, that of a norm's several matrices once. A frozen one needs none: the gradient to
    its input takes the weight alone. Its adapter keeps its input, with dropout a separate copy and the mask (a byte per
    element), and what A makes of it, `rank` elements for B.
    """
    width, lora, targets = work.width, work.lora, adapter_widths(work)
    if lora is None:
        return 2 * width * work.hidden, width * work.ffn
    kept = width * lora.rank * len(targets)
    if lora.dropout:
        return kept + (width + 1) * sum(columns for columns, _ in targets.values()), 0
    kept += width * work.hidden * sum(any(name in targets for name in group) for group in READ_NORMS)
    return kept, width * work.ffn if "down" in targets else 0


def gradients_of_block(work: StepWork, choice: LayoutChoice) -> float:
    """What a block holds of one sequence at its height beside what it keeps. In its backward pass the gradients to its
    output and within its feed-forward part: that to what `down` takes takes the place of this where that was kept.

    With dropout of adapters it may be higher while the last elements are drawn, in the forward pass or when it is run
    again: DRAW_BYTES for each, and what is there beside what will be kept, before the dropped copy and its mask are:
    what `down` takes, what the norm gave, the matrix's own product, and the residuals, which in fp32 are what norms
    keep, but for the gradient where the block is run again. (`up` is as wide as its product, which is kept.)
    """
    inner, width = (2 if work.gated else 1) * work.ffn / choice.tensor, work.width
    lora = work.lora
    if lora is not None and ("down" not in lora.targets or lora.dropout):
        inner += work.ffn
    height = width * (work.hidden / (choice.tensor if choice.sequence else 1) + inner)
    if lora is not None and lora.dropout:
        drawn, others = DRAW_BYTES - (width + 1), 3 if width < 4 else 1 + (choice.recompute != "none")
        there = width * (others * work.hidden - lora.rank)
        if "down" in lora.targets:
            height = max(height, (drawn + width) * work.ffn + width * work.hidden + there)
        elif "up" in lora.targets:
            height = max(height, drawn * work.hidden + there)
    return work.seq_len * height


def loss_bytes(work: StepWork, kind: DeviceKind, tensor: int, sequences: float) -> float:
    """What this project's own loss holds at its height: of one chunk logits, these in fp32 (or fp64) and their
    logarithms, and of the head's matrix the gradient in that."""
    columns, tokens = work.vocabulary / tensor, sequences * work.seq_len
    chunks = max(1.0, -(-tokens // loss_chunk_tokens(columns, kind.on_host)))
    wide = max(4, work.width)
    gradient = work.table_parameters / tensor * wide if work.lora is None else 0.0
    # With several, the gradient to the logits of the one before is still there.
    logits = work.width + wide + (4 if work.width < 4 else 0) + (work.width if chunks > 1 else 0)
    return tokens / chunks * columns * logits + gradient + tokens * work.hidden * work.width


def needs_replicas(choice: LayoutChoice, copies: int, cluster: ClusterSpec) -> bool:
    """Whether nodes hold what no other one does, so that another one is to have it too."""
    if not 0 < choice.shard_degree < copies:
        return cluster.node_of((choice.devices or cluster.devices) - 1) > 0
    # Nodes are in the order of devices: a part is on several where the first and the last that have it are.
    together, behind = choice.shard_degree * choice.tensor, (copies - choice.shard_degree) * choice.tensor
    first = [stage * copies * choice.tensor + place for stage in range(choice.pipeline) for place in range(together)]
    nodes = [cluster.node_of(device + more) for more in (0, behind) for device in first]
    return catalog.needs_replicas(first * 2, nodes)


def estimate_device_memory(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, copies: int, stage: int, layers: int, sequences: float,
    micro_batches: int, own_share: float, constants: CostConstants, devices: int = 1, replicated: bool = False,
) -> DeviceMemory:  # fmt: skip
    """What a device of stage `stage` holds; `own_share`: its part of what is sharded (even: 1 / shard degree);
    `replicated`: other nodes are to keep its state, too, where there is room."""
    first, last = choice.ends(stage)
    whole, block, embedding, head = parameters_of(work, choice.tensor, layers, first, last)
    # Experts of other ranks are not held, but as few ranks divide the state of those that are.
    elsewhere = work.expert_parameters / choice.tensor * (1.0 - 1.0 / choice.expert)
    owned, whole, block = whole * own_share, whole - layers * elsewhere, block - elsewhere
    width = work.width if choice.engine in ("sharded", "fsdp") else 2 if work.width == 2 else 4
    zero = choice.zero if copies > 1 else min(choice.zero, 1)
    each = ElementBytes(width, work.gather_bytes, work.master_bytes)
    unsharded = choice.engine == "ddp" or zero == 0
    several = copies * choice.tensor * choice.pipeline > 1
    # Of a block, of the embedding and of the head; frozen parameters have separate buckets.
    learns = (block, embedding, head) if work.lora is None else (float(count_adapter_parameters(work)), 0.0, 0.0)
    learning = layers * learns[0] + learns[1] + learns[2]
    own = owned if work.lora is None else learning * own_share
    edges = [edge for edge in (embedding, head) if edge]
    held = Holdings(
        trained=_sizes(layers, learns[0], learns[1:]),
        frozen={} if work.lora is None else _sizes(layers, block - learns[0], edges),
        own=own,
        own_frozen=owned - own,
        state_bytes=own * work.state_bytes,
        # A table that the head uses too is always there.
        units=_sizes(layers, block, [head] if work.tied else edges),
        root=embedding if work.tied else 0.0,
    )
    if choice.engine == "fsdp":
        parts = count_fsdp_bytes(held, each, reshards=zero == 3)
    elif choice.engine != "sharded":
        parts = _others_bytes(work, whole, learning if unsharded else own, width)
    elif several or work.far_bytes is not None:
        reduce = choice.reduce if copies > 1 else "per_step"
        parts = count_sharded_bytes(
            held, each, zero=zero, reduce=reduce, slots=choice.slots, accumulates=micro_batches > 1,
            compressed=work.far_bytes is not None,
        )  # fmt: skip
    else:
        parts = count_single_bytes(held, each)
    # What accelerators commit is copied to their host, as it is. Nothing is known of the room there, which is taken to
    # be enough.
    keeps = list_copy_options(work.memory, work.replicate, replicated, replays=False)[0]
    if kind.on_host and choice.engine == "sharded" and work.memory is not False:
        gradient = held.own * work.master_bytes
        state = gradient + held.state_bytes
        options = list_copy_options(work.memory, work.replicate, replicated, work.replays)
        keeps = choose_copies(options, state, gradient, kind.memory_bytes - kind.reserved_bytes)
        if keeps.own:  # the state lives there; but that of one rank alone is copied there
            there = sum(parts[name] for name in STATE_ITEMS) if several else 0.0
            parts[IN_MEMORY_STEPS] = keeps.bytes_beside(there, state, gradient)
        if keeps.replicas:
            parts[REPLICAS] = keeps.replica_bytes(state, gradient)
    rows = sequences / choice.context  # of which its positions are as many
    by = work.find_exchange(choice.tensor, choice.context)
    # Tiles of attention, which the other exchanges have, keep nothing for a window.
    beside = band_bytes(work, kind, choice.tensor, rows) if by == "heads" else 0.0
    if choice.engine == "sharded" and not work.both_ways:
        beside += rope_bytes(work, sequences)
    held_work = work if by == "heads" else replace(work, attention_dropout=False)  # tiles keep no scores
    kept, again = block_activations(held_work, choice, beside)
    under_way = float(min(choice.pipeline - stage, micro_batches))
    if choice.order == "gpipe":
        under_way = float(micro_batches if choice.pipeline > 1 else 1)
    elif choice.order == "zero_bubble":  # in-flight micro-batches of either chunk, Qi et al. 2024
        under_way = float(min(choice.pipeline, micro_batches))
    elif choice.virtual > 1 and choice.pipeline > 1:
        more = 1.0 + (choice.pipeline - 1) / (choice.pipeline * choice.virtual)
        under_way = min(float(micro_batches), choice.pipeline * more)
    # Those of the last blocks stay, and with adapters the first one's, to which there is no gradient.
    blocks = min(work.horizon + (work.lora is not None), layers) if choice.offload else layers
    parts["activations"] = rows * under_way * blocks * kept
    again *= rows
    if last and choice.engine == "sharded":
        # The last norm and its input, and the loss; in a block's backward pass these are over.
        residual = work.width if work.width < 4 else 0  # otherwise the norm keeps it
        normalised = work.width if work.lora is None else 0
        edge = rows * work.seq_len * work.hidden * (4 + normalised + work.width + residual)
        parts["logits"] = loss_bytes(work, kind, choice.tensor, rows)
        # Of experts, whose stacks of gates and of what they multiply are one parameter, its gradient.
        again += work.width * work.expert_parameters / choice.expert_ranks * (2.0 / 3.0 if work.gated else 0.5)
        again += rows * (gradients_of_block(work, choice) + (min(1, layers - blocks) * kept))  # one comes back
        again = edge + max(0.0, again - edge - parts["logits"])
    parts["activations"] += again
    if last and choice.engine != "sharded":
        logits = rows * work.seq_len * work.vocabulary / choice.tensor * LOGIT_BYTES * work.width / 2
        parts["logits"] = logits
    if by != "heads":
        parts |= _context_bytes(work, kind, choice, by, sequences, under_way * blocks)
    state = (learning if unsharded else own) * (work.master_bytes + work.state_bytes)
    if kind.on_host and choice.engine == "sharded":
        # A checkpoint's copy lies in the same memory; it is made between steps, when nothing is under way.
        resting = (0.0 if zero == 3 else parts[PARAMETERS]) + sum(parts.get(name, 0.0) for name in IN_SHARES)
        resting += min(parts[GRADIENTS], held.own * work.master_bytes if zero == 3 else parts[GRADIENTS])
        parts[CHECKPOINT_COPY] = max(0.0, resting + state - sum(parts.values()))
    slack = max(constants.slack, MEMORY_MARGIN) if choice.engine == "sharded" else constants.slack
    parts["reserved"] = kind.reserved_bytes + slack * kind.memory_bytes
    return DeviceMemory(devices, kind, stage, parts, state, keeps)


def _context_bytes(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, by: str, sequences: float, layers: float
) -> dict[str, float]:
    """What attention by tiles holds beside activations: keys and values of other ranks, with `gather` of as many
    `layers` as keep theirs, and the scores of some queries, which torch's kernel on a host does without."""
    keys = count_held_keys(by, [1.0] * choice.context, work.seq_len)
    kept = layers if by == "gather" and choice.recompute != "full" else 1.0
    width = 2.0 * max(work.key_channels / choice.tensor, work.head_channels) * work.width
    found = {OTHER_KEYS: sequences * keys * width * kept}
    if not kind.on_host or work.attention_dropout or work.windowed_share:
        largest = -(-work.seq_len // choice.context)
        found[TILE_SCORES] = sequences * TILE_QUERIES * largest * work.heads / choice.tensor * TILE_SCORE_BYTES
    return found


def _sizes(layers: int, block: float, edges: Sequence[float]) -> Sizes:
    """Blocks and edges by their elements."""
    sizes = {block: layers}
    for edge in edges:
        sizes[edge] = sizes.get(edge, 0) + 1
    return sizes


def _others_bytes(work: StepWork, whole: float, own: float, width: int) -> dict[str, float]:
    """What lasts in ranks of Megatron-LM and of PyTorch's DistributedDataParallel, which reduce in the type of
    `reduce_bytes`, and of which each updates `own` parameters."""
    apart = width != work.master_bytes
    return {
        PARAMETERS: whole * width,
        GRADIENTS: whole * work.reduce_bytes,
        MASTERS: own * work.master_bytes if apart else 0.0,
        OPTIMIZER_STATE: own * work.state_bytes,
    }
