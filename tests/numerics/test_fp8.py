"""Products in FP8 are the same on any division of rows, matrices and layers; scales of whole tensors are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm import fp8_tiles
from phalanx.comm.mesh import Mesh
from phalanx.core.placement import Placement
from phalanx.engine.fp8_gather import Fp8Bucket
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.llama import Llama
from phalanx.models.model import Model
from phalanx.parallel import fp8
from phalanx.parallel.fp8_ranges import Fp8Ranges
from phalanx.system import accelerator
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, distance, farthest, walk

STEPS = 3 if ALL else 2
# Two ranks of the tensor axis have whole tiles of 128 x 128 of each matrix.
WIDE: dict[str, Any] = {
    "model": {"hidden": 192, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 128, "intermediate": 256,
              "vocab_size": runs.VOCAB, "dropout": 0.1},
    "train__fp8": "block", "train__steps": STEPS, "train__eval_sequences": 12, "optim__decay_steps": 3,
}  # fmt: skip
LAYOUTS: list[tuple[int, list[int] | None, dict[str, Any]]] = [
    (2, [5, 3], {"train__micro_batch": 2, "parallel__zero": 3, "balance__optimizer_state": [1, 2],
                 "memory__activations": "full"}),
    (2, None, {"parallel__tensor": 2, "parallel__sequence_parallel": True}),
    (2, None, {"parallel__pipeline": 2, "train__micro_batch": 2}),
    (2, None, {"parallel__context": 2, "parallel__context_by": "ring", "balance__context": [5, 3]}),
]  # fmt: skip
MORE: list[tuple[int, list[int] | None, dict[str, Any]]] = [
    (1, None, {"train__micro_batch": 3}),
    (3, [5, 2, 1], {"memory__activations": "full"}),
    (4, None, {"parallel__tensor": 2, "parallel__pipeline": 2, "train__micro_batch": 4}),
    (2, [7, 1], {"parallel__zero": 1, "optim__double_buffer": True}),
    (2, [4, 4], {"parallel__engine": "fsdp2"}),
]


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """One rank, all rows at once."""
    run = tmp_path_factory.mktemp("alone")
    return walk(1, run, tokens, **WIDE), run


@pytest.mark.parametrize(("ranks", "shares", "changes"), LAYOUTS + (MORE if ALL else []))
def test_any_division_computes_the_same(
    ranks: int, shares: list[int] | None, changes: dict[str, Any], alone: Any, tokens: Path, tmp_path: Path
) -> None:
    """So are the ranges of inputs: of two evaluations the first batch is watched, and what both ranks of a tensor axis
    are given counts once."""
    whole, of_whole = alone
    found = walk(ranks, tmp_path, tokens, shares, **WIDE | changes)
    assert farthest(found.losses, whole.losses) < 1e-9
    assert farthest(found.norms, whole.norms) < 1e-9
    assert distance(found.state, whole.state, "param") < 1e-9
    for what, values in ranges_of(of_whole).items():
        assert ranges_of(tmp_path)[what] == pytest.approx(values, rel=1e-9)


def ranges_of(run: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = runs.events(run, "evaluated")[-1]["fp8"]
    assert len(found["largest"]) == 2 and min(found["largest"]) > 1 and 0 < max(found["zero"]) < 0.01
    return found


@pytest.mark.skipif(not ALL, reason="PHALANX_TEST_ALL is not set")
def test_compiled_blocks_have_the_same_ranges(alone: tuple[Outcome, Path], tokens: Path, tmp_path: Path) -> None:
    """They run as they are written meanwhile."""
    walk(1, tmp_path, tokens, **WIDE | {"train__compile": True})
    assert ranges_of(tmp_path)["largest"] == pytest.approx(ranges_of(alone[1])["largest"], rel=1e-9)


class Blocks(Model):
    """Two products, of 256 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False, dtype=torch.float64) for _ in range(2))
        fp8.train_in_fp8(self.blocks(), torch.device("cpu"))

    def forward(self, x: Tensor) -> None:
        self.layers[0](x)
        self.layers[1](x[:, :0].new_zeros(0, 256))


def test_what_an_outlier_makes_zero_is_counted() -> None:
    x = torch.ones(3, 256, dtype=torch.float64)
    x[0, 0], x[1, 200:] = 2.0**20, 0.0
    alone = cast(Mesh, SimpleNamespace(max=list, sum=list))
    model = Blocks()
    ranges = Fp8Ranges(model, x.device)
    for step in ranges.during_first((x, 2 * x)):  # the second is not watched
        model(step)
    assert ranges.describe(alone) == {"largest": [2.0**20, 0.0], "zero": [127 / (3 * 256 - 56), 0.0]}


def test_it_is_in_effect(alone: tuple[Outcome, Path], tokens: Path, tmp_path: Path) -> None:
    wide = walk(1, tmp_path / "run", tokens, **WIDE | {"train__fp8": "none"})
    assert 1e-5 < farthest(wide.losses, alone[0].losses) < 0.02


