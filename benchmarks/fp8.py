"""FP8 products: what each way of scaling makes of other micro-batches, what FP8 costs in loss, and its time.

    python3 benchmarks/fp8.py [--quick] [--json FILE]

A linear layer with an outlier token is computed in micro-batches of 1, 2 and 5 sequences and of all 8 at once, in
float64 with FP8 rounding, by `train.fp8: block`, by `train.fp8: delayed` with a history of 16 steps, by dynamic scaling
of whole tensors, and by delayed scaling with a history of 16 forward passes, as Transformer Engine counts it. A decoder
and a mixture of experts then learn the same text without FP8 and with either, from four seeds, in bf16, or on a CPU,
whose bf16 products may take twenty times as long, in fp32. On a GPU layers run by its FP8 kernel, where it has one.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from phalanx.core.json_lines import read_lines
from phalanx.core.run_paths import RunPaths
from phalanx.doctor.device_checks import check_fp8
from phalanx.parallel import fp8_delayed
from phalanx.parallel.fp8 import find_kernel_problem, linear_by_emulation
from phalanx.system import accelerator

EXACT, VISIBLE = 1e-12, 1e-2
NEAR = 0.02  # nats
HISTORY, STEPS = 16, 20  # entries of delayed scaling, and steps before what is compared
KEYS = {
    "data.source": "stdlib", "data.tokenizer_vocab": 2048, "data.seq_len": 256, "train.global_batch": 4,
    "train.micro_batch": 4, "train.eval_sequences": 256, "optim.lr": 1e-3,
    "optim.warmup_steps": 20, "checkpoint.every": 0, "report.tensorboard": "false",
}  # fmt: skip
SIZES = {
    "model.hidden": 256, "model.layers": 4, "model.heads": 4, "model.kv_heads": 2, "model.intermediate": 768,
    "model.tie_embeddings": "true",
}  # fmt: skip
EXPERTS = {"model.architecture": "mixtral", "model.moe.experts": 4, "model.moe.experts_per_token": 2}
EXPERTS |= {
    "model.layers": 2,
    "model.intermediate": 384,
    "model.moe.intermediate": 384,
    "model.tie_embeddings": "false",
}

Scale = Callable[[Tensor], Tensor]  # a tensor -> its scale


# ------------------------------------------------------------------------------------------------------ ways of scaling


class RoundedLinear(torch.autograd.Function):
    """A product whose inputs, weights and gradients are rounded to FP8 by scales of whole tensors."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scales: dict[str, Scale]) -> Tensor:  # type: ignore[no-untyped-def]
        x, weight = _rounded(x, scales["input"]), _rounded(weight, scales["weight"])
        ctx.save_for_backward(x, weight)
        ctx.scale = scales["gradient"]
        return x @ weight.T

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad = _rounded(grads[0], ctx.scale)
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None


def _rounded(x: Tensor, scale_of: Scale) -> Tensor:
    scale = scale_of(x)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def scale_now(x: Tensor) -> Tensor:
    """Dynamic scaling: by the largest magnitude of this tensor."""
    return x.abs().amax() / 448


class PassDelayedScale:
    """Delayed scaling: by the largest magnitude of the forward passes before this one."""

    def __init__(self) -> None:
        self._history: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        known = self._history or [x.abs().amax()]
        scale = torch.stack(known).amax() / 448
        self._history = [*self._history, x.abs().amax()][-HISTORY:]
        return scale


def by_tensor(x: Tensor, weight: Tensor, scales: dict[str, Scale]) -> Tensor:
    """A product with FP8 scales of whole tensors."""
    product: Tensor = RoundedLinear.apply(x, weight, scales)
    return product


