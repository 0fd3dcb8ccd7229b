"""Which activations are kept for the backward pass, and which are computed again; offload.py moves what is kept."""

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

# What takes long to compute: matrix products, and attention by the kernel of any device. The last is that of several
# documents in one row.
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


def recompute(units: Sequence[nn.Module], selective: bool) -> None:
    """Make each unit keep only its inputs and compute the rest again in the backward pass (Chen et al. 2016).

    `selective` keeps the results of matrix products and of attention too, so that little time is spent again
    (Korthikanti et al. 2022). The forward method is replaced in place, so that names of parameters stay as they are.
    Nothing needs the state of a random generator: dropout draws by coordinates, and draws the same again.
    """
    wrap = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if selective:
        policy = functools.partial(_policy, frozenset(operators_to_save()))
        wrap = functools.partial(wrap, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    for unit in units:
        unit.forward = functools.partial(by_position, wrap, unit.forward)


def by_position(wrap: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a checkpoint with all arguments in order: of what is given by name it holds the tensor itself, unseen by
    autograd's hooks and checks."""
    if not kwargs or torch.compiler.is_compiling():  # a compiled one sees no names
        return wrap(forward, *args, **kwargs)
    return wrap(functools.partial(_by_name, forward, tuple(kwargs)), *args, *kwargs.values())


def _by_name(forward: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    places = len(args) - len(names)
    return forward(*args[:places], **dict(zip(names, args[places:], strict=True)))


def _policy(kept: frozenset[object], _: object, operator: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    long = (operator in kept and not _is_short(operator, args)) or _sums_over_ranks(operator, args)
    return CheckpointPolicy.MUST_SAVE if long else CheckpointPolicy.PREFER_RECOMPUTE


def _sums_over_ranks(operator: object, args: Sequence[Any]) -> bool:
    """Whether it sums over tensor-parallel ranks. What they only gather is as large as on one rank, and is gathered
    again: a rank keeps its part."""
    return isinstance(operator, torch._ops.OpOverload) and operator.namespace == NAMESPACE and args[1] in SUMS


def _is_short(operator: object, args: Sequence[Any]) -> bool:
    """Whether a product sums over so few elements that its result takes little time for the memory it fills: that of an
    adapter's B, which is as large as that of the matrix beside it."""
    if not str(operator).startswith(_PRODUCTS):
        return False
    one, other = args[-2:]
    return 8 * one.shape[-1] < other.shape[-1]


def check_horizon(blocks: int, horizon: int) -> None:
    """Raises ConfigError where a model of so many `blocks` would have nothing that `offload` moves."""
    if blocks <= horizon:
        raise ConfigError(
            f"memory.activations=offload would move nothing: the inputs of the last {horizon} blocks stay on the "
            f"device (memory.offload_prefetch_blocks) and the model has {blocks}; set memory.activations=full"
            + (f", or memory.offload_prefetch_blocks={blocks - 1} at most" if blocks > 1 else "")
        )


def operators_to_save() -> list[Callable[..., object]]:
    """The operators whose results `selective` keeps."""
    import torch.nn.attention.varlen  # makes the last of them known

    found = []
    for name in (*_PRODUCTS, *_ATTENTION):
        space, _, operator = name.partition(".")
        found.append(getattr(getattr(torch.ops, space), operator).default)
    return found


# ------------------------------------------------------------------------------------------------------------- dropout
# Dropout in models of transformers whose tensors are divided: what all ranks hold is dropped alike on all of them, and
# what each holds for itself, the probabilities of its heads, by draws of its own. Before each pass the ranks take one
# seed, so that their generators go on together; around attention each takes a seed of its own, drawn from there, and
# then goes on where all are. Recomputed layers draw what they drew: PyTorch's checkpoints restore the generator, which
# is all that this depends on.


_SEEDS = 2**62  # how many there are


def sync_dropout(model: nn.Module, attention: list[nn.Module], peers: TensorParallelPeers) -> None:
    """Have a divided model's dropout agree over its ranks, while it trains; `attention`: its modules with heads."""
    model.register_forward_pre_hook(_SharedSeed(peers))
    for module in attention:
        own = _LocalRNG(peers.rank)
        module.register_forward_pre_hook(own.begin, with_kwargs=True)
        module.register_forward_hook(own.end, always_call=True)


class _SharedSeed:
    """Seeds the generators of all ranks alike, by a number that the first draws from its own."""

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
    """Around one module: draws of this rank's own."""

    def __init__(self, rank: int) -> None:
        self._rank, self._aside = rank, contextlib.ExitStack()

    def begin(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not module.training:
            return
        seed = int(torch.randint(_SEEDS, (), device="cpu"))  # the same on all ranks
        given = next(each for each in (*inputs, *named.values()) if isinstance(each, Tensor))
        if given.device.type == "cpu":
            self._aside.enter_context(torch.random.fork_rng(devices=[]))
        else:
            self._aside.enter_context(torch.random.fork_rng([given.device], device_type=given.device.type))
        torch.manual_seed((seed + self._rank) % _SEEDS)

    def end(self, *_: Any) -> None:
        self._aside.close()