EXPERTS: dict[str, Any] = WIDE | {
    "train__eval_sequences": 4,
    "model": WIDE["model"] | {"dropout": 0.0, "intermediate": 160}, "model__architecture": "mixtral",
    "model__moe": {"experts": 4, "experts_per_token": 2, "balance": "step_before"},
}  # fmt: skip
DIVIDED: dict[str, Any] = {"parallel__expert": 2, "balance__experts": [3, 1], "train__micro_batch": 1}
DIVISIONS: list[tuple[int, list[int], dict[str, Any]]] = [
    (
        2,
        [5, 3],
        DIVIDED
        | {"balance__experts": [0, 1], "parallel__zero": 3, "train__micro_batch": 2, "memory__activations": "full"},
    ),
]
MORE_DIVISIONS: list[tuple[int, list[int], dict[str, Any]]] = [
    (2, [5, 3], {"train__micro_batch": 2}),
    (4, [3, 1, 0, 4], DIVIDED | {"parallel__zero": 3, "memory__activations": "full"}),
    (3, [1, 4, 3], {"parallel__expert": 3, "parallel__zero": 2, "memory__activations": "selective"}),
    (4, [5, 3], DIVIDED | {"parallel__context": 2, "parallel__context_by": "ring", "balance__context": [3, 1]}),
    (4, [5, 3], DIVIDED | {"parallel__pipeline": 2, "train__micro_batch": 2}),
    (4, [2, 2, 2, 2], DIVIDED | {"parallel__zero": 3, "balance__optimizer_state": [0, 3, 0, 1]}),
]


