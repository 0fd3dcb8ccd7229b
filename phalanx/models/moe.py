"""Mixture of experts: decoders whose feed-forward layers are many, of which each token takes a few (Shazeer et al.,
"Outrageously Large Neural Networks", 2017; Jiang et al., "Mixtral of Experts", 2024).

Routing (router.py) is dropless: there is no capacity, and no assignment over the tokens of a micro-batch.

The load-balancing loss of a layer, by the share f_e of tokens that choose expert e (of an even load k / E) and the
probabilities p_te, is L = E sum_e f_e mean_t p_te (Fedus et al., "Switch Transformers", 2021). As a product of two
means over a micro-batch it would depend on the division of a step. But f_e has no gradient: once f_e is fixed, L is a
sum over tokens, as cross-entropy is. So f_e is taken over a set that the recipe names (`model.moe.balance`), and the
gradient is exact however the step is divided:

| balance | f_e is taken over |
|---|---|
| `sequence` | the token's own row (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024) |
| `group` | the rows of a step whose places in the run are in one group of `group` neighbours, counted as for `step` |
| `step_before` | all tokens of the step before; even in the first |
| `step` | all tokens of the step, which a forward pass ahead of it counts (Qiu et al., "Demons in the Detail", 2025) |
| `bias` | the token's own row, as a complement of what follows |

With `bias` the corrections of sigmoid scores balance: after a step each moves by a fixed rate, up where the expert had
fewer of the step's tokens than the mean, and down where it had more (Wang et al., "Auxiliary-Loss-Free Load Balancing
Strategy for Mixture-of-Experts", 2024). They are in the choice of experts alone, not in their weights.

Tokens without a label count for nothing. With several layers the loss is the mean of the layers'; `over: model` takes
the mean of their f_e first, as transformers does.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.model_shape import LoraSpec, ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.grouped_mm import multiply_groups, sort_rows, unsort_rows
from phalanx.models.layers import IGNORE_INDEX
from phalanx.models.llama import ACTIVATIONS, MLP, Block, Llama, block_options, llama_init_rule
from phalanx.models.model import InitRule
from phalanx.models.router import Router

_SLOPE, _LIMIT = 1.702, 7.0  # of GPT-OSS


class StackAdapter(nn.Module):
    """A LoRA adapter (lora.py) of each matrix of a stack: A (E, rank, in) and B (E, out, rank)."""

    def __init__(self, experts: int, into: int, out: int, lora: LoraSpec, like: Tensor) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(experts, lora.rank, into, device=like.device, dtype=like.dtype))
        self.lora_b = nn.Parameter(torch.empty(experts, out, lora.rank, device=like.device, dtype=like.dtype))
        self.scale = lora.scale

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows (N, in), sorted by expert -> (N, out): what is added to the product with the stack."""
        return multiply_groups(multiply_groups(rows, self.lora_a, ends) * self.scale, self.lora_b, ends)


def feed_chosen(
    feed: Callable[[Tensor, Tensor], Tensor], x: Tensor, chosen: Tensor, weights: Tensor, experts: int
) -> Tensor:
    """x (T, D), chosen (T, k) int64, weights (T, k) -> (T, D): what the chosen of so many experts give, weighted.
    `feed` is `Experts.feed`, of all experts."""
    copies, flat = chosen.shape[1], chosen.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    counts = count_choices(flat, torch.ones_like(flat), experts)
    rows = feed(sort_rows(x, order, inverse, copies), counts)
    each = unsort_rows(rows, order, inverse).unflatten(0, (-1, copies))
    return (each * weights.to(x.dtype)[:, :, None]).sum(1)  # in the order of choice, on any layout


