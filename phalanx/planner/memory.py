"""Bytes that a device holds while it trains, by what holds them. Pure numbers.

For this project's own engine the rule is that of `engine.memory_model`, which needs torch: a test compares the two.
"""

from dataclasses import dataclass
from functools import cached_property

from phalanx.planner import compute_cost
from phalanx.planner.device_catalog import CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork, adapter_widths, count_adapter_parameters, find_trained_share
from phalanx.recovery.catalog import NO_COPIES, StateCopies, choose_copies, list_copy_options

STATE = ("master weights", "optimizer state")
UNITS_AT_ONCE = 2  # of parameters that are whole with zero 3: the block in use, and the one that is fetched
IN_FLIGHT = 3  # buckets of gradients of one size on their way with zero 2
# Tokens of a chunk of this project's own loss, on an accelerator and on a CPU, and bytes of its logits in fp32.
CHUNK_TOKENS, CHUNK_LEAST_BYTES, CHUNK_MOST_BYTES = 4096, 512 << 20, 2 << 30
CPU_CHUNK_TOKENS, CPU_CHUNK_BYTES = 512, 4 << 20
# Of a device, that layouts of this project's own engine leave free: a run that ends for want of memory costs more than
# a smaller micro-batch, and train.micro_batch=auto leaves twice as much.
MEMORY_MARGIN = 0.1
CHECKPOINT_COPY = "a checkpoint's copy"  # beyond what is held in a step
# On a CPU: of steps that outlive the ranks, what is not in the master weights and the optimizer state already; and of
# another node's ranks.
IN_MEMORY_STEPS, REPLICAS = "kept steps", "replicas of other ranks"
IN_SHARES = (*STATE, IN_MEMORY_STEPS, REPLICAS)  # what a device holds more of, the more of the state is its own
READ_NORMS = (("q", "k", "v"), ("gate", "up"))  # matrices that read what one norm gives
# Of an element of what is dropped, while random bits are made: three words of 8 bytes for two, and their halves apart.
DRAW_BYTES = 20
LOGIT_BYTES = 6  # of an element of whole logits of two bytes: themselves, their logarithms, and the gradient


@dataclass(frozen=True)
class DeviceMemory:
    """What each of some devices alike holds, of what it has; bytes."""

    devices: int
    kind: DeviceKind
    stage: int
    parts: dict[str, float]
    state_bytes: float = 0.0  # of the master weights and moments that it owns, once: what is committed and saved of it
    keeps: StateCopies = (
        NO_COPIES  # how often its state, and that of another node's device, lies in memory that outlives ranks
    )

    @cached_property
    def total_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> float:
        """Bytes to spare; below zero what is short."""
        return self.kind.memory_bytes - self.total_bytes


def parameters_of(
    work: StepWork, tensor: int, layers: int, first: bool, last: bool
) -> tuple[float, float, float, float]:
    """Parameters of a rank of a stage: all, those of a block, of the embedding, and of the head, where it has them. A
    tied head on another stage than the embedding holds the table once more."""
    block = work.matrix_parameters / tensor + (work.block_parameters - work.matrix_parameters)
    embedding = work.embedding_parameters / tensor if first else 0.0
    head = work.head_parameters / tensor if last else 0.0
    if last and work.tied and not first:
        head += work.vocabulary * work.hidden / tensor
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
    cosines and sines in fp32 for either. They are the same for all sequences, unless rows have positions of their own.
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
        # Their exponents in fp32 at least, what is left of them, and which were dropped.
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
            # Scores are products, which are kept, and a dry run shows nearly all that is made of them kept as well.
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
        # What was kept is handed out once: only the block's input is there beside what is made of it.
        return kept, again - kept + of_input
    return of_input, again