@pytest.fixture(scope="module")
def one_with_experts(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One rank, all rows at once, of a mixture of experts."""
    return walk(1, tmp_path_factory.mktemp("experts"), tokens, **EXPERTS)


@pytest.mark.parametrize(("ranks", "shares", "changes"), DIVISIONS + (MORE_DIVISIONS if ALL else []))
def test_experts_compute_the_same_on_any_division(
    ranks: int, shares: list[int], changes: dict[str, Any], one_with_experts: Outcome, tokens: Path, tmp_path: Path
) -> None:
    found = walk(ranks, tmp_path, tokens, shares, **EXPERTS | changes)
    assert farthest(found.losses[:1], one_with_experts.losses[:1]) < 1e-12
    assert farthest(found.losses, one_with_experts.losses) < 1e-9
    assert farthest(found.norms, one_with_experts.norms) < 1e-9
    assert distance(found.state, one_with_experts.state, "param") < 1e-9


def test_it_is_in_effect_in_experts(one_with_experts: Outcome, tokens: Path, tmp_path: Path) -> None:
    plain = walk(1, tmp_path, tokens, **EXPERTS | {"train__fp8": "none"})
    assert 1e-5 < farthest(plain.losses, one_with_experts.losses) < 0.02


@pytest.mark.parametrize(("dtype", "divided"), some([("fp64", False), ("bf16", False), ("fp64", True)], 1, 2))
def test_gathers_in_fp8_change_no_bit(dtype: str, divided: bool, tokens: Path, tmp_path: Path) -> None:
    """ZeRO 3 sends the weights of blocks in a byte an element, ZeRO 2 in the compute type; of experts that are divided
    each of two copies sends its part of them, and the scales of tiles that both have a part of agree. Four ranks add up
    gradients in another order, as buckets differ."""
    changes = EXPERTS | DIVIDED | {"model__layers": 1} if divided else WIDE | {"train__eval_sequences": 4}
    changes |= {"train__micro_batch": 2, "checkpoint__every": 2}
    changes |= {"train__dtype": dtype, "train__steps": 2, "optim__clip_norm": None}
    changes["balance__optimizer_state"] = [1, 2] * (1 + divided)
    ranks, shares = (4, [2, 2, 2, 2]) if divided else (2, [4, 4])
    kept = walk(ranks, tmp_path / "zero2", tokens, shares, **changes | {"parallel__zero": 2})
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    dotted |= {"parallel.zero": 3, "balance.batch": shares}
    gathers = run_ranks(count_gathers, ranks, run=str(tmp_path / "zero3"), data=str(tokens), changes=dotted)
    found = runs.outcome(tmp_path / "zero3")
    if divided:
        assert farthest(found.losses, kept.losses) < 1e-12
        assert distance(found.state, kept.state, "param") < 1e-12
        return
    assert found.losses == kept.losses
    assert found.evaluations == kept.evaluations
    assert all(torch.equal(found.state[name], value) for name, value in kept.state.items())
    assert gathers[0] == gathers[1]
    assert dtype == "fp64" or all(elements == size for elements, size in gathers[0])
    matrices = 2 * 7 * 192 * 256  # of two blocks
    # Each before the forward and the backward pass of two micro-batches in two steps, and before an evaluation.
    assert sum(elements for elements, _ in gathers[0]) == matrices * (2 * 2 * 2 + 1)


def count_gathers(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> list[list[int]]:
    """One rank of a run; returns [elements, bytes] of each gathered part of a block's matrices."""
    found: list[list[int]] = []
    prepare = Fp8Bucket.prepare_gather

    def counted(bucket: Fp8Bucket, number: int) -> Any:
        tensor, arrived = prepare(bucket, number)
        found.append([bucket.bucket.parts[number].elements, tensor.nbytes])
        return tensor, arrived

    with mock.patch.object(Fp8Bucket, "prepare_gather", counted):
        runs.train(placement, run, data, changes)
    return found


def test_weights_that_custom_code_may_read_are_gathered_as_they_are() -> None:
    class Own(Llama): ...

    spec = ModelSpec(
        vocab_size=61, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=44, max_seq_len=16
    )
    with torch.device("meta"):
        built_in, own = Llama(spec), Own(spec)
    assert len(fp8.find_fp8_weights(built_in, built_in.blocks())) == 2 * 7
    assert fp8.find_fp8_weights(own, own.blocks()) == []


# ------------------------------------------------------------------------------------------- one layer, other scales


def products(rows: list[int], linear: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and gradients to input and weight, of 8 rows in micro-batches of so many; one token is an outlier."""
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64)
                       for shape in ((8, 4, 256), (8, 4, 200), (200, 256)))  # fmt: skip
    x[0, 0] *= 30
    x.requires_grad_()
    weight.requires_grad_()
    outputs = [linear(part, weight) for part in x.split(rows)]
    torch.autograd.backward(outputs, list(grad.split(rows)))
    assert x.grad is not None and weight.grad is not None
    return torch.cat([output.detach() for output in outputs]), x.grad, weight.grad


def by_tensor(x: Tensor) -> Tensor:
    """Dynamic scaling of a whole tensor, as other trainers have it."""
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def change(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    return max(float((p - q).norm() / q.norm()) for p, q in zip(a, b, strict=True))


def test_micro_batches_do_not_change_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = products([8], fp8.linear_by_emulation)
    assert change(products([1, 2, 5], fp8.linear_by_emulation), whole) < 1e-12
    plain = products([8], torch.nn.functional.linear)
    assert 0.01 < change(whole, plain) < 0.06  # the error of FP8 itself
    monkeypatch.setattr(fp8, "round_rows", by_tensor)
    assert change(products([1, 2, 5], fp8.linear_by_emulation), products([8], fp8.linear_by_emulation)) > 1e-2


def test_no_rows_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may have no position of a row."""
    monkeypatch.setattr(accelerator, "block_scaled_mm", mock.Mock(side_effect=AssertionError))
    x, weight = torch.zeros(3, 0, 256, dtype=torch.bfloat16), torch.zeros(128, 256, dtype=torch.bfloat16)
    found = fp8.linear_by_kernel(x.requires_grad_(), weight.requires_grad_())
    assert found.shape == (3, 0, 128)
    assert [each.shape for each in torch.autograd.grad(found.sum(), (x, weight))] == [x.shape, weight.shape]


def test_slices_at_multiples_of_128_do_not_change_a_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 384), (256, 384)))
    whole = fp8.linear_by_emulation(x, weight)
    columns = [fp8.linear_by_emulation(x, weight[rows]) for rows in (slice(0, 128), slice(128, 256))]
    assert change((torch.cat(columns, -1),), (whole,)) < 1e-14
    parts = [fp8.linear_by_emulation(x[:, at], weight[:, at]) for at in (slice(0, 256), slice(256, 384))]
    assert change((parts[0] + parts[1],), (whole,)) < 1e-14
    cut = [fp8.linear_by_emulation(x[:, at], weight[:, at]) for at in (slice(0, 200), slice(200, 384))]
    assert change((cut[0] + cut[1],), (whole,)) > 1e-9  # nearly: scales are powers of two


def test_scales_are_the_least_powers_of_two_that_do_not_saturate() -> None:
    exponents = torch.arange(-90, 100)
    exact = (448.0 * 2.0 ** exponents.double()).float()
    assert torch.equal(fp8_tiles.power_of_two_scale(exact), (2.0 ** exponents.double()).float())
    above = torch.nextafter(exact, torch.tensor(torch.inf))
    assert torch.equal(fp8_tiles.power_of_two_scale(above), (2.0 ** (exponents.double() + 1)).float())
    x = torch.randn(7, 300, dtype=torch.float64)
    for rounded in (fp8.round_rows, fp8.round_tiles):
        once = rounded(x)
        assert torch.equal(rounded(once), once) and not torch.equal(once, x)
        assert torch.equal(rounded(torch.zeros_like(x)), torch.zeros_like(x))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_overflow_is_not_hidden(value: float) -> None:
    x = torch.ones(2, 256)
    x[0, 3] = value
    found = fp8.linear_by_emulation(x, torch.ones(130, 256))
    assert found[0].isnan().all() and found[1].isfinite().all()
    assert fp8.linear_by_emulation(torch.ones(2, 256), x)[:, 0].isnan().all()
