"""Tiles of attention: scores are not rounded to 16 bits where they are materialized."""

import torch

from phalanx.autotune.fake_passes import LiveBytes
from phalanx.layout.context_exchange import TILE_QUERIES, TILE_SCORE_BYTES
from phalanx.models.attention_tiles import TileOptions, tile_backward, tile_forward


def test_scores_of_16_bit_inputs_are_not_rounded() -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, 64, 32).bfloat16() for heads in (4, 2, 2, 4))
    q = 4 * q  # scores up to about 20, which bf16 would round by 0.06
    options = TileOptions(causal=True, first_query=0, first_key=0, window=64)  # which no kernel of a CPU has
    out, lse = tile_forward(q, k, v, options)
    exact = [each.double().requires_grad_() for each in (q, k, v)]
    scores = exact[0] @ exact[1].repeat_interleave(2, dim=1).transpose(-1, -2) * 32**-0.5
    scores = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    wanted = scores.softmax(-1) @ exact[2].repeat_interleave(2, dim=1)
    assert float((lse - scores.detach().logsumexp(-1)).abs().max()) < 1e-4
    assert relative(out, wanted) < 2e-3  # the shares are in bf16
    found = tile_backward(grad, q, k, v, out, lse, options)
    wanted.backward(grad.double())
    for mine, theirs in zip(found, exact, strict=True):
        assert theirs.grad is not None
        assert mine.dtype == torch.float32 and relative(mine, theirs.grad) < 3e-3


def test_scores_take_the_bytes_that_a_dry_run_reckons_with() -> None:
    q, k, v, grad = (torch.randn(1, 2, length, 8).bfloat16() for length in (512, 2048, 2048, 512))
    options = TileOptions(causal=True, first_query=1536, first_key=0, window=4096)
    out, lse = tile_forward(q, k, v, options)
    with LiveBytes([q, k, v, grad, out, lse]) as live:
        tile_backward(grad, q, k, v, out, lse, options)
    reckoned = 2 * TILE_QUERIES * 2048 * TILE_SCORE_BYTES
    assert 0.8 * reckoned < live.peak < 1.05 * reckoned


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).norm() / other.norm()).detach())
