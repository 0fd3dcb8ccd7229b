"""Attention with a window, with several documents in a row, and with both, against what they mean."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.model_shape import ModelSpec
from phalanx.models import attention as module
from phalanx.models.attention import Alibi, ScoreDropout, alibi_slopes, attention, has_kernel
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.llama import Llama, init_slice
from phalanx.parallel import activations
from tests.helpers import some

ROWS, LENGTH = 3, 300
# Of all kinds: whole rows, equal neighbours, single tokens, empty ones, and the padding at the end.
OFFSETS = [0, 300, 300, 350, 400, 450, 451, 600, 600, 750, 900, 900, 900]
SPEC = ModelSpec(
    architecture="mistral", vocab_size=96, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48,
    max_seq_len=512, sliding_window=5, full_attention_layers=(1,),
)  # fmt: skip


def inputs(kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, heads, LENGTH, 8) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def meant(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: list[int] | None) -> Tensor:
    """One position after another: the softmax of its scores with those that it sees, in Hugging Face's words."""
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    starts = segments or range(0, ROWS * LENGTH, LENGTH)
    out = []
    for row in range(ROWS):
        for i in range(LENGTH):
            first = max(start for start in starts if start <= row * LENGTH + i) - row * LENGTH
            first = (
                first if window is None else max(first, i - window + 1)
            )  # i - j < window, as in sliding_window_overlay
            scores = q[row, :, i : i + 1] @ k[row, :, first : i + 1].transpose(1, 2) / q.shape[3] ** 0.5
            out.append((scores.softmax(-1) @ v[row, :, first : i + 1])[:, 0])
    return torch.stack(out).unflatten(0, (ROWS, LENGTH)).transpose(1, 2)


def with_gradients(
    function: Callable[..., Tensor], parts: list[Tensor], *args: object, **options: object
) -> list[Tensor]:
    out = function(*parts, *args, **options)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), parts)]


WAYS = [(window, segments) for window in (None, 1, 7, 140, 300) for segments in (None, OFFSETS)]