class Experts(nn.Module):
    """The gated feed-forward layers of a layer, in two stacks: gate before up (E, 2 F, D), and down (E, D, F).

    `multiply` is multiply_groups, or an FP8 product (parallel/fp8.py). With `exchange` (parallel/experts.py) this rank
    holds only some of the experts. Stacks may have adapters; `transposed` ones are (E, in, out).
    """

    transposed: ClassVar[bool] = False
    multiply: Callable[..., Tensor] = staticmethod(multiply_groups)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.gate_up = nn.Parameter(torch.zeros(moe.experts, 2 * moe.intermediate, spec.hidden))
        self.down = nn.Parameter(torch.zeros(moe.experts, spec.hidden, moe.intermediate))
        self.activation = ACTIVATIONS[block_options(spec).activation]
        self.experts = moe.experts
        self.exchange: Callable[..., Tensor] | None = None
        self.register_module("gate_up_adapter", None)
        self.register_module("down_adapter", None)

    def add_adapter(self, stack: str, lora: LoraSpec) -> None:
        """Give the stack `gate_up` or `down` an adapter, without values."""
        weight = self.get_parameter(stack)
        into, out = weight.shape[1:] if self.transposed else reversed(weight.shape[1:])
        self.add_module(f"{stack}_adapter", StackAdapter(self.experts, into, out, lora, weight))

    def product(self, stack: str, rows: Tensor, ends: Tensor) -> Tensor:
        """rows (N, in), sorted by expert, times the matrices of a stack, with its adapter."""
        weight = getattr(self, stack)
        found = self.multiply(rows, weight.transpose(1, 2) if self.transposed else weight, ends)
        adapter = getattr(self, f"{stack}_adapter")
        return found if adapter is None else found + adapter(rows, ends)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x (T, D), chosen (T, k) int64, weights (T, k) -> (T, D): what the chosen give, weighted."""
        feed = self.feed if self.exchange is None else functools.partial(self.exchange, self.feed)
        return feed_chosen(feed, x, chosen, weights, self.experts)

    def feed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts held here give for rows (N, D), sorted by expert, `counts` (experts,) int64 of each."""
        ends = counts.cumsum(0)
        gate, up = self.product("gate_up", rows, ends).chunk(2, dim=-1)
        return self.product("down", self.activation(gate) * up, ends)


class ClampedExperts(Experts):
    """Experts of GPT-OSS: stacks (E, D, 2 F), gate and up by turns, and (E, F, D), as in Hugging Face folders, with
    biases; down((up + 1) * gate * sigmoid(1.702 gate)) of a clamped gate and up."""

    transposed = True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        moe = spec.moe
        assert moe is not None
        self.gate_up = nn.Parameter(torch.zeros(moe.experts, spec.hidden, 2 * moe.intermediate))
        self.gate_up_bias = nn.Parameter(torch.zeros(moe.experts, 2 * moe.intermediate))
        self.down = nn.Parameter(torch.zeros(moe.experts, moe.intermediate, spec.hidden))
        self.down_bias = nn.Parameter(torch.zeros(moe.experts, spec.hidden))

    def feed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As `Experts.feed`."""
        ends = counts.cumsum(0)
        # A product, whose gradient is a sum in a fixed order.
        ones = rows.new_ones(rows.shape[0], 1)
        found = self.product("gate_up", rows, ends)
        found = found + multiply_groups(ones, self.gate_up_bias[:, :, None], ends)
        gate, up = found[:, ::2].clamp(max=_LIMIT), found[:, 1::2].clamp(-_LIMIT, _LIMIT)
        found = self.product("down", (up + 1) * gate * torch.sigmoid(gate * _SLOPE), ends)
        return found + multiply_groups(ones, self.down_bias[:, :, None], ends)


def reference_experts(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What `Experts` means, token by token."""
    out = torch.zeros_like(x)
    for token, (ones, shares) in enumerate(zip(chosen.tolist(), weights.to(x.dtype), strict=True)):
        for expert, share in zip(ones, shares, strict=True):
            gate, up = F.linear(x[token], experts.gate_up[expert]).chunk(2)
            out[token] = out[token] + share * F.linear(experts.activation(gate) * up, experts.down[expert])
    return out


