"""Context parallelism for models of transformers, in place: attention exchanges keys with the ranks that share rows.

Each rank of a group of N gives the model two pieces of each row, numbers r and 2 N - 1 - r of 2 N, one after another,
as `slice_in_pairs` has them for equal ranks. The model's code is unchanged: attention goes by transformers' own
registry of attention functions, positions are those in the whole row, and the loss is that of whole rows, whose labels
the ranks tell each other, since the label of a piece's last position is in another piece.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic, device_for_group
from phalanx.comm.mesh import Axis
from phalanx.comm.p2p import connect
from phalanx.core.errors import ConfigError
from phalanx.layout.context_slices import ContextSlices, slice_in_pairs
from phalanx.parallel.context import ContextParallel, ContextRows, positions_of

# Decoders in which positions meet in attention alone, which has nothing beside a window.
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GPTNeoXForCausalLM")
IMPLEMENTATION = "phalanx_context"  # in transformers' registry
ATTENTION = "context_parallel"  # attribute of attention modules


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The group that shares rows with this rank, and what it does in attention, by the shape of its part."""

    context: ContextParallel
    known: dict[tuple[int, int], ContextRows] = field(default_factory=dict)

    def slices_of(self, length: int) -> ContextSlices:
        """The slices of rows of which each rank has `length` positions. Raises ConfigError for an odd one."""
        size = self.context.size
        if length % 2:
            raise ConfigError(
                f"context parallelism over {size} ranks got {length} positions of each row on a rank, which are not "
                f"two pieces of one length; give rows of a length that {2 * size} divides"
            )
        return slice_in_pairs(size * length, (1.0,) * size)

    def rows_of(self, count: int, length: int) -> ContextRows:
        """`count` rows of which each rank has `length` positions."""
        if (count, length) not in self.known:
            self.known[count, length] = ContextRows(self.slices_of(length), self.context.rank, count)
        return self.known[count, length]


def transform_context(model: nn.Module, axis: Axis, by: str) -> nn.Module:
    """Have a model of transformers share rows with the ranks of `axis`, in place; `by` as of `parallel.context_by`. The
    axis must exist as long as the model is used. Collective. Raises ConfigError for a model that it does not know, and
    for dropout of attention, whose draws are those of whole rows."""
    import transformers

    if not any(each.__name__ in MODELS for each in type(model).__mro__):
        raise ConfigError(
            f"context parallelism does not know {type(model).__name__}; it knows transformers' {', '.join(MODELS)}, so "
            "transform one of them, or do not use context parallelism"
        )
    config: Any = cast(Any, model).config
    if getattr(config, "attention_dropout", 0.0):
        raise ConfigError(
            f"context parallelism has no dropout of attention, and attention_dropout is {config.attention_dropout:g}; "
            "set it to 0 in the model's config"
        )
    device = next(model.parameters()).device
    connect(axis.group, device_for_group(axis.group, torch.device("cpu") if device.type == "meta" else device))
    shared = SharedRows(ContextParallel(axis, Traffic(), by, (1.0,) * axis.size))
    for module in model.modules():
        if {"scaling", "layer_idx"} <= vars(module).keys():
            vars(module)[ATTENTION] = shared
    transformers.AttentionInterface.register(IMPLEMENTATION, _attend)
    config._attn_implementation = IMPLEMENTATION
    model.register_forward_pre_hook(_Positions(shared), with_kwargs=True)
    cast(Any, model).loss_function = SharedRowsLoss(shared)
    return model


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' interface of attention: (B, heads, s, d) each -> (B, s, heads, d)."""
    shared: SharedRows = vars(module)[ATTENTION]
    usual = query.shape[-1] ** -0.5
    if scaling is not None and not math.isclose(scaling, usual):
        query = query * (scaling / usual)
    rows = shared.rows_of(query.shape[0], query.shape[2])
    out = shared.context.attend(query, key, value, window=sliding_window, segments=rows)
    return out.transpose(1, 2).contiguous(), None


@dataclass(frozen=True, eq=False)
class _Positions:
    """A hook before the model's forward: gives it the positions of its part, where the script does not, and refuses
    others, which transformers takes for several documents in a row."""

    shared: SharedRows

    def __call__(self, model: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | dict(given)
        tokens = named.get("input_ids")
        tokens = named.get("inputs_embeds") if tokens is None else tokens
        mask = named.get("attention_mask")
        if mask is not None and not bool((mask == 1).all()):
            raise ConfigError(
                "context parallelism takes no attention_mask that hides positions; pad rows at their end, with labels "
                "of -100 there, and remove the mask"
            )
        if named.get("past_key_values") is not None:
            raise ConfigError("context parallelism is for training, not for past_key_values; remove them")
        named |= {"attention_mask": None, "use_cache": False}
        if tokens is not None:
            slices, rank = self.shared.slices_of(tokens.shape[1]), self.shared.context.rank
            own = positions_of(slices, rank).to(tokens.device)[None]
            positions = named.setdefault("position_ids", None)
            named["position_ids"] = own if positions is None else positions
            if positions is not None and not bool((positions - own == positions[:, :1] - own[:, :1]).all()):
                raise ConfigError(
                    f"context parallelism got position_ids that are not those of pieces {rank} and "
                    f"{2 * self.shared.context.size - 1 - rank} of one document in each row; remove position_ids"
                )
        return (), named


@dataclass(frozen=True, eq=False)
class SharedRowsLoss:
    """Cross-entropy of next tokens of whole rows: a rank's is the sum over its positions, over the labels of all ranks
    of the group and times their number, so that the mean over ranks, and of their gradients, is the mean over labels.

    Reads logits in float32 or better.
    """

    shared: SharedRows

    def __call__(
        self, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
        shift_labels: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if num_items_in_batch is not None or shift_labels is not None:
            name = "shift_labels" if num_items_in_batch is None else "num_items_in_batch"
            raise ConfigError(f"context parallelism shifts and counts labels itself; remove {name}")
        axis, context = self.shared.context.axis, self.shared.context
        slices = self.shared.slices_of(labels.shape[1])
        mine = labels.to(device_for_group(axis.group, labels.device)).contiguous()
        everyones = mine.new_empty((axis.size, *mine.shape))
        collectives.all_gather(everyones.view(-1), mine.view(-1), axis.group, context.traffic).wait()
        whole = mine.new_full((mine.shape[0], slices.length + 1), ignore_index)
        for rank, theirs in enumerate(everyones):
            whole[:, positions_of(slices, rank)] = theirs
        following = whole[:, 1:]
        own = following[:, positions_of(slices, axis.rank)].reshape(-1).to(logits.device)
        wide = logits.reshape(-1, vocab_size).to(torch.promote_types(logits.dtype, torch.float32))
        total = nn.functional.cross_entropy(wide, own, ignore_index=ignore_index, reduction="sum")
        return total * axis.size / int((following != ignore_index).sum())
