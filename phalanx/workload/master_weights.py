"""Master weights as an engine keeps them: which pieces there are, and their bits."""

import torch

from phalanx.engine.interface import Engine
from phalanx.engine.sharded import Sharded
from phalanx.engine.single import Single
from phalanx.optim.state import Piece


def is_kept_whole(engine: Engine) -> bool:
    """Whether each rank keeps whole parameters from step to step."""
    return isinstance(engine, Single) or (isinstance(engine, Sharded) and engine.sharding.zero < 3)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def masters_of(engine: Engine) -> list[Piece]:
    """What this rank keeps of the parameters, whoever else keeps the same."""
    pieces = engine.pieces(twins=True) if isinstance(engine, Sharded) else engine.pieces()
    return [piece for piece in pieces if piece.kind == "param"]
