import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.models import layers
from phalanx.models.layers import cross_entropy_sum, default_chunk, reference_cross_entropy_sum


def make(n: int, d: int, v: int, dtype: torch.dtype, ignored: float = 0.2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(n * 1000 + d * 10 + v)
    hidden = torch.randn(n, d, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=generator).mul_(0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < ignored] = -100
    return hidden, weight, labels


def run(function, hidden, weight, labels, scale: float = 1.0):  # type: ignore[no-untyped-def]
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(hidden, weight, labels)
    (loss * scale).backward()
    return loss.detach(), hidden.grad, weight.grad


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(1, 20), st.integers(2, 50), st.integers(1, 80), st.floats(0, 1))
def test_float64_agrees_with_the_plain_twin(n: int, d: int, v: int, chunk: int, ignored: float) -> None:
    hidden, weight, labels = make(n, d, v, torch.float64, ignored)
    ours = run(lambda *a: cross_entropy_sum(*a, chunk=chunk), hidden, weight, labels, 1 / 7)
    plain = run(reference_cross_entropy_sum, hidden, weight, labels, 1 / 7)
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_lower_dtypes_agree_with_float64(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = make(300, 32, 100, dtype)
    ours = run(lambda *a: cross_entropy_sum(*a, chunk=64), hidden, weight, labels)
    exact = run(reference_cross_entropy_sum, hidden.double(), weight.double(), labels)
    assert [x.dtype for x in ours] == [torch.float32, dtype, dtype]
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_many_bfloat16_chunks_lose_nothing() -> None:
    # Accumulated in bfloat16, 64 chunks would lose about three bits.
    hidden, weight, labels = make(1024, 32, 50, torch.bfloat16)
    exact = run(reference_cross_entropy_sum, hidden.double(), weight.double(), labels)[2]
    errors = []
    for chunk in (1024, 16):
        grad = run(lambda *a, chunk=chunk: cross_entropy_sum(*a, chunk=chunk), hidden, weight, labels)[2]
        errors.append(float((grad.double() - exact).norm() / exact.norm()))
    assert errors[1] < 1.5 * errors[0]


def test_in_float16_a_sum_that_only_its_scale_brings_into_range_is_finite() -> None:
    # Many equal labels: the weight's gradient sums to 120,000, and float16 ends at 65,504.
    hidden, weight = torch.ones(120_000, 2, dtype=torch.float16), torch.zeros(100, 2, dtype=torch.float16)
    labels = torch.zeros(120_000, dtype=torch.int64)
    grad = run(lambda *a: cross_entropy_sum(*a, chunk=8000), hidden, weight, labels, 2.0**-10)[2]
    assert grad.dtype == torch.float16
    torch.testing.assert_close(grad[0], torch.full((2,), -0.99 * 120_000 / 1024).half(), rtol=2e-3, atol=0)


def test_nothing_but_ignored_labels_is_exactly_zero() -> None:
    hidden, weight, labels = make(50, 16, 30, torch.float32, ignored=1.0)
    with torch.no_grad():
        hidden[3] = float("nan")  # an ignored token may hold anything
    for value in run(lambda *a: cross_entropy_sum(*a, chunk=16), hidden, weight, labels):
        assert torch.equal(value, torch.zeros_like(value))


def test_without_gradients_only_the_loss_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def chunk_fn(hidden, weight, labels, with_grad):  # type: ignore[no-untyped-def]
        asked.append((hidden.shape[0], with_grad))
        return layers._chunk(hidden, weight, labels, with_grad)

    hidden, weight, labels = make(100, 16, 30, torch.float32)
    with torch.no_grad():
        loss = cross_entropy_sum(hidden, weight, labels, chunk=40, chunk_fn=chunk_fn)
    assert asked == [(34, False), (34, False), (32, False)]
    assert not loss.requires_grad
    asked.clear()
    torch.testing.assert_close(loss, cross_entropy_sum(hidden, weight, labels, chunk=40, chunk_fn=chunk_fn).detach())
    assert [with_grad for _, with_grad in asked] == [True] * 3


def test_a_retained_graph_gives_the_same_gradient_twice() -> None:
    hidden, weight, labels = make(40, 8, 20, torch.float64)
    loss = cross_entropy_sum(hidden, weight, labels) * 0.5
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_frozen_head_still_gives_the_gradient_of_hidden() -> None:
    hidden, weight, labels = make(40, 8, 20, torch.float64)
    frozen = weight.detach()
    (grad,) = torch.autograd.grad(cross_entropy_sum(hidden, frozen, labels, chunk=7), hidden)
    (expected,) = torch.autograd.grad(reference_cross_entropy_sum(hidden, frozen, labels), hidden)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_a_compiled_chunk_agrees() -> None:
    hidden, weight, labels = make(96, 16, 40, torch.float32)
    compiled = torch.compile(layers._chunk, fullgraph=True)
    ours = run(lambda *a: cross_entropy_sum(*a, chunk=32, chunk_fn=compiled), hidden, weight, labels)
    for a, b in zip(ours, run(reference_cross_entropy_sum, hidden, weight, labels), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_chunk_of_nothing_is_refused() -> None:
    hidden, weight, labels = make(4, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="got 0"):
        cross_entropy_sum(hidden, weight, labels, chunk=0)


@pytest.mark.parametrize(("vocab", "tokens"), [(1000, 134217), (32000, 4194), (128256, 4096), (262144, 2048)])
def test_an_accelerators_chunk_is_worth_the_traffic_of_dw_within_2_gib(vocab: int, tokens: int) -> None:
    chunk = default_chunk(vocab, torch.device("meta"))
    assert chunk == tokens
    assert 4 * vocab * chunk <= 2 << 30


def test_the_product_is_added_to_a_wide_total_however_wide_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 30, generator=generator), torch.randn(30, 10, generator=generator)
    for dtype, wide, tolerance in [
        (torch.float64, torch.float64, 1e-14),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 2**-8),  # at most one rounding of the product
    ]:
        total = torch.full((20, 10), 0.5, dtype=wide)
        layers._add_product(total, a.to(dtype), b.to(dtype))
        product = a.to(dtype).double() @ b.to(dtype).double()
        assert total.dtype == wide
        assert (total - 0.5 - product).abs().max() <= tolerance * product.abs().max()


def test_chunks_never_hold_the_full_logits() -> None:
    assert default_chunk(4096, torch.device("cpu")) < 4096
    assert default_chunk(128256, torch.device("cpu")) == 512
    hidden, weight, labels = make(2048, 16, 2048, torch.float32)
    largest = 0

    def chunk_fn(part, weight, targets, with_grad):  # type: ignore[no-untyped-def]
        nonlocal largest
        loss, grad = layers._chunk(part, weight, targets, with_grad)
        largest = max(largest, grad.numel())
        return loss, grad

    cross_entropy_sum(hidden, weight, labels, chunk_fn=chunk_fn).backward()
    assert largest <= 2048 * 512