@pytest.mark.parametrize(("window", "segments"), some(WAYS, 1, 2, 5, 6, 9))
def test_every_way_is_what_is_meant(window: int | None, segments: list[int] | None) -> None:
    offsets = None if segments is None else torch.tensor(segments, dtype=torch.int32)
    expected = with_gradients(meant, inputs(), window, segments)
    found = with_gradients(attention, inputs(), window=window, segments=offsets)
    plain = with_gradients(module.reference_attention, inputs(), window, offsets)
    for want, fast, slow in zip(expected, found, plain, strict=True):
        torch.testing.assert_close(fast, want, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(slow, want, rtol=1e-10, atol=1e-12)


def test_far_pairs_cost_nothing() -> None:
    """Products grow with length x window, and with the squares of the documents' lengths."""
    from torch.utils.flop_counter import FlopCounterMode

    def work(length: int, window: int | None, segments: list[int] | None) -> int:
        q = torch.randn(1, 2, length, 8)
        with FlopCounterMode(display=False) as counter:
            attention(q, q, q, window=window, segments=None if segments is None else torch.tensor(segments))
        return counter.get_total_flops()

    whole = work(4096, None, None)
    assert work(4096, 128, None) == pytest.approx(whole * 2 * 128 / 4096, rel=0.05)
    assert work(4096, None, [0, 1024, 2048, 3072, 4096]) == whole / 4
    assert work(4096, 128, [0, 2048, 4096]) == pytest.approx(whole * 2 * 128 / 4096, rel=0.1)


def test_what_is_compiled_takes_the_mask_and_no_walk() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for window, segments in ((7, OFFSETS), (7, None)):
        offsets = None if segments is None else torch.tensor(segments, dtype=torch.int32)
        expected = with_gradients(attention, inputs(), window=window, segments=offsets)
        found = with_gradients(compiled, inputs(), window=window, segments=offsets)
        for want, got in zip(expected, found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attention(x * x, x.sin(), x.cos(), segments=torch.tensor([0, 3, 8], dtype=torch.int32)).square()


@pytest.mark.parametrize("selective", [True, False])
def test_a_kernel_may_be_tried_while_a_block_is_recomputed(selective: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def for_newer_devices(q: Tensor, k: Tensor, v: Tensor, *rest: object, **named: object) -> Tensor:
        tries.append(F.scaled_dot_product_attention(q, k, v).sum().backward())
        raise RuntimeError("only for newer devices")

    monkeypatch.setattr(module, "_WITHOUT_KERNEL", ())
    monkeypatch.setattr(module, "varlen_attn", for_newer_devices)
    x = torch.linspace(-1, 1, 64, dtype=torch.bfloat16).view(1, 2, 8, 4).requires_grad_()
    block = _Square()
    activations.recompute([block], selective)
    module._tried.cache_clear()
    (found,) = torch.autograd.grad(block(x).float().sum(), x)
    assert len(tries) == 1
    (expected,) = torch.autograd.grad(_Square()(x).float().sum(), x)
    assert torch.equal(found, expected)
    module._tried.cache_clear()


def test_that_memory_ran_out_says_nothing_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next that ask try again, and do not go without for the life of the process."""
    answers: list[object] = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("only for newer devices")]

    def asked(*rest: object, **named: object) -> Tensor:
        raise answers.pop(0)  # type: ignore[misc]

    monkeypatch.setattr(module, "_WITHOUT_KERNEL", ())
    monkeypatch.setattr(module, "varlen_attn", asked)
    module._tried.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        has_kernel(torch.device("cpu"), torch.bfloat16, 8)
    for _ in range(2):
        assert not has_kernel(torch.device("cpu"), torch.bfloat16, 8)
    module._tried.cache_clear()


def test_a_kernel_is_tried_with_documents_and_heads_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only runs for a few tokens, or for as many heads of keys as of queries, is none."""

    def small(q: Tensor, k: Tensor, v: Tensor, *rest: object, **named: object) -> Tensor:
        if len(q) > 64 or q.shape[1] != k.shape[1]:
            raise RuntimeError("no kernel image is available for execution on the device")
        return q + k + v

    monkeypatch.setattr(module, "_WITHOUT_KERNEL", ())
    monkeypatch.setattr(module, "varlen_attn", small)
    module._tried.cache_clear()
    assert not has_kernel(torch.device("cpu"), torch.bfloat16, 8)
    module._tried.cache_clear()


@pytest.mark.parametrize(("kernel", "dtype", "repeats"), [
    (True, torch.float16, False), (False, torch.float16, True), (False, torch.float32, True),
    (False, torch.float64, False),
])  # fmt: skip
def test_grouped_heads_are_repeated_where_no_kernel_takes_them(
    kernel: bool, dtype: torch.dtype, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WITHOUT_KERNEL", ("cpu",))
    monkeypatch.setattr(module, "_tried", lambda device, dtype, head_dim: kernel)
    assert module._lacks_grouped_kernel(torch.empty(1, 4, 8, 8, dtype=dtype, device="meta")) is repeats
    assert not module._lacks_grouped_kernel(torch.empty(1, 4, 8, 8, dtype=dtype))


def test_there_is_no_kernel_on_a_cpu_and_none_for_float32() -> None:
    assert not has_kernel(torch.device("cpu"), torch.bfloat16, 64)
    assert not has_kernel(torch.device("meta"), torch.float32, 64)


def build(spec: ModelSpec) -> Llama:
    model = Llama(spec).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = init_slice(spec, 0, name, 0, parameter.numel(), "cpu", torch.float64)
            parameter.copy_(values.view_as(parameter) * (1 if "norm" in name else 10))
    return model


@pytest.mark.parametrize("architecture", ["mistral", "qwen3"])
def test_packed_documents_are_as_each_alone(architecture: str) -> None:
    """Logits, loss and gradients of four documents in two rows, and of the same four as rows of their own."""
    model = build(replace(SPEC, architecture=architecture))
    lengths = [12, 8, 15, 3]
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 96, (1, length), generator=generator) for length in lengths]
    rows = torch.cat(
        [torch.cat(documents[:2], 1), torch.cat([*documents[2:], torch.zeros(1, 2, dtype=torch.int64)], 1)]
    )
    positions = torch.cat([torch.arange(n) for n in (*lengths, 2)]).view(2, 20)
    segments = torch.tensor([0, 12, 20, 35, 38, 40, 40, 40], dtype=torch.int32)
    labels = rows.roll(-1, 1)
    labels[:, -1] = -100
    labels[1, 17:] = -100
    together = model(rows, positions=positions, segments=segments).flatten(0, 1)
    loss = model(rows, labels, positions=positions, segments=segments)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    alone, losses = [], []
    for index, document in enumerate(documents):
        alone.append(model(document)[0])
        own = labels.flatten()[segments[index] : segments[index + 1]][None]
        losses.append(model(document, own))
    torch.testing.assert_close(together[:38], torch.cat(alone), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, torch.stack(losses).sum(), rtol=1e-12, atol=0)
    for packed, single in zip(
        gradients, torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(packed, single, rtol=1e-9, atol=1e-11)
    crossing = model(rows, positions=positions)[0, 12:]
    assert not torch.allclose(crossing, together[12:20], rtol=1e-3)


def test_a_model_is_made_without_the_compiler() -> None:
    """Whose import takes more than a second; and what it is told of a kernel is the same all the same."""
    code = """
import sys
import phalanx.trainer.train_rank, phalanx.autotune.dry_run
from phalanx.models.user_model import build_on_meta
from phalanx.models.families.catalog import PRESETS
build_on_meta(PRESETS["llama-3.2-1b"])
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert vars(has_kernel) == vars(torch.compiler.assume_constant_result(lambda: None))


@pytest.mark.parametrize("segments", [None, OFFSETS])
@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (7, 0.0), (None, 2.0)])
def test_probabilities_are_dropped_by_coordinates(
    window: int | None, cap: float, segments: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk and head by head the same as with a mask of all pairs."""
    monkeypatch.setattr(module, "_DROPOUT_CHUNK", 77)
    parts, offsets = inputs(), None if segments is None else torch.tensor(segments, dtype=torch.int32)
    draws, site = CounterRNG(3, 5, torch.tensor([9, 2, 7])), torch.tensor(4)

    def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        scores = (
            module.cap_softly(q @ k.transpose(2, 3) / q.shape[3] ** 0.5, cap)
            if cap
            else (q @ k.transpose(2, 3) / q.shape[3] ** 0.5)
        )
        seen = module._band(torch.arange(LENGTH), torch.arange(LENGTH), window)[None, None]
        if offsets is not None:
            document = module._documents(offsets, ROWS, LENGTH)
            seen = seen & (document[:, :, None] == document[:, None])[:, None]
        kept = draws.keep_scores(site, range(4), range(LENGTH), range(LENGTH), 0.25)
        assert abs(float(kept.double().mean()) - 0.75) < 0.003
        return torch.where(kept, scores.masked_fill(~seen, -torch.inf).softmax(-1) / 0.75, 0.0) @ v

    def dropped(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
        dropout = ScoreDropout(draws, site, first, 0.25)
        return attention(q, k, v, window=window, segments=offsets, cap=cap, dropout=dropout)

    for mine, theirs in zip(with_gradients(dropped, parts), with_gradients(with_mask, parts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    q, k, v = (part.detach() for part in parts)
    assert torch.equal(dropped(q[:, 2:], k[:, 1:], v[:, 1:], first=2), dropped(q, k, v)[:, 2:])


def test_each_layer_drops_its_own_and_an_evaluation_nothing() -> None:
    spec = replace(SPEC, attention_dropout=0.5)
    models = []
    for each in (spec, SPEC):
        model = Llama(each).double()
        for name, parameter in model.named_parameters():
            values = init_slice(SPEC, 0, name, 0, parameter.numel(), "cpu", torch.float64)
            parameter.data = values.view_as(parameter)
        models.append(model)
    tokens, draws = torch.arange(40).view(1, 40), CounterRNG(0, 1, torch.tensor([3]))
    assert torch.equal(models[0](tokens), models[1](tokens))
    assert torch.equal(models[1](tokens, draws=draws), models[1](tokens))
    first = models[0](tokens, draws=draws)
    assert not torch.allclose(first, models[0](tokens))
    activations.recompute(list(models[0].layers), selective=False)
    assert torch.equal(models[0](tokens, draws=draws), first)
    assert not torch.equal(models[0](tokens, draws=CounterRNG(0, 2, torch.tensor([3]))), first)


@pytest.mark.parametrize("window", [None, 40])
def test_documents_have_biases_and_sinks_as_rows_of_their_own_do(window: int | None) -> None:
    q, k, v = inputs()
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    for alibi in (Alibi(4, 0, scaled=False), Alibi(4, 0, scaled=True), None):
        given = {"sinks": sinks} if alibi is None else {"alibi": alibi}
        found = attention(q, k, v, window=window, segments=offsets, **given)
        for start, stop in itertools.pairwise(OFFSETS):
            if start == stop:
                continue
            row, at = divmod(start, LENGTH)
            own = [part[row : row + 1, :, at : at + stop - start] for part in (q, k, v)]
            scores = own[0] @ own[1].repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
            back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            if alibi is not None:
                slopes = torch.tensor([2.0 ** (-2 * head) for head in range(1, 5)], dtype=torch.float64)
                keys = torch.arange(stop - start)  # of which the distance is the same, up to a constant
                rounded = keys.bfloat16().double() / 8**0.5 if alibi.scaled else keys
                scores = scores + slopes[:, None, None] * rounded
            unseen = (back < 0) if window is None else (back < 0) | (back >= window)
            powers = scores.masked_fill(unseen, -torch.inf).exp()
            more = sinks.exp()[:, None, None] if alibi is None else 0.0
            shares = powers / (powers.sum(-1, keepdim=True) + more)
            expected = shares @ own[2].repeat_interleave(2, 1)
            torch.testing.assert_close(found[row : row + 1, :, at : at + stop - start], expected)
    assert torch.autograd.grad(found.sum(), sinks)[0].abs().min() > 0


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-each for each in range(1, 9)]
    assert alibi_slopes(6) == [2.0**-each for each in (2, 4, 6, 8, 1, 3)]
