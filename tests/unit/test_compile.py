"""What is compiled once serves micro-batches of any size, since shares may change at every step."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from phalanx.config.schema import Config
from phalanx.layout.model_shape import EncoderSpec, LoraSpec, ModelSpec
from phalanx.models.bert import Bert
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.llama import Llama
from phalanx.parallel import fp8_delayed
from phalanx.parallel.activations import recompute
from phalanx.parallel.parallelize import compile_units, find_compile_problem
from phalanx.trainer.resolve import resolve_compile
from tests.helpers import ALL, some

SPEC = ModelSpec(
    vocab_size=31, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=24, max_seq_len=8, dropout=0.1
)


BERT = {"architecture": "bert", "kv_heads": 2, "encoder": EncoderSpec(), "tie_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architecture": "mistral", "sliding_window": 4},
    "qwen2": {"architecture": "qwen2", "sliding_window": 4, "full_attention_layers": (1,)},
    "qwen3": {"architecture": "qwen3"},
    "bert": BERT,
    "lora": {"lora": LoraSpec(rank=2, alpha=4.0, targets=("q", "v"), dropout=0.1)},
}


def model(family: str) -> Llama | Bert:
    spec = replace(SPEC, **FAMILIES[family])
    made = (Bert if family == "bert" else Llama)(spec).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return made


def loss(of: Llama | Bert, sequences: int, draws: bool = True, packed: bool = False) -> torch.Tensor:
    """Of a batch of so many sequences, on the model's device; with `draws` in training, and with a backward pass."""
    device = next(of.parameters()).device
    tokens = torch.arange(sequences * 8, device=device).view(sequences, 8) % 31
    more: dict[str, Any] = {"draws": CounterRNG(0, 1, torch.arange(sequences, device=device)) if draws else None}
    if isinstance(of, Bert):
        more["lengths"] = torch.arange(sequences, device=device) % 5 + 4
    if packed:  # two documents in each row, as many offsets as there could be
        offsets = torch.arange(0, sequences * 8 + 1, 4, dtype=torch.int32, device=device)
        more |= {"segments": offsets, "positions": torch.arange(4, device=device).repeat(sequences, 2)}
    found = of(tokens, labels=tokens, **more)
    losses = [each for each in (found if isinstance(found, tuple) else [found]) if each is not None]
    total = torch.stack(losses).sum()
    if draws:
        total.backward()
    return total.detach()


# With `make test` packed rows are walked on the simulated accelerator (tests/accelerator/test_compiled.py).
PACKED = [("llama", True), ("mistral", True)] if ALL else []


@pytest.mark.parametrize(
    ("family", "packed"),
    [*((family, False) for family in some(FAMILIES, list(FAMILIES).index("bert"))), *PACKED],
)
def test_another_number_of_sequences_compiles_nothing_anew(
    family: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks, without a break, of each family, and with documents packed into rows."""
    counter = CompileCounterWithBackend("eager")  # inductor takes far longer, and sees the same guards
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    compiled, plain = model(family), model(family)
    compile_units(compiled, compiled.blocks(), sizes_change=True)
    for sequences in (4, 1):  # one sequence is compiled by itself, whatever it is told
        loss(compiled, sequences, packed=packed)
        with torch.no_grad():
            loss(compiled, sequences, draws=False, packed=packed)
    # Blocks (of two kinds where some have a window) and the loss's chunk, each of several sequences and of one, with
    # gradients and in evaluation.
    assert counter.frame_count <= (12 if family == "qwen2" else 8)
    with torch.compiler.set_stance("fail_on_recompile"):
        for sequences in (5, 2, 1, 7):
            found = loss(compiled, sequences, packed=packed)
            assert found == pytest.approx(loss(plain, sequences, packed=packed).item(), rel=1e-12)
            with torch.no_grad():
                loss(compiled, sequences, draws=False, packed=packed)
    compiled.zero_grad()
    plain.zero_grad()
    loss(compiled, 6, packed=packed)
    loss(plain, 6, packed=packed)
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_delayed_scaling_records_in_compiled_code_what_it_does_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Magnitudes, and how many are clipped, bit by bit; each product goes by its own scales in code that blocks
    share."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    compiled, plain = model("llama"), model("llama")
    for each in (compiled, plain):
        fp8_delayed.train_in_fp8(each.blocks(), torch.device("cpu"))
    recompute(compiled.blocks(), selective=False)
    compile_units(compiled, compiled.blocks(), sizes_change=True)
    clipped = 0
    for step in range(3 if ALL else 2):
        losses, maxima, counts = [], [], []
        for each in (compiled, plain):
            each.zero_grad()
            scalings = fp8_delayed.find_scalings(each).values()
            for scaling in scalings:
                scaling.begin()
            losses.append(loss(each, 4 + step))
            ends = [scaling.end() for scaling in scalings]
            maxima.append(torch.stack([torch.stack([one for one in found if one is not None]) for found, _ in ends]))
            counts.append([int(count or 0) for _, count in ends])
            for scaling, scales in zip(scalings, fp8_delayed.find_scales(maxima[-1] / 4, 0), strict=True):
                scaling.scales = scales
            with torch.no_grad():
                loss(each, 3, draws=False)
        assert torch.equal(*maxima) and maxima[0].shape == (14, 3) and counts[0] == counts[1]
        assert losses[0] == pytest.approx(losses[1].item(), rel=1e-12)
        clipped += sum(counts[0])
        for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    assert clipped > 0 and counter.frame_count <= 4


def test_a_trial_says_whether_code_can_be_made_for_a_device() -> None:
    cpu = torch.device("cpu")
    assert find_compile_problem(cpu) == ""
    torch._dynamo.reset()
    # Not by monkeypatch, which takes an alias such as this one away when it is done.
    with torch._inductor.config.patch({"force_disable_caches": True, "cpp.cxx": ("no-such-compiler",)}):
        failure = find_compile_problem(cpu)
    assert "InvalidCxxCompiler" in failure or "no-such-compiler" in failure, failure
    assert "\n" not in failure


def test_a_node_without_accelerators_compiles_only_when_told_to() -> None:
    """Also where it joins a run whose other nodes try their compilers."""
    (choice,) = resolve_compile(Config(), ["cpu"])
    assert choice[:2] == ("train.compile", False)
    assert resolve_compile(Config.model_validate({"train": {"compile": True}}), ["cpu"]) == []
