"""What is compiled once serves micro-batches of any size, since shares may change at every step."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from phalanx.models.draws import Draws
from phalanx.models.llama import Llama
from phalanx.models.spec import ModelSpec
from phalanx.parallel.apply import compile_units, why_not_compiled

SPEC = ModelSpec(
    vocab_size=31, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=24, max_seq_len=8, dropout=0.1
)


def model() -> Llama:
    made = Llama(SPEC).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return made


def loss(of: Llama, sequences: int, draws: bool = True) -> torch.Tensor:
    tokens = torch.arange(sequences * 8).view(sequences, 8) % 31
    found: torch.Tensor = of(tokens, labels=tokens, draws=Draws(0, 1, torch.arange(sequences)) if draws else None)
    if draws:
        found.backward()
    return found.detach()


def test_another_number_of_sequences_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")  # inductor takes far longer, and sees the same guards
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    compiled, plain = model(), model()
    compile_units(compiled, compiled.blocks(), sizes_change=True)
    for sequences in (4, 1):  # one sequence is compiled by itself, whatever it is told
        loss(compiled, sequences)
        with torch.no_grad():
            loss(compiled, sequences, draws=False)
    # Blocks and the loss's chunk, each of several sequences and of one, with gradients and in evaluation.
    assert counter.frame_count <= 8
    with torch.compiler.set_stance("fail_on_recompile"):
        for sequences in (5, 2, 1, 7):
            assert loss(compiled, sequences) == pytest.approx(loss(plain, sequences).item(), rel=1e-12)
            with torch.no_grad():
                loss(compiled, sequences, draws=False)
    compiled.zero_grad()
    plain.zero_grad()
    loss(compiled, 6)
    loss(plain, 6)
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_a_trial_says_whether_code_can_be_made_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert why_not_compiled(cpu) == ""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    failure = why_not_compiled(cpu)
    assert "InvalidCxxCompiler" in failure or "no-such-compiler" in failure, failure
    assert "\n" not in failure
