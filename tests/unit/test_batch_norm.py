"""Batch norm over the global batch: one rank's is torch's own, in values, gradients and running statistics; whatever is
padding has no part in it; and what a checkpoint keeps of it comes back."""

import functools

import pytest
import torch
from torch import Tensor, nn

from phalanx.core.errors import CheckpointError
from phalanx.models.batch_norm import GlobalBatchNorm, batch_norms, convert_batch_norms
from phalanx.parallel import activations
from phalanx.parallel.model_buffers import RunningStatistics, read_statistics

KINDS = [
    functools.partial(nn.BatchNorm1d, 3),
    functools.partial(nn.BatchNorm2d, 3, affine=False),
    functools.partial(nn.BatchNorm3d, 3, momentum=None, eps=1e-3),
]


def made(layer: nn.Module) -> GlobalBatchNorm:
    holder = nn.Sequential(layer).double()
    convert_batch_norms(holder)
    (found,) = batch_norms(holder).values()
    found.master = torch.float64
    found.reset_statistics("cpu")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_is_torchs_own(kind: functools.partial[nn.Module]) -> None:
    generator, torchs, ours = torch.Generator().manual_seed(1), kind().double(), made(kind())
    shape = (5, 3, *[4, 2, 3][: {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[kind.func]])  # type: ignore[index]
    for _ in range(3):
        x, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        grads = []
        for layer in (torchs, ours):
            here = x.clone().requires_grad_()
            layer.zero_grad()
            if layer is ours:
                ours.begin_pass(learns=True)
            ((layer(here) - target).square() * target).sum().backward()
            grads.append([here.grad, *(parameter.grad for parameter in layer.parameters())])
        for theirs, mine in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    for name, buffer in torchs.named_buffers():
        torch.testing.assert_close(ours._buffers[name], buffer, rtol=1e-12, atol=1e-12)
    ours.begin_pass(learns=False)
    torch.testing.assert_close(ours(x), torchs.eval()(x), rtol=1e-12, atol=1e-12)


def test_activations_computed_again_measure_nothing_again() -> None:
    x, found = torch.randn(4, 3, 2, 2, dtype=torch.float64), []
    for again in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).double()
        convert_batch_norms(block)
        (layer,) = batch_norms(block).values()
        layer.master = torch.float64
        layer.reset_statistics("cpu")
        if again:
            activations.recompute([block], selective=False)
        layer.begin_pass(learns=True)
        block(x).square().sum().backward()
        assert int(layer.num_batches_tracked or 0) == 1
        found.append([parameter.grad for parameter in block.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)  # type: ignore[arg-type]


def test_padding_has_no_part() -> None:
    """As on a rank without rows: the statistics are those of the other, and nothing comes back from them."""
    theirs, sums = made(nn.BatchNorm1d(3)), torch.randn(6, dtype=torch.float64)
    table = torch.cat([torch.tensor([7.0]), torch.arange(3.0), torch.ones(3)]).double()
    theirs.gather = lambda vector: torch.stack([vector, table if vector.numel() == 7 else sums])
    theirs.begin_pass(learns=True, counts=False)
    x = torch.full((1, 3), torch.nan, dtype=torch.float64, requires_grad=True)
    (theirs(x) * 0.0).sum().backward()
    assert theirs._statistics is not None
    assert theirs._statistics[0].tolist() == [0.0, 1.0, 2.0]
    padding = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    (theirs(padding) * 0.0).sum().backward()
    assert padding.grad is not None
    assert padding.grad.abs().sum() == 0.0


def test_what_is_not_finite_is_not_kept() -> None:
    layer = made(nn.BatchNorm1d(2))
    layer.begin_pass(learns=True)
    layer(torch.tensor([[1.0, torch.inf], [2.0, 3.0]], dtype=torch.float64))
    assert isinstance(layer.running_mean, Tensor)
    assert layer.running_mean.tolist() == [0.0, 0.0]
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("master", [torch.float32, torch.float64])
def test_a_header_holds_every_bit_of_the_last_steps(master: torch.dtype) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    convert_batch_norms(model)
    kept, expected = RunningStatistics(model), {}
    for step in (1, 2):
        for number, layer in enumerate(batch_norms(model).values()):
            layer.master = master
            layer.reset_statistics("cpu")
            layer.running_mean = torch.randn(3, dtype=master)
            layer.num_batches_tracked = torch.tensor(step + number)
        expected[step] = [buffer.clone() for buffer in model.buffers()]
        kept.snapshot(step)
    for step in (2, 1):  # the one before may be asked for when the next is under way
        kept.restore(kept.to_header(step))
        for buffer, wanted in zip(model.buffers(), expected[step], strict=True):
            assert torch.equal(buffer, wanted)
    assert set(read_statistics(kept.to_header(1))) == {
        f"{number}.running_{of}" for number in (0, 2) for of in ("mean", "var")
    }
    header = kept.to_header(2)
    for broken in ({}, {"0": ["f", "!", 1]}, {"0": ["x", "", 1]}, {"0": ["d", "AAAA", 1]}, {"0": 3}):
        with pytest.raises(CheckpointError, match="holds no running statistics"):
            kept.restore(header | {"running_statistics": broken})
