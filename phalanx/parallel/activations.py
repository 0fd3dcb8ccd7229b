"""Activation checkpointing: which activations are saved for the backward pass and which are recomputed (offload.py
moves the saved ones to the host)."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.comm.collectives import device_for_group
from phalanx.core.errors import ConfigError
from phalanx.parallel.tensor_collectives import NAMESPACE, SUMS, TensorParallelPeers

# Expensive operators: matrix products, and the attention kernels of all devices. The last is for several documents in
# one row.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._scaled_dot_product_attention_math_for_mps",
    "torch_attn._varlen_attn",
)
_OWN = ("phalanx.grouped_mm", "aten._grouped_mm", "phalanx.delayed_product")


def recompute(units: Sequence[nn.Module], selective: bool) -> None:
    """Apply activation checkpointing: each unit saves only its inputs and recomputes the rest in the backward pass
    (Chen et al. 2016).

    `selective` also saves the results of matrix products and of attention, so that recomputation takes little time
    (Korthikanti et al. 2022). The forward method is replaced in place, so that parameters keep their names. No state of
    a random generator is needed: dropout uses counter-based random numbers, the same when recomputed.
    """
    wrap = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if selective:
        policy = functools.partial(_policy, frozenset(operators_to_save()))
        wrap = functools.partial(wrap, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    for unit in units:
        unit.forward = functools.partial(by_position, wrap, unit.forward)


def by_position(wrap: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a checkpoint with positional arguments only: it holds keyword tensors directly, unseen by autograd's hooks
    and checks."""
    if not kwargs or torch.compiler.is_compiling():  # compiled code has no keyword arguments
        return wrap(forward, *args, **kwargs)
    return wrap(functools.partial(_by_name, forward, tuple(kwargs)), *args, *kwargs.values())


def _by_name(forward: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    places = len(args) - len(names)
    return forward(*args[:places], **dict(zip(names, args[places:], strict=True)))


def _policy(kept: frozenset[object], _: object, operator: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    long = (operator in kept and not _is_short(operator, args)) or _sums_over_ranks(operator, args)
    return CheckpointPolicy.MUST_SAVE if long else CheckpointPolicy.PREFER_RECOMPUTE


def _sums_over_ranks(operator: object, args: Sequence[Any]) -> bool:
    """Whether an operator sums over tensor-parallel ranks. Gathered tensors are not saved but gathered again: a rank
    keeps only its part."""
    return isinstance(operator, torch._ops.OpOverload) and operator.namespace == NAMESPACE and args[1] in SUMS


def _is_short(operator: object, args: Sequence[Any]) -> bool:
    """Whether a matrix product has so short an inner dim that its result is cheap to recompute for its memory, such as
    that of an adapter's B."""
    if not str(operator).startswith(_PRODUCTS):
        return False
    one, other = args[-2:]
    return 8 * one.shape[-1] < other.shape[-1]


def check_horizon(blocks: int, horizon: int) -> None:
    """Raises ConfigError where `offload` would move nothing in a model of `blocks` blocks."""
    if blocks <= horizon:
        raise ConfigError(
            f"memory.activations=offload would move nothing: the inputs of the last {horizon} blocks stay on the "
            f"device (memory.offload_prefetch_blocks) and the model has {blocks}; set memory.activations=full"
            + (f", or memory.offload_prefetch_blocks={blocks - 1} at most" if blocks > 1 else "")
        )


def operators_to_save() -> list[Callable[..., object]]:
    """The operators whose results selective checkpointing saves."""
    import torch.nn.attention.varlen  # registers the last of _ATTENTION, as the next those of _OWN

    import phalanx.models.grouped_mm
    import phalanx.parallel.fp8_delayed  # noqa: F401

    found = []
    for name in (*_PRODUCTS, *_ATTENTION, *_OWN):
        space, _, operator = name.partition(".")
        found.append(getattr(getattr(torch.ops, space), operator).default)
    return found


# ------------------------------------------------------------------------------------------------------------- dropout
# Dropout in tensor-parallel models of transformers: replicated activations have the same dropout on all ranks, and each
# rank's attention probabilities its own. Before each pass the ranks take one seed, so that their generators agree;
# around attention each takes a separate seed, derived from the common one, and then returns to it. Recomputed layers
# draw the same: PyTorch's checkpoints restore the generator, which is all that this depends on.


_SEEDS = 2**62  # number of seeds


def sync_dropout(model: nn.Module, attention: list[nn.Module], peers: TensorParallelPeers) -> None:
    """Synchronize the dropout of a tensor-parallel model over its ranks in training; `attention`: its modules with
    heads."""
    model.register_forward_pre_hook(_SharedSeed(peers))
    for module in attention:
        own = _LocalRNG(peers.rank)
        module.register_forward_pre_hook(own.begin, with_kwargs=True)
        module.register_forward_hook(own.end, always_call=True)
        if isinstance(after := getattr(module, "resid_dropout", None), nn.Module):  # of what is replicated again
            after.register_forward_pre_hook(own.share)


class _SharedSeed:
    """Seeds the generators of all ranks with a number that the first draws."""

    def __init__(self, peers: TensorParallelPeers) -> None:
        self._peers = peers

    def __call__(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            return
        axis = self._peers.axis
        seed = torch.randint(_SEEDS, (1,), device="cpu").to(device_for_group(axis.group, torch.device("cpu")))
        dist.broadcast(seed, axis.ranks[0], group=axis.group)
        torch.manual_seed(int(seed))


class _LocalRNG:
    """Hooks around one module in which this rank uses its own random numbers."""

    def __init__(self, rank: int) -> None:
        self._rank, self._aside, self._common = rank, contextlib.ExitStack(), 0

    def begin(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not module.training:
            return
        seed = int(torch.randint(_SEEDS, (), device="cpu"))  # the same on all ranks
        given = next(each for each in (*inputs, *named.values()) if isinstance(each, Tensor))
        if given.device.type == "cpu":
            self._aside.enter_context(torch.random.fork_rng(devices=[]))
        else:
            self._aside.enter_context(torch.random.fork_rng([given.device], device_type=given.device.type))
        self._common = (seed - 1) % _SEEDS
        torch.manual_seed((seed + self._rank) % _SEEDS)

    def share(self, module: nn.Module, _: Any) -> None:
        if module.training:
            torch.manual_seed(self._common)

    def end(self, *_: Any) -> None:
        self._aside.close()