def products(sizes: list[int], scaling: str) -> list[Tensor]:
    """Outputs, and gradients to the input and the weight, of the last step, each of 8 other sequences; magnitudes
    fall from step to step, as they do early in training."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 256, generator=generator, dtype=torch.float64, requires_grad=True)
    scales: dict[str, Scale] = dict.fromkeys(("input", "weight", "gradient"), scale_now)
    if scaling == "by passes":
        scales = {name: PassDelayedScale() for name in scales}
    of_steps, history = fp8_delayed.DelayedScaling(), torch.zeros(HISTORY, 3)
    for step in range(STEPS):
        (of_steps.scales,) = fp8_delayed.find_scales(history.amax(0)[None], margin=0)
        of_steps.begin()
        x, grad = (torch.randn(8, 4, width, generator=generator, dtype=torch.float64) for width in (256, 200))
        x[0, 0] *= 30
        x, grad = (0.8**step * x).requires_grad_(), 0.8**step * grad
        weight.grad = None
        outputs = []
        for part, back in zip(x.split(sizes), grad.split(sizes), strict=True):
            if scaling == "block":
                found = linear_by_emulation(part, weight)
            elif scaling == "delayed":
                found = fp8_delayed.linear(of_steps, False, part, weight)
            else:
                found = by_tensor(part, weight, scales)
            found.backward(back)
            outputs.append(found.detach())
        entry = [each for each in of_steps.end()[0] if each is not None]
        history = torch.cat((history[1:], torch.stack(entry)[None])) if entry else history
    assert x.grad is not None and weight.grad is not None
    return [torch.cat(outputs), x.grad, weight.grad]


def compare_scalings() -> list[Row]:
    """How far each way of scaling is from itself with one micro-batch."""
    rows: list[Row] = []
    for scaling in ("block", "delayed", "tensor", "by passes"):
        pairs = zip(products([1, 2, 5], scaling), products([8], scaling), strict=True)
        apart = [float((a - b).norm() / b.norm()) for a, b in pairs]
        rows.append(
            {"scaling": scaling} | dict(zip(("outputs", "input gradient", "weight gradient"), apart, strict=True))
        )
    return rows


# --------------------------------------------------------------------------------------------------------------- curves


def last_loss(run: Path, keys: dict[str, object]) -> float:
    """The loss of held-out text after a run, in nats a token."""
    recipe = run.with_suffix(".yaml")
    recipe.write_text("{}\n")
    given = [f"{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "phalanx", "train", str(recipe), "--run-dir", str(run), "--ranks", "1", *given]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return float([event["loss"] for event in read_lines(RunPaths(run).events) if event["kind"] == "evaluated"][-1])


def compare_curves(steps: int, dtype: str, seeds: int, work: Path) -> list[Row]:
    """The loss of each model with and without FP8 after so many steps: means over runs of several seeds, each with
    either and without, and how far those of different seeds are apart."""
    rows: list[Row] = []
    for name, more in (("decoder", {}), ("mixture of experts", EXPERTS)):
        keys = KEYS | SIZES | more | {"train.steps": steps, "optim.decay_steps": steps, "data.cache": work / "cache"}
        keys |= {"train.dtype": dtype}
        losses = {
            fp8: [last_loss(work / f"{name[:3]}-{fp8}-{seed}", keys | {"train.fp8": fp8, "train.seed": seed})
                  for seed in range(seeds)]
            for fp8 in ("none", "block", "delayed")
        }  # fmt: skip
        for fp8 in ("block", "delayed"):
            apart = [rounded - plain for plain, rounded in zip(losses["none"], losses[fp8], strict=True)]
            rows.append(
                {
                    "model": name,
                    "FP8": fp8,
                    "steps": steps,
                    "type": dtype,
                    "loss": statistics.mean(losses["none"]),
                    "with FP8": statistics.mean(losses[fp8]),
                    "apart": statistics.mean(apart),
                    "of each seed": ", ".join(f"{each:+.3f}" for each in apart),
                    "seeds apart": max(losses["none"]) - min(losses["none"]),
                }
            )
    return rows


def main() -> None:
    asked = options(__doc__.splitlines()[0]).parse_args()
    scalings = compare_scalings()
    device = next(iter(accelerator.list_devices()), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        effort = (20, 2) if asked.quick else (300, 4)
        curves = compare_curves(effort[0], "fp32" if device == "cpu" else "bf16", effort[1], Path(folder))
    (layer,) = check_fp8(device)
    kernel = not find_kernel_problem(torch.device(device))
    rows = [
        *scalings,
        *curves,
        {"device": device, "FP8 by": "kernel" if kernel else "emulation", "time of a layer": layer.sentence},
    ]
    worst = {row["scaling"]: max(row["outputs"], row["input gradient"], row["weight gradient"]) for row in scalings}
    checks: list[Check] = [
        at_most("block scaling: other micro-batches change nothing", worst["block"], EXACT),
        at_most("delayed scaling by steps: nor do they", worst["delayed"], EXACT),
        at_least("dynamic scaling of tensors: they do", worst["tensor"], VISIBLE),
        at_least("delayed scaling by forward passes: they do", worst["by passes"], VISIBLE),
        *(
            at_most(f"{row['model']}: loss with FP8 {row['FP8']} beside that without", abs(row["apart"]), NEAR)
            for row in curves
        ),
    ]
    if kernel:
        checks.append(at_most("a layer in FP8 over bf16", float(layer.value or 0), 0.8))
    report(result("fp8", machine(None if device == "cpu" else device, 1), rows, checks), asked.json)


if __name__ == "__main__":
    main()