def count_choices(chosen: Tensor, counted: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen, (..., E) of the dtype of `counted`: chosen (..., N) int64, counted (..., N) 0 or
    1. Not bincount, whose shape depends on data."""
    zeros = counted.new_zeros(*chosen.shape[:-1], experts)
    return zeros.scatter_add(-1, chosen, counted)


class MoELayer(nn.Module):
    """A router, its experts and those that all tokens go through, in the place of a block's feed-forward layer. With
    `positions` (parallel/experts.py) this rank routes only some tokens."""

    shared: MLP | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.router = Router(spec)
        self.experts = ClampedExperts(spec) if block_options(spec).experts == "clamped" else Experts(spec)
        assert spec.moe is not None
        width = spec.moe.shared * spec.moe.intermediate
        self.shared = MLP(replace(spec, intermediate=width)) if width else None
        self.positions: Any = None


class _AddedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss_sum: Tensor, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.dtype = loss_sum.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (seed,) = ctx.saved_tensors
        return grads[0], seed.to(ctx.dtype), None


class ExpertLoad:
    """What training counts of choices, and what it goes by in return. `counts` (layers, E) int64 are of the passes
    since they were last zeroed; `shares` (layers, E) are f_e, None: of each row; `corrections` (layers, E) are in
    float32 or better, None: those of the routers; `seed`, 0-dim, is what a sum of losses is multiplied by before the
    backward pass. Evaluation is not `active`: it counts nothing and adds no loss.

    With `group_counts` (G, layers, E), `shares` are (G, layers, E), too: of the groups of a step from `first_group` on,
    by the rows' places in the run."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        assert spec.moe is not None
        self.counts = torch.zeros(spec.layers, spec.moe.experts, dtype=torch.int64, device=device)
        self.group_counts: Tensor | None = None
        self.first_group = 0
        self.groups: Tensor | None = None  # of the rows of a pass
        self.shares: Tensor | None = None
        self.corrections: Tensor | None = None
        self.seed: Tensor | None = None
        self.active = False


class MoEBlock(Block):
    """A block with experts, or, among the `dense_layers`, one without; returns beside the hidden states how many tokens
    with a label, of each row, have chosen each expert, of those that this rank routes."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        assert spec.moe is not None
        self.has_experts, self.experts = spec.has_experts(layer), spec.moe.experts
        if self.has_experts:
            self.mlp = MoELayer(spec)
            # The loss of the model is the mean of its layers'.
            layers = sum(spec.has_experts(number) for number in range(spec.layers))
            self.balance = spec.moe.balance if spec.moe.balance_weight else "none"
            self.loss_weight = spec.moe.balance_weight * spec.moe.experts / layers
            self.z_weight = spec.moe.z_loss / layers

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        draws: CounterRNG | None = None,
        site: Tensor | None = None,
        segments: Tensor | None = None,
        counted: Tensor | None = None,
        seed: Tensor | None = None,
        shares: Tensor | None = None,
        correction: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Block`; with int64 counts (B, E). `counted` (B, S, 1) int64 is 1 for tokens with a label; `seed`,
        `shares` (E,) or (B, 1, E) and `correction` are of ExpertLoad; without a `seed` no loss is added."""
        x, given = self.attend(x, cos, sin, draws, site, segments)
        if self.has_experts:
            fed, counts = self.feed_experts(given, counted, seed, shares, correction)
        else:
            fed = self.feed_forward(given, draws, site)
            counts = torch.zeros(x.shape[0], self.experts, dtype=torch.int64, device=x.device)
        return self.add_fed(x, fed, draws, site), counts

    def feed_experts(
        self,
        x: Tensor,
        counted: Tensor | None,
        seed: Tensor | None,
        shares: Tensor | None,
        correction: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """x (B, S, D) -> what the experts give for it, and the counts of choices, of the tokens that this rank
        routes."""
        assert isinstance(self.mlp, MoELayer)
        positions = self.mlp.positions
        mine = x if positions is None else positions.enter(x)
        rows, length = mine.shape[:2]
        logits, chosen, weights = self.mlp.router(mine.flatten(0, 1), correction)
        fed = self.mlp.experts(mine.flatten(0, 1), chosen, weights).unflatten(0, (rows, length))
        here = torch.ones(rows, length, 1, dtype=torch.int64, device=x.device)
        if counted is not None:
            here = counted if positions is None else positions.select(counted)
        choices = here.expand(-1, -1, chosen.shape[1]).flatten(1)
        by_row = count_choices(chosen.reshape(rows, -1), choices, self.experts)
        if seed is not None:
            logits = logits.unflatten(0, (rows, length))
            if shares is None and self.balance != "none":
                of_row = by_row if positions is None else positions.sum(by_row)
                labels = of_row.sum(1, keepdim=True) // chosen.shape[1]
                shares = (of_row.to(logits.dtype) / labels.clamp(min=1))[:, None]  # (B, 1, E)
            loss = self.loss_sum(logits, here, shares)
            if loss is not None:
                fed = _AddedLoss.apply(fed, loss, seed)
        fed = fed if positions is None else positions.leave(fed, x)
        return fed if self.mlp.shared is None else fed + self.mlp.shared(x), by_row

    def loss_sum(self, logits: Tensor, counted: Tensor, shares: Tensor | None) -> Tensor | None:
        """What is added to the sum of the losses of tokens: logits (B, S, E), counted (B, S, 1), shares of
        `forward`."""
        loss, here = None, counted.to(logits.dtype)
        if self.balance != "none":
            assert isinstance(self.mlp, MoELayer) and shares is not None
            loss = (self.mlp.router.probabilities(logits) * shares * here).sum() * self.loss_weight
        if self.z_weight:
            squares = (logits.logsumexp(-1, keepdim=True).square() * here).sum() * self.z_weight
            loss = squares if loss is None else loss + squares
        return loss


def moe_init_rule(name: str, spec: ModelSpec) -> InitRule:
    """As `llama_init_rule`, of experts as of one feed-forward layer."""
    if name.endswith(("_bias", ".sinks", ".correction")):
        return ("zeros",)
    return llama_init_rule(name.replace(".mlp.experts.down", ".mlp.down.weight").replace(".shared.", "."), spec)


class MoEDecoder(Llama):
    """A decoder of Llama's kind with experts."""

    block: ClassVar[type[nn.Module]] = MoEBlock
    initial: ClassVar[Callable[[str, ModelSpec], InitRule]] = staticmethod(moe_init_rule)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.load: ExpertLoad | None = None  # what training counts and goes by

    def run_block(self, number: int, block: nn.Module, labels: Tensor | None, *args: Any) -> Tensor:
        load = self.load
        if load is None:
            hidden: Tensor = block(*args)[0]
            return hidden
        shares = load.shares[..., number, :] if load.active and load.shares is not None else None
        if shares is not None and load.groups is not None:
            shares = shares[load.groups][:, None]
        correction = None if load.corrections is None else load.corrections[number]
        counted = None if labels is None else (labels != IGNORE_INDEX).to(torch.int64)[:, :, None]
        hidden, counts = block(*args, counted, load.seed if load.active else None, shares, correction)
        if load.active:
            load.counts[number] += counts.sum(0)
            if load.seed is None and load.group_counts is not None and load.groups is not None:  # the pass ahead
                load.group_counts[:, number].index_add_(0, load.groups, counts)
        return hidden

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, draws: CounterRNG | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """As `Llama.forward`."""
        load, group = self.load, self.spec.moe.group if self.spec.moe is not None else 1
        if load is not None and load.group_counts is not None and load.active and draws is not None:
            # Rows without labels may be of none; they count in none.
            load.groups = (draws.samples // group - load.first_group).clamp(0, load.group_counts.shape[0] - 1)
        return super().forward(tokens, labels, draws, *args, **kwargs)
