"""The benchmark of offload in miniature, on a CPU: all ways compute the same, and what is claimed has its figure."""

import pytest
import torch

from benchmarks import offload
from phalanx.layout.model_shape import ModelSpec


def test_all_ways_compute_the_same() -> None:
    spec = ModelSpec(
        vocab_size=64, hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=64
    )
    model = offload.built(spec, torch.device("cpu"), torch.float32)
    before = list(model.layers)
    rows, checks = offload.compare(model, (64,), turns=1)
    ways = [offload.KEPT, offload.OURS, *offload.PEERS]
    assert [row["inputs of blocks"] for row in rows] == ways
    assert all(row["same gradients"] and row["pass, s"] > 0 and row["peak of a pass, GiB"] is None for row in rows)
    assert [check.name for check in checks] == [
        "64 tokens: the same gradients bit for bit", "64 tokens: time over kept",
        "64 tokens: time over save_on_cpu", "64 tokens: time over offload_wrapper",
    ]  # fmt: skip
    assert checks[0].holds
    assert list(model.layers) == before
    assert not any("forward" in vars(block) for block in before)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it would run in full")
def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    offload.main(["--quick"])
    assert "there is no accelerator on this machine" in capsys.readouterr().out