def input_bytes(work: StepWork) -> tuple[float, float]:
    """What a block keeps of one token for the gradients of its matrices: (of what norms give, and adapters make of
    inputs; of what the last matrix takes). What `o` takes is attention's result, which is kept anyway.

    A trained matrix needs its input, that of a norm's several matrices once. A frozen one needs none: the gradient to
    its input takes the weight alone. Its adapter keeps what it takes, with dropout a copy of its own and which elements
    are left (a byte each), and what A makes of it, `rank` elements for B.
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
    """What this project's own loss holds at its height: of one chunk logits, these in fp32 and their logarithms, and of
    the head's matrix the gradient in fp32."""
    columns, tokens = work.vocabulary / tensor, sequences * work.seq_len
    if kind.on_host:
        chunk = max(CPU_CHUNK_TOKENS, CPU_CHUNK_BYTES / (4 * columns))
    else:
        enough = min(CHUNK_TOKENS, CHUNK_MOST_BYTES / (4 * columns))
        chunk = max(1.0, enough, CHUNK_LEAST_BYTES / (4 * columns))
    chunks = max(1.0, -(-tokens // chunk))
    gradient = columns * work.hidden * 4 if work.lora is None else 0.0
    # With several, the gradient to the logits of the one before is still there.
    logits = work.width + 4 + (4 if work.width < 4 else 0) + (work.width if chunks > 1 else 0)
    return tokens / chunks * columns * logits + gradient + tokens * work.hidden * work.width


def estimate_device_memory(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, copies: int, stage: int, layers: int, sequences: float,
    micro_batches: int, own_share: float, constants: CostConstants, devices: int = 1, replicated: bool = False,
) -> DeviceMemory:  # fmt: skip
    """What a device of stage `stage` holds; `own_share`: its part of what is sharded (even: 1 / shard degree);
    `replicated`: other nodes are to keep its state, too, where there is room."""
    first, last = choice.ends(stage)
    whole, block, embedding, head = parameters_of(work, choice.tensor, layers, first, last)
    width = work.width if choice.engine in ("sharded", "fsdp") else 2 if work.width == 2 else 4
    own = whole * own_share
    parts: dict[str, float] = {}
    zero = choice.zero if copies > 1 else min(choice.zero, 1)
    trained = find_trained_share(work)
    if zero == 3:
        if choice.engine == "sharded" and not work.tied:
            units = sum(sorted((block, block, embedding, head))[-UNITS_AT_ONCE:])
        elif choice.engine == "sharded":  # a table that the head uses too is always there
            units = embedding + UNITS_AT_ONCE * block
        else:
            units = max(embedding + head, block) + UNITS_AT_ONCE * block
        parts["weights"] = min(whole, units) * width + own * (1.0 - trained) * work.gather_bytes
    else:
        parts["weights"] = whole * width
    apart = zero == 3 or choice.slots > 1 or width != work.master_bytes
    if choice.engine == "ddp" and width != work.master_bytes:
        apart = True
    if work.far_bytes is not None:  # parameters are rounded from the masters
        apart = True
    state_own = whole if choice.engine == "ddp" or zero == 0 else own
    parts["master weights"] = state_own * trained * work.master_bytes * choice.slots if apart else 0.0
    parts["optimizer state"] = state_own * trained * work.state_bytes * choice.slots
    # What accelerators commit is copied to their host, as it is. Nothing is known of the room there, which is taken to
    # be enough.
    keeps = list_copy_options(work.memory, work.replicate, replicated, replays=False)[0]
    if kind.on_host and choice.engine == "sharded" and work.memory is not False:
        gradient = own * trained * work.master_bytes
        state = gradient + own * trained * work.state_bytes
        options = list_copy_options(work.memory, work.replicate, replicated, work.replays)
        keeps = choose_copies(options, state, gradient, kind.memory_bytes - kind.reserved_bytes)
        # The state lives there; but that of one rank alone is copied there.
        there = 0.0 if copies * choice.tensor * choice.pipeline == 1 else sum(parts[name] for name in STATE)
        if keeps.own:
            parts[IN_MEMORY_STEPS] = max(0.0, keeps.own_bytes(state, gradient) - there)
        if keeps.replicas:
            parts[REPLICAS] = keeps.replica_bytes(state, gradient)
    alone = copies * choice.tensor * choice.pipeline == 1 and work.far_bytes is None  # the engine of a single rank
    accumulates = micro_batches > 1
    gradient = work.reduce_bytes if choice.engine != "sharded" else work.master_bytes
    # Of a block, of the embedding and of the head what is trained.
    learns = (block, embedding, head) if work.lora is None else (float(count_adapter_parameters(work)), 0.0, 0.0)
    largest = max(learns) if zero == 3 else learns[0]
    if choice.engine == "fsdp":
        sums = own * trained * work.master_bytes + largest * (work.reduce_bytes + width)
    elif zero <= 1 or choice.engine == "megatron":
        sums = whole * trained * gradient
        if choice.engine == "sharded" and alone and width != work.master_bytes:
            sums += whole * trained * width  # those of one micro-batch beside their sum
    elif choice.reduce == "per_step" and accumulates:
        sums = (own + whole) * trained * gradient
    else:
        buckets = largest if zero == 3 else min(layers, IN_FLIGHT) * learns[0] + learns[1] + learns[2]
        sums = (own * trained + buckets) * gradient
    parts["gradients"] = sums
    several = copies * choice.tensor * choice.pipeline > 1
    if several and choice.engine == "sharded" and work.gather_bytes > width:  # each makes its own type of what it gets
        # What is trained travels apart from what is frozen, which is only gathered with zero 3.
        gathered = (max(learns[0], block - learns[0]), embedding, head) if zero == 3 else learns
        parts["weights on their way"] = 2 * max(gathered) * work.gather_bytes
    beside = band_bytes(work, kind, choice.tensor, sequences)
    if choice.engine == "sharded" and not work.both_ways:
        beside += rope_bytes(work, sequences)
    kept, again = block_activations(work, choice, beside)
    under_way = float(min(choice.pipeline - stage, micro_batches))
    if choice.order == "gpipe":
        under_way = float(micro_batches if choice.pipeline > 1 else 1)
    elif choice.order == "zero_bubble":  # of either chunk as many as there are stages, Qi et al. 2024
        under_way = float(min(choice.pipeline, micro_batches))
    elif choice.virtual > 1 and choice.pipeline > 1:
        more = 1.0 + (choice.pipeline - 1) / (choice.pipeline * choice.virtual)
        under_way = min(float(micro_batches), choice.pipeline * more)
    # Those of the last blocks stay, and with adapters the first one's, to which there is no gradient.
    blocks = min(work.horizon + (work.lora is not None), layers) if choice.offload else layers
    parts["activations"] = sequences * under_way * blocks * kept
    again *= sequences
    if last and choice.engine == "sharded":
        # The last norm and its input, and the loss; in a block's backward pass these are over.
        residual = work.width if work.width < 4 else 0  # else it is what the norm keeps
        normalised = work.width if work.lora is None else 0
        edge = sequences * work.seq_len * work.hidden * (4 + normalised + work.width + residual)
        parts["logits"] = loss_bytes(work, kind, choice.tensor, sequences)
        again += sequences * (gradients_of_block(work, choice) + (min(1, layers - blocks) * kept))  # one comes back
        again = edge + max(0.0, again - edge - parts["logits"])
    parts["activations"] += again
    if last and choice.engine != "sharded":
        logits = sequences * work.seq_len * work.vocabulary / choice.tensor * LOGIT_BYTES * work.width / 2
        parts["logits"] = logits
    state = state_own * trained * (work.master_bytes + work.state_bytes)
    if kind.on_host and choice.engine == "sharded":
        # A checkpoint's copy lies in the same memory; it is made between steps, when nothing is under way.
        resting = (0.0 if zero == 3 else parts["weights"]) + sum(parts.get(name, 0.0) for name in IN_SHARES)
        resting += min(parts["gradients"], own * gradient * trained if zero == 3 else parts["gradients"])
        parts[CHECKPOINT_COPY] = max(0.0, resting + state - sum(parts.values()))
    slack = max(constants.slack, MEMORY_MARGIN) if choice.engine == "sharded" else constants.slack
    parts["reserved"] = kind.reserved_bytes + slack * kind.memory_bytes
    return DeviceMemory(devices, kind, stage, parts, state, keeps)
