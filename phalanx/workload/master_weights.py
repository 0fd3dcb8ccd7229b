"""Master weights as an engine keeps them: which pieces there are, and their bits."""

import torch

from phalanx.engine.interface import Engine
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.single import SingleEngine
from phalanx.optim.update import StatePiece


def keeps_whole_parameters(engine: Engine) -> bool:
    """Whether each rank keeps whole parameters from step to step."""
    return isinstance(engine, SingleEngine) or (isinstance(engine, ShardedEngine) and engine.sharding.zero < 3)


def view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def find_master_pieces(engine: Engine) -> list[StatePiece]:
    """What this rank keeps of the parameters, whoever else keeps the same."""
    pieces = engine.pieces(replicas=True) if isinstance(engine, ShardedEngine) else engine.pieces()
    return [piece for piece in pieces if piece.kind == "param"]
