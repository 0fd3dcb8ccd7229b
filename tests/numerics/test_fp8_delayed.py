"""Delayed scaling with an entry a step is the same on any division, killed and resumed; other histories are not."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.parallel import fp8_delayed
from phalanx.parallel.fp8_delayed import GRADIENT, INPUT, WEIGHT, DelayedScaling, find_scales
from phalanx.system import accelerator
from phalanx.workload import fp8_history
from phalanx.workload.fp8_history import KEY
from phalanx.workload.step_table import StepTable
from tests.dist.incidents import train_with_signal
from tests.helpers import ALL, run_ranks
from tests.numerics import runs
from tests.numerics.runs import Outcome, distance, farthest, read_header, same_bits, walk

STEPS = 5
BASE: dict[str, Any] = {
    "train__fp8": "delayed", "train__fp8_history": 2, "train__steps": STEPS, "optim__decay_steps": STEPS,
}  # fmt: skip
LAYOUTS: list[tuple[int, list[int] | None, dict[str, Any]]] = [
    (2, None, {"parallel__tensor": 2, "parallel__sequence_parallel": True, "memory__activations": "full"}),
    (2, None, {"parallel__pipeline": 2, "train__micro_batch": 2}),
    (2, None, {"parallel__context": 2, "parallel__context_by": "ring", "balance__context": [5, 3]}),
]
SHARDED: dict[str, Any] = {"train__micro_batch": 2, "parallel__zero": 3, "balance__optimizer_state": [1, 2, 1]}
MORE: list[tuple[int, list[int] | None, dict[str, Any]]] = [
    (3, [5, 2, 1], SHARDED),
    (1, None, {"train__micro_batch": 3, "memory__activations": "selective"}),
    (2, [0, 8], {"parallel__zero": 1}),
    (2, [7, 1], {"parallel__zero": 2, "optim__double_buffer": True}),
    (2, [4, 4], {"parallel__engine": "fsdp2"}),
    (2, None, {"parallel__pipeline": 2, "parallel__schedule": "zero_bubble", "model__layers": 4}),
    (4, None, {"parallel__tensor": 2, "parallel__pipeline": 2, "train__micro_batch": 4}),
    (1, None, {"train__micro_batch": 3, "train__compile": True, "memory__activations": "selective"}),
    (2, [5, 3], {"train__micro_batch": 2, "train__compile": True, "memory__activations": "full"}),
]


def history(run: Path) -> str:
    return str(read_header(run)[KEY])


def clipped(run: Path) -> list[Any]:
    return [record.get("fp8_clipped") for record in read_steps(RunPaths(run).metrics)]


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Outcome, Path]]:
    """One rank, all rows at once."""
    known: dict[str, tuple[Outcome, Path]] = {}

    def run(**more: Any) -> tuple[Outcome, Path]:
        if str(more) not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[str(more)] = walk(1, folder, tokens, **BASE | more), folder
        return known[str(more)]

    return run


@pytest.mark.parametrize(("ranks", "shares", "changes"), LAYOUTS + (MORE if ALL else []))
def test_any_division_computes_the_same(
    ranks: int, shares: list[int] | None, changes: dict[str, Any], alone: Any, tokens: Path, tmp_path: Path
) -> None:
    layers = {"model__layers": 4} if "model__layers" in changes else {}
    whole, of_whole = alone(**layers)
    found = walk(ranks, tmp_path, tokens, shares, **BASE | changes)
    assert farthest(found.losses[:2], whole.losses[:2]) < 1e-12  # the second is the first with scales
    assert farthest(found.losses, whole.losses) < 1e-9
    assert farthest(found.norms, whole.norms) < 1e-9
    assert distance(found.state, whole.state, "param") < 1e-9
    assert found.evaluations == pytest.approx(whole.evaluations, rel=1e-9)
    assert history(tmp_path) == history(of_whole)
    assert clipped(tmp_path) == clipped(of_whole)


def test_it_is_in_effect_from_the_second_step_on(alone: Any, tokens: Path, tmp_path: Path) -> None:
    plain = walk(1, tmp_path, tokens, **BASE | {"train__fp8": "none", "train__fp8_history": 16})
    rounded, run = alone()
    assert rounded.losses[0] == plain.losses[0] and rounded.norms[0] == plain.norms[0]
    assert 1e-5 < farthest(rounded.losses[1:], plain.losses[1:]) < 0.02
    assert clipped(run)[0] == 0 and sum(clipped(run)) > 0
    assert clipped(tmp_path) == [None] * STEPS
    (event,) = runs.events(run, EventKind.EVALUATED)
    assert min(event["fp8"]["largest"]) > 1 and 0 <= max(event["fp8"]["zero"]) < 0.01


class LocalTable(StepTable):
    """A table that goes by this rank's own numbers."""

    def end(self, step: int, numbers: Tensor) -> None:
        mine = numbers.clone()
        super().end(step, numbers)
        vars(self._last)["mine"] = mine

    def _reduced(self, of: Any) -> Tensor:
        super()._reduced(of)
        mine: Tensor = of.mine
        return mine


