"""Models of transformers that are cut over ranks and then put on the sharded engine by `phalanx.shard`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.api.sharded_model import ShardedModel
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.optim.update import Shard
from phalanx.parallel.hf_state import full_state_dict
from phalanx.parallel.hf_transform import transform
from phalanx.parallel.init_weights import rebuild_buffers, start_of
from tests.dist.tensor_cases import among
from tests.dist.test_hf_transform import KINDS, SHAPE, made
from tests.helpers import run_ranks, some

STEPS, ROWS = 4, 4


def on_meta(kind: str, **more: Any) -> nn.Module:
    import transformers

    name, changes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes | more)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    return model


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 61, (ROWS, 12), generator=torch.Generator().manual_seed(step))


def loss_sum(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def walk(sharded: ShardedModel, first: int, last: int) -> list[list[float]]:
    """Losses and norms of steps, of which each copy of the model has some rows, not the same number."""
    found = []
    for step in range(first, last + 1):
        cut = [0, 1, ROWS] if sharded.world == 2 else [0, ROWS]
        mine = tokens(step)[cut[sharded.rank] : cut[sharded.rank + 1]]
        with sharded.step(list(mine.split(2)), weight=mine[:, 1:].numel()) as taken:
            for batch in taken:
                taken.backward(loss_sum(sharded.model, batch))
        found.append([taken.mean_loss(), taken.norm])
    return found


@contextlib.contextmanager
def sharded_of(model: nn.Module, **asked: Any) -> Iterator[ShardedModel]:
    given: dict[str, Any] = {"lr": 1e-2, "clip_norm": 0.5} | asked
    with phalanx.shard(model, **given) as sharded:
        yield sharded


def curve(placement: Placement, tensor: int, kind: str, folder: str, zero: int) -> dict[str, Any]:
    """Three steps, a checkpoint, and the rest."""
    with contextlib.ExitStack() as stack:
        mesh: Mesh | None = None
        model = made(kind)
        if placement.world > 1:
            mesh = stack.enter_context(among(placement, tensor))
            if mesh.tensor is not None:
                transform(model, mesh.tensor)
        sharded = stack.enter_context(sharded_of(model, zero=zero))
        told = walk(sharded, 1, 3)
        sharded.save(folder)
        told += walk(sharded, 4, STEPS)
        with sharded.full_parameters() as whole:
            own = {name: each.detach().clone() for name, each in whole.items()}
        if mesh is not None and mesh.tensor is not None:
            own = full_state_dict(model, mesh.tensor, own)
        return {"told": told, "sum": float(sum(each.double().abs().sum() for each in own.values()))}


def gone_on(placement: Placement, kind: str, folder: str) -> list[list[float]]:
    """What comes behind, from a checkpoint, on one process."""
    with sharded_of(made(kind, seed=7)) as sharded:
        assert sharded.load(folder) == {}
        assert sharded.steps == 3
        return walk(sharded, 4, STEPS)


@pytest.mark.parametrize(
    ("kind", "tensor", "world", "zero"), some([("llama", 2, 4, 1), ("qwen2", 4, 4, 1), ("qwen3", 2, 4, 3)], 1, 2)
)
def test_the_curve_of_two_copies_in_slices_is_that_of_one_process(
    kind: str, tensor: int, world: int, zero: int, tmp_path: Path
) -> None:
    one = curve(Placement(0, 1, 0, 1, 0, "cpu", store=None), 1, kind, str(tmp_path / "one"), 1)
    many = run_ranks(curve, world, 120, tensor=tensor, kind=kind, folder=str(tmp_path / "many"), zero=zero)
    for found in many:
        torch.testing.assert_close(torch.tensor(found["told"]), torch.tensor(one["told"]), rtol=1e-6, atol=0)
    assert many[0]["sum"] == pytest.approx(one["sum"], rel=1e-8)
    (after,) = run_ranks(gone_on, 1, 60, kind=kind, folder=str(tmp_path / "many"))
    torch.testing.assert_close(torch.tensor(after), torch.tensor(one["told"][3:]), rtol=1e-6, atol=0)


def drawn_on(placement: Placement, tensor: int, kinds: list[str]) -> dict[str, Any]:
    """Models built on meta, transformed, and filled by `start_of`: their logits, and their weights whole."""
    found = {}
    with among(placement, tensor) as mesh:
        for kind in kinds:
            model = on_meta(kind)
            if mesh.tensor is not None:
                transform(model, mesh.tensor)
            with pytest.raises(ConfigError, match=r"rebuild_buffers\(model\)"):
                phalanx.shard(model, lr=1.0, fill=start_of(model, 3))
            rebuild_buffers(model, "cpu")
            with sharded_of(model, fill=start_of(model, 3)) as sharded, sharded.full_parameters() as state:
                logits = model(input_ids=tokens(1)).logits.detach()
                whole = full_state_dict(model, mesh.tensor, state) if mesh.tensor is not None else state
                found[kind] = {
                    "logits": logits.flatten().tolist(),
                    "weights": {name: each.detach().flatten().tolist() for name, each in whole.items()},
                }
    return found


def test_the_same_weights_on_any_layout() -> None:
    kinds = some(["llama", "mistral", "qwen2", "qwen3", "neox"], 2, 3, 4)
    (one,) = run_ranks(drawn_on, 1, 60, tensor=1, kinds=kinds)
    for kind in kinds:  # a model that holds just these values, made by transformers itself
        plain = made(kind)
        weights = {name: torch.tensor(values, dtype=torch.float64) for name, values in one[kind]["weights"].items()}
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(weights[name].view(parameter.shape))
        logits = plain(input_ids=tokens(1)).logits.flatten()
        torch.testing.assert_close(torch.tensor(one[kind]["logits"], dtype=torch.float64), logits, rtol=0, atol=1e-12)
        assert 0.01 < weights[next(iter(weights))].std() < 0.03  # initializer_range is 0.02
    for tensor, world in some([(1, 2), (2, 4)], 1):
        for rank, found in enumerate(run_ranks(drawn_on, world, 120, tensor=tensor, kinds=kinds)):
            for kind in kinds:
                if tensor == 1 or rank == 0:
                    assert found[kind]["weights"] == one[kind]["weights"], (kind, tensor)
                near = torch.tensor(found[kind]["logits"]), torch.tensor(one[kind]["logits"])
                torch.testing.assert_close(*near, rtol=0, atol=1e-6)


def test_what_cannot_be_started_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match=r"buffer 1\.running_mean is on meta, and BatchNorm1d has no config"):
        rebuild_buffers(model)
    with pytest.raises(ConfigError, match=r"model\.config\.initializer_range, which Sequential does not have"):
        start_of(model, 1)


def test_the_row_that_pads_starts_with_zeros() -> None:
    model = on_meta("mistral")  # its third row pads
    weight = torch.ones(61 * 32, dtype=torch.float64)
    fill = start_of(model, 1)
    for start, stop in ((0, 100), (100, 110), (110, 61 * 32)):
        fill(Shard("model.embed_tokens.weight", start, stop, (61, 32), weight[start:stop]))
    assert (weight.view(61, 32) == 0).all(1).nonzero().flatten().tolist() == [3]
