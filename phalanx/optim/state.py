"""The state of an optimizer: shards of parameters, and the pieces by which checkpoints keep what belongs to them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.optim.quantized import QuantizedShard

# An allocator gives zero-filled buffers for state: (parameter name, kind, elements, dtype, device) -> flat tensor.
Allocator = Callable[[str, str, int, torch.dtype, torch.device], torch.Tensor]

ROW_KIND = "row_"  # what the name of a kind of state begins with of which there is one number for each row

State = dict[str, torch.Tensor]  # what is kept of one shard: "param", and what the rule made
Slot = dict[str, State]  # by a name of the shard


def state_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The shape of a kind of state of a parameter of `shape`: the same, or one number for each row."""
    return (*shape[:-1], 1) if kind.startswith(ROW_KIND) else shape


@dataclass
class Shard:
    """Elements [start, stop) of a parameter, flattened in row-major order: what one rank keeps of it."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]  # of the whole parameter
    tensor: torch.Tensor  # its master values, flat; of a frozen parameter the values themselves, in the compute type
    trainable: bool = True  # False: frozen, so no checkpoint holds it


@dataclass(frozen=True)
class StatePiece:
    """A shard of one kind of state, as checkpoints keep it: elements [start, stop) of the flattened parameter, or rows.

    With a `window` [first, last) they are elements of these columns alone, flattened: a part of a matrix that is cut by
    its last dim. `values` is a 1-D tensor on any device, or a coded one that is decoded whenever `tensor` is asked for.
    """

    name: str
    kind: str  # "param" for the master weights, otherwise a state such as "exp_avg", of `state_shape`
    start: int
    stop: int
    values: torch.Tensor | QuantizedShard
    window: tuple[int, int] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The elements; ask for it once, since decoding takes time and memory."""
        return self.values if isinstance(self.values, torch.Tensor) else self.values.dequantize()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device