def train_with_local_maxima(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    with mock.patch.object(fp8_history, "StepTable", LocalTable):
        return runs.train(placement, run, data, changes, [5, 3])


def test_local_maxima_would_be_seen(alone: Any, tokens: Path, tmp_path: Path) -> None:
    changes = {key.replace("__", "."): value for key, value in BASE.items()}
    run_ranks(train_with_local_maxima, 2, run=str(tmp_path), data=str(tokens), changes=changes)
    whole, of_whole = alone()
    assert farthest(runs.outcome(tmp_path).losses, whole.losses) > 1e-7
    assert history(tmp_path) != history(of_whole)


def test_a_killed_run_goes_on_with_the_same_history(tokens: Path, tmp_path: Path) -> None:
    changes = {key.replace("__", "."): value for key, value in BASE.items()} | {"checkpoint.every": 1}
    kill: dict[str, Any] = {"step": 3, "number": signal.SIGKILL, "ranks": [1]}
    run = str(tmp_path / "killed")
    assert run_ranks(
        train_with_signal, 2, restarts=1, run=run, data=str(tokens), changes=changes, **kill
    ) == [0, 0]  # fmt: skip
    whole = walk(2, tmp_path / "whole", tokens, **BASE)
    killed = runs.outcome(Path(run))
    assert [event["step"] for event in runs.events(Path(run), EventKind.RESUMED)] in ([1], [2])  # whole by then
    assert killed.losses == whole.losses and same_bits(killed.state, whole.state)
    assert history(Path(run)) == history(tmp_path / "whole")


def test_a_checkpoint_is_read_by_another_number_of_ranks(alone: Any, tokens: Path, tmp_path: Path) -> None:
    walk(1, tmp_path, tokens, **BASE | {"train__steps": 3})
    found = walk(3, tmp_path, tokens, [4, 1, 3], **BASE | SHARDED)
    whole, of_whole = alone()
    assert farthest(found.losses, whole.losses) < 1e-9
    assert farthest(found.norms, whole.norms) < 1e-9
    assert distance(found.state, whole.state, "param") < 1e-9
    assert clipped(tmp_path) == clipped(of_whole)
    assert history(tmp_path) == history(of_whole)


def test_experts_compute_the_same_on_any_division(tokens: Path, tmp_path: Path) -> None:
    """A stack has one history, of all experts, whichever ranks hold them."""
    experts = {"experts": 4, "experts_per_token": 2, "balance": "step", "balance_weight": 0.5}
    changes = BASE | {"model__architecture": "mixtral", "model__moe": experts}
    whole = walk(1, tmp_path / "whole", tokens, **changes)
    divisions: list[tuple[int, list[int], dict[str, Any]]] = [
        (2, [5, 3], {"parallel__expert": 2, "balance__experts": [3, 1], "train__micro_batch": 2}),
        (2, [5, 3], {"train__micro_batch": 2}),
        (4, [3, 1, 0, 4], {"parallel__expert": 2, "balance__experts": [3, 1], "train__micro_batch": 2}),
        (2, [5, 3], {"parallel__expert": 2, "balance__experts": [0, 1], "parallel__zero": 3, "train__micro_batch": 2}),
        (
            4,
            [5, 3],
            {"parallel__expert": 2, "parallel__context": 2, "parallel__context_by": "ring", "train__micro_batch": 2},
        ),
        (2, [5, 3], {"parallel__expert": 2, "train__compile": True, "memory__activations": "full"}),
    ]
    for number, (ranks, shares, more) in enumerate(divisions if ALL else divisions[:1]):
        run = tmp_path / str(number)
        found = walk(ranks, run, tokens, shares, **changes | more)
        assert farthest(found.losses, whole.losses) < 1e-9
        assert distance(found.state, whole.state, "param") < 1e-9
        assert history(run) == history(tmp_path / "whole")
        assert clipped(run) == clipped(tmp_path / "whole")


def test_the_factor_of_fp16_is_not_in_the_history(tokens: Path, tmp_path: Path) -> None:
    """A factor that doubles after the second step neither clips gradients nor changes what they are rounded to."""
    changes = BASE | {"train__dtype": "fp16", "train__loss_scale": 64.0, "train__steps": 4}
    kept = walk(1, tmp_path / "kept", tokens, **changes)
    grown = walk(1, tmp_path / "grown", tokens, **changes | {"train__loss_scale_growth_interval": 2})
    assert farthest(grown.losses, kept.losses) < 1e-4
    assert clipped(tmp_path / "grown") == clipped(tmp_path / "kept")


# ------------------------------------------------------------------------------------------------------------ one layer


def sequences(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and gradients of 8 sequences in a step; magnitudes grow by steps, and one sequence is an outlier."""
    generator = torch.Generator().manual_seed(step)
    x, grad = (torch.randn(8, 4, width, generator=generator, dtype=torch.float64) for width in (48, 40))
    x[7, 0] *= 30
    return 1.7**step * x, 1.7**step * grad


def products(sizes: list[int], entry_of: str, steps: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and gradients of the last step, of 8 sequences in micro-batches of such `sizes`; a history has an entry
    for each step, or for each micro-batch."""
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)
    scaling, entries = DelayedScaling(), []

    def close() -> None:
        maxima, _ = scaling.end()
        entries.append(torch.stack([each for each in maxima if each is not None]))
        (scaling.scales,) = find_scales(torch.stack(entries[-2:]).amax(0)[None], margin=0)
        scaling.begin()

    scaling.begin()
    for step in range(steps):
        x, grad = sequences(step)
        x.requires_grad_()
        weight.grad = None
        outputs = []
        for part, back in zip(x.split(sizes), grad.split(sizes), strict=True):
            outputs.append(fp8_delayed.linear(scaling, False, part, weight))
            outputs[-1].backward(back)
            if entry_of == "micro-batch":
                close()
        if entry_of == "step":
            close()
    assert x.grad is not None and weight.grad is not None
    return torch.cat(outputs).detach(), x.grad, weight.grad


def change(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    return max(float((p - q).norm() / q.norm()) for p, q in zip(a, b, strict=True))


def test_an_entry_is_that_of_a_step() -> None:
    assert change(products([1, 2, 5], "step"), products([8], "step")) < 1e-12
    assert change(products([1, 2, 5], "micro-batch"), products([8], "micro-batch")) > 1e-2


def test_a_layer_is_what_its_definition_says() -> None:
    """The second step, from the maxima of the first: power-of-two scales, E4M3 and E5M2, clipped and counted."""
    x, grad = sequences(0)
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    before = [float(each.abs().amax()) for each in (x, weight, grad)]
    x, grad = sequences(2)  # 1.7^2 times as large
    for margin in (0, 3):
        rounded, beyond = [], 0
        for tensor, largest, dtype in zip((x, weight, grad), before, (fp8_delayed.FORMATS), strict=True):
            most = torch.finfo(dtype).max
            scale = 2.0 ** torch.tensor(largest * 2**margin / most).log2().ceil()
            rounded.append((tensor / scale).clamp(-most, most).to(dtype).double() * scale)
            beyond += int((tensor.abs() > most * scale).sum())
        scaling = DelayedScaling()
        (scaling.scales,) = find_scales(torch.tensor([before]), margin)
        scaling.begin()
        inputs, weights = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = fp8_delayed.linear(scaling, False, inputs, weights, bias := torch.ones(40, dtype=torch.float64))
        y.backward(grad)
        assert torch.equal(y, rounded[INPUT] @ rounded[WEIGHT].T + bias)
        assert inputs.grad is not None and weights.grad is not None
        wanted = rounded[GRADIENT].flatten(0, 1).T @ rounded[INPUT].flatten(0, 1)
        assert change((inputs.grad, weights.grad), (rounded[GRADIENT] @ rounded[WEIGHT], wanted)) < 1e-15
        maxima, count = scaling.end()
        assert [float(each) for each in maxima if each is not None] == pytest.approx(
            [float(each.abs().amax()) for each in (x, weight, grad)], rel=1e-7
        )
        assert int(count or 0) == beyond and (beyond > 0) == (margin == 0)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_overflow_is_not_hidden(value: float) -> None:
    scaling = DelayedScaling()
    (scaling.scales,) = find_scales(torch.ones(1, 3), 0)
    x = torch.ones(2, 48)
    x[0, 3] = value
    assert fp8_delayed.linear(scaling, False, x, torch.ones(40, 48)).isnan().all()
    assert fp8_delayed.linear(scaling, False, torch.ones(2, 48), x).isnan().all()
    weight = torch.ones(2, 48, requires_grad=True)
    fp8_delayed.linear(scaling, False, torch.ones(4, 48), weight).backward(x[:, :4].T.contiguous())
    assert weight.grad is not None and weight.grad.isnan().all()


class FactorsOfTheProductsType(TorchDispatchMode):
    """As on accelerators, which round a factor in a 0-dim tensor to the type of the product; CPUs do not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor and isinstance(args[1], Tensor):
            args = [each.to(torch.result_type(*args)) for each in args]
        return func(*args, **(kwargs or {}))


def test_small_numbers_in_float16_do_not_overflow_where_they_are_scaled() -> None:
    scaling, x = DelayedScaling(), 2.0**-14 * torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    (scaling.scales,) = find_scales(x.abs().amax().expand(1, 3), 0)
    x = x.half()
    for which in (INPUT, WEIGHT, GRADIENT):
        with FactorsOfTheProductsType():
            found = scaling.round(which, x)
        assert torch.equal(found, scaling.round(which, x.double()).half())


def test_where_no_magnitude_is_known_nothing_is_rounded() -> None:
    assert find_scales(torch.tensor([[0.0, 448.0, 57344.0]]), 0) == [[None, 1.0, 1.0]]
    scaling = DelayedScaling()
    x, weight = torch.randn(3, 48), torch.randn(40, 48)
    assert torch.equal(fp8_delayed.linear(scaling, False, x, weight), torch.nn.functional.linear(x, weight))
    empty = torch.zeros(3, 0, 48, requires_grad=True)
    scaling.rehearse()
    y = fp8_delayed.linear(scaling, False, empty, weight)
    assert y.shape == (3, 0, 40) and torch.autograd.grad(y.sum(), empty)[0].shape == (3, 0, 48)


def test_the_kernel_computes_what_the_emulation_does() -> None:
    """torch has the kernel for CPUs, too."""
    found = []
    for kernel in (True, False):
        generator = torch.Generator().manual_seed(3)
        shapes = ((2, 16, 64), (2, 16, 48), (48, 64))
        x, grad, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
        scaling = DelayedScaling()
        (scaling.scales,) = find_scales(torch.full((1, 3), 4.0), 0)
        x.requires_grad_()
        weight.requires_grad_()
        with mock.patch.object(accelerator, "tensor_scaled_mm", wraps=accelerator.tensor_scaled_mm) as called:
            y = fp8_delayed.linear(scaling, kernel, x, weight)
            found.append((y.detach(), *torch.autograd.grad(y, (x, weight), grad)))
            assert called.call_count == 3 * kernel
            fp8_delayed.linear(scaling, kernel, x[..., :40], weight[:, :40])  # of sizes that it does not take
            assert called.call_count == 3 * kernel
    assert change(tuple(each.float() for each in found[0]), tuple(each.float() for each in found[1])) < 5e-3
