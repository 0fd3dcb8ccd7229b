"""The part of a row group's micro-batch that a rank has, and the group's slices: context parallelism of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.comm.mesh import Mesh
from phalanx.layout.balance import UNBOUND, Speed
from phalanx.layout.context_exchange import AttentionShape, choose_exchange
from phalanx.layout.context_slices import Documents, slice_by_work, slice_in_pairs
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import parameter_shapes
from phalanx.models.families.family import active_shapes
from phalanx.parallel.context import ContextRows, positions_of
from phalanx.tasks.language import IGNORE_INDEX, CausalLMTask
from phalanx.tasks.task import Batch, Task

if TYPE_CHECKING:
    from phalanx.config.schema import Config
    from phalanx.models.counter_rng import CounterRNG


@dataclass(frozen=True)
class SlicedBatch(Batch):
    """A rank's part of a micro-batch of whole rows; `rows` says which."""

    rows: ContextRows | None = field(default=None)

    def to(self, device: torch.device | str) -> Self:
        """As of `Batch`."""
        assert self.rows is not None
        there = super().to(device)
        return replace(there, rows=replace(self.rows, segments=there.inputs.get("segments")))


@dataclass(frozen=True)
class ContextTask(Task):
    """Next-token prediction on a rank's part of each row; the weight of a batch is the number of labels in that part.

    `shares`: the parts of the group's ranks, in proportion, of which this is number `rank`. `token_work`, `window` and
    `multiple` are as of `slice_by_work`.
    """

    task: CausalLMTask
    rank: int
    shares: tuple[float, ...]
    token_work: float
    window: int | None = None
    multiple: int = 1

    def collate(self, samples: Sequence[object]) -> SlicedBatch:
        """A whole micro-batch cut: tokens and labels (B, s) int64, positions (s,) or (B, s), and where they are in the
        row, `columns` (s,). Labels were shifted before."""
        whole = self.task.collate(samples)  # type: ignore[arg-type]
        inputs = whole.inputs
        rows, length = inputs["tokens"].shape
        documents = _split_segments(inputs["segments"], rows, length) if "segments" in inputs else None
        if documents is None:
            slices = slice_in_pairs(length, self.shares, self.multiple)
        else:
            slices = slice_by_work(documents, self.token_work, self.shares, self.window, self.multiple)
        columns = positions_of(slices, self.rank)
        part = {name: inputs[name][:, columns].contiguous() for name in ("tokens", "labels")}
        part["positions"] = inputs["positions"][:, columns].contiguous() if "positions" in inputs else columns
        part["columns"] = columns
        if documents is not None:
            part["segments"] = inputs["segments"]
        weight = int((part["labels"] != IGNORE_INDEX).sum())
        described = ContextRows(slices, self.rank, rows, documents, inputs.get("segments"))
        return SlicedBatch(part, weight, whole.samples, whole.padding, described)

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """As of `CausalLMTask`, over the labels of this rank's part."""
        assert isinstance(batch, SlicedBatch) and batch.rows is not None
        given = batch.inputs
        if draws is not None:
            draws = replace(draws, positions=given["columns"])
        loss: Tensor = model(
            given["tokens"],
            given["labels"],
            draws=draws,
            positions=given["positions"],
            segments=batch.rows,
            length=batch.rows.slices.length,
        )
        return loss

    def nominal_weight(self, global_batch: int) -> int:
        """That of whole rows: the parts' weights add up to theirs."""
        return self.task.nominal_weight(global_batch)


def _split_segments(segments: Tensor, rows: int, length: int) -> Documents:
    """The offsets of documents in each row, of those in all rows, some of which may be repeated."""
    flat = np.union1d(segments.numpy().astype(np.int64), np.arange(rows + 1) * length)
    starts = [row * length for row in range(rows)]
    return [(flat[(flat >= start) & (flat <= start + length)] - start).tolist() for start in starts]


def make_context_task(
    task: Task, spec: ModelSpec | None, mesh: Mesh, shares: Sequence[float], sequence: bool = False
) -> Task:
    """The task of a rank of `mesh`, which takes rows together with others; `shares` as of `ContextTask`. `sequence`:
    with sequence parallelism, which cuts each part over the ranks of the tensor axis."""
    assert mesh.context is not None and isinstance(task, CausalLMTask) and spec is not None
    windows = [spec.window_of(layer) for layer in range(spec.layers)]
    window = None if None in windows else max(each for each in windows if each is not None)
    work, multiple = count_token_work(spec), mesh.axes.tensor if sequence else 1
    return ContextTask(task, mesh.context.rank, tuple(map(float, shares)), work, window, multiple)


def count_token_work(spec: ModelSpec) -> float:
    """Work of a token in all but attention, per layer, in units of a (query, key) pair, which takes as many products as
    2 x heads x their width parameters do."""
    shapes = active_shapes(spec, parameter_shapes(spec))
    products = sum(float(np.prod(shape)) for shape in shapes.values() if len(shape) > 1)
    return products / spec.layers / (2 * spec.heads * spec.attention_width)


def resolve_context(config: "Config", spec: ModelSpec) -> list[tuple[str, str, str]]:
    """`parallel.context_by`, where that is `auto`: the key, its value and the reason."""
    parallel = config.parallel
    if parallel.context == 1 or parallel.context_by != "auto":
        return []
    tensor = parallel.tensor
    shape = AttentionShape(spec.heads // tensor, max(1, spec.kv_heads // tensor), spec.attention_width, spec.hidden)
    return [("parallel.context_by", *choose_exchange(shape, parallel.context, config.data.seq_len))]


# --------------------------------------------------------------------------------------------------- speeds of a group


def find_context_shares(config: "Config", speeds: Sequence[Speed], mesh: Mesh) -> tuple[float, ...]:
    """The shares of this rank's group in each row: as `balance.context` says, or by the `speeds` of the ranks that hold
    the same part of the model, in order."""
    size = config.parallel.context
    return _share_row(config.balance.context, speeds[mesh.row_group * size : (mesh.row_group + 1) * size])


def _share_row(wanted: list[float] | str, speeds: Sequence[Speed]) -> tuple[float, ...]:
    """The shares of a group, by `balance.context` or, where that is `auto`, by the `speeds` of its ranks."""
    if isinstance(wanted, list):
        return tuple(map(float, wanted))
    return tuple(1.0 if wanted == "even" else 1.0 / each.sequence_s for each in speeds)


def join_speeds(config: "Config", speeds: Sequence[Speed]) -> list[Speed]:
    """The speeds of row groups, of those of their ranks with an even part of a row (autotune's `shorten_rows`): a group
    is as fast as its slowest rank with its share, and has room for as many rows as all its ranks have; for one at
    least, where each has room for an even part of one."""
    size = config.parallel.context
    found = []
    for first in range(0, len(speeds), size):
        mine = speeds[first : first + size]
        shares = _share_row(config.balance.context, mine)
        parts = [share / sum(shares) * size for share in shares]
        rooms = [
            each.most if part == 0 or each.most == UNBOUND else max(min(1, each.most), int(each.most / part + 1e-9))
            for each, part in zip(mine, parts, strict=True)
        ]
        seconds = max(each.sequence_s * part for each, part in zip(mine, parts, strict=True))
        found.append(Speed(seconds, max(each.fixed_s for each in mine), min(rooms)))
    return found
