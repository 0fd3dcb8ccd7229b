"""The benchmark of adapters in miniature: both peers do the same work, and what is printed is what was agreed."""

from dataclasses import replace

import torch

from benchmarks import lora
from benchmarks.peers import Case


def test_both_train_the_same_adapters() -> None:
    spec = replace(
        lora.SMALL, vocab_size=128, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=64,
        max_seq_len=32, lora=lora.LORA,
    )  # fmt: skip
    case = Case(spec, 16, 2, 4, "fp32", False, torch.device("cpu"), "full")
    rows, checks = lora.compare(case, cycles=3, block=2)
    assert [row["trained by"] for row in rows] == ["PEFT + Trainer", "Phalanx"]
    assert all(row["tokens/s"] > 0 and row["peak memory, GiB"] is None for row in rows)
    same, speed = checks
    assert same.holds and same.value is not None and same.value < 1e-5, same
    assert speed.target == 1.0 and speed.holds == (speed.value is not None and speed.value >= 1.0)
