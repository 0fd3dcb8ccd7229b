"""What nobody would give values is named before a model takes memory."""

import torch
from torch import nn

from phalanx.comm.mesh import join
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.engine.interface import Precision
from phalanx.engine.single import SingleEngine
from phalanx.optim.update import AdamW, Shard
from phalanx.parallel.init_weights import materialize
from tests.helpers import run_ranks


class Scaled(nn.Module):
    """A layer with buffers that no engine fills."""

    def __init__(self, buffers: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        for number in range(buffers):
            self.register_buffer(f"scale{number}", torch.ones(4))


def left(placement: Placement) -> list[str]:
    """What is said of models with none, one and two such buffers."""
    said = []
    with join(placement, 30) as mesh:
        for buffers in range(3):
            with torch.device("meta"):
                model = Scaled(buffers)
            precision = Precision(torch.float32, torch.float32)
            rule = AdamW(0.9, 0.95, 1e-8, 0.1)
            engine = SingleEngine(
                model, [("inner", model.inner)], mesh=mesh, rule=rule, nominal_weight=1, precision=precision
            )
            try:
                materialize(model, engine, one)
                said.append("")
            except ConfigError as error:
                said.append(str(error))
            if not buffers:
                assert all(torch.equal(each, torch.ones_like(each)) for each in model.parameters())
    return said


def one(shard: Shard) -> None:
    shard.tensor.fill_(1.0)


def test_what_is_left_on_meta_is_named() -> None:
    ((none, one_left, two_left),) = run_ranks(left, 1)
    assert none == ""
    assert one_left.startswith("scale0 of the model is on meta, without values; use parameters")
    assert two_left.startswith("scale0, scale1 of the model are on meta, without values")
