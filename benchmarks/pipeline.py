"""How long the stages of a pipeline wait for each other, beside the theory of each schedule and PyTorch's runtime.

    python3 benchmarks/pipeline.py [--quick] [--json FILE]

Four ranks of this machine hold the stages. A stage's passes wait for as long as they are to take, so that they need no
processor time, and what is measured is the order of passes, what goes between ranks, and all that is done around it.
Then two devices, one twice as fast as the other, get stages in proportion. docs/benchmarks.md says how to read the
figures.
"""

import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.elastic.node import agent

if __name__ == "__main__":  # first of all: whoever forks ranks must have no thread of a numerical library
    agent.preload(("numpy", "torch", "torch._dynamo", "torch.distributed.pipelining"))

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from phalanx.comm.mesh import Mesh, join
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.engine.interface import Precision
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.pipeline_stages import (
    STAGES_PER_RANK,
    Action,
    PipelineStages,
    bubble_fraction,
    divide_layers,
    ideal_bubble_fraction,
    simulate_schedule,
    step_s,
)
from phalanx.parallel import pipeline
from phalanx.parallel.pipeline import Pipeline, build_actions

OURS, TORCH = "Phalanx", "PyTorch's runtime"
FOUND = "found.json"
WIDTH = 4096  # hidden states of a micro-batch: 16 KiB, so that no link matters
NEAR = 1.05  # of the theory
SHARE = 0.9  # of the devices' speeds together


@dataclass(frozen=True)
class Size:
    """What is run: `layers` on `ranks`, each `forward_s` forward and twice as long backward on a device of speed 1."""

    ranks: int = 4
    layers: int = 8
    micro_batches: tuple[int, ...] = (8, 16)
    forward_s: float = 0.020
    steps: int = 3
    layers_unequal: int = 6
    micro_batches_unequal: int = 16


QUICK = Size(micro_batches=(8,), steps=2)


@dataclass(frozen=True)
class Case:
    """One schedule on devices of some speeds."""

    schedule: str
    plan: PipelineStages
    micro_batches: int
    forward_s: float
    speeds: tuple[float, ...]

    def seconds(self, stage: int) -> float:
        """A stage's forward pass."""
        return len(self.plan.layers[stage]) * self.forward_s / self.speeds[self.plan.owner(stage)]

    def action_s(self, action: Action) -> float:
        """A half of a backward pass takes as long as a forward pass. The first stage does both in one."""
        if action.stage == 0 and action.kind in "IW":
            return 0.0 if action.kind == "I" else 2 * self.seconds(0)
        return self.seconds(action.stage) * (2 if action.kind == "B" else 1)

    @property
    def busy_s(self) -> float:
        """What all ranks together would take if none ever waited."""
        work = self.micro_batches * 3 * self.forward_s * sum(len(stage) for stage in self.plan.layers)
        return work / sum(self.speeds)


def cases(size: Size, unequal: bool) -> dict[str, Case]:
    """Everything that a number of ranks measures, by name."""
    if not unequal:
        return {
            f"{schedule} {count}": Case(
                schedule, divide_layers(size.layers, size.ranks, schedule), count, size.forward_s, (1.0,) * size.ranks
            )
            for count in size.micro_batches
            for schedule in STAGES_PER_RANK
        }
    speeds = (2.0, 1.0)
    made = {
        f"{schedule}, in proportion": (schedule, divide_layers(size.layers_unequal, 2, schedule, speeds=speeds))
        for schedule in ("1f1b", "interleaved")
    }
    made["1f1b, equal stages"] = "1f1b", divide_layers(size.layers_unequal, 2, "1f1b")
    return {
        name: Case(schedule, plan, size.micro_batches_unequal, size.forward_s, speeds)
        for name, (schedule, plan) in made.items()
    }


# ------------------------------------------------------------------------------------------------------------ on a rank


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


def wait(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """`x`, so many seconds later, and its gradient likewise."""
    found: Tensor = _Wait.apply(x, forward_s, backward_s)
    return found


class Waiting(nn.Module):
    """A stage. The gradients of its input and of its weight can be had one without the other."""

    def __init__(self, case: Case, stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.begins = nn.Parameter(torch.ones(1)) if stage == 0 else None
        self.seconds = case.seconds(stage)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.begins is None else hidden * self.begins
        return wait(hidden, self.seconds, self.seconds) * wait(self.weight, 0.0, self.seconds)


class Waits:
    """What our pipeline asks for."""

    def __init__(self, stages: Mapping[int, Waiting], last: int) -> None:
        self._stages, self._last = stages, last

    def hidden_shape(self, micro_batch: int) -> Sequence[int]:
        return (1, WIDTH)

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        hidden = torch.full((1, WIDTH), float(micro_batch)) if hidden is None else hidden
        output: Tensor = self._stages[stage](hidden)
        return output.sum() if stage == self._last else output

    def parameters(self, stage: int) -> Iterator[nn.Parameter]:
        yield from self._stages[stage].parameters()

    def before_last_backward(self, stage: int) -> None: ...

    def after_weight_gradients(self, stage: int) -> None: ...


def ours(case: Case, mesh: Mesh, stages: Mapping[int, Waiting]) -> Callable[[], None]:
    """A step on our pipeline."""
    assert mesh.pipe is not None
    precision = Precision(torch.float32, torch.float32)
    pipeline = Pipeline(case.plan, case.schedule, mesh.pipe, mesh.device, precision, mesh.traffic)
    return lambda: pipeline.train(case.micro_batches, Waits(stages, case.plan.last))


def torchs(case: Case, mesh: Mesh, stages: Mapping[int, Waiting]) -> Callable[[], None]:
    """The same on PyTorch's runtime."""
    assert mesh.pipe is not None
    group, count = mesh.pipe.group, case.micro_batches
    made = [
        PipelineStage(module, stage, case.plan.last + 1, mesh.device, group=group) for stage, module in stages.items()
    ]
    how: dict[str, Any] = {"loss_fn": lambda output, target: output.sum(), "scale_grads": False}
    known = pipeline.make_schedule(case.schedule, made, count, **how)
    rows = torch.arange(float(count))[:, None].expand(count, WIDTH)
    inputs = (rows,) if 0 in stages else ()
    target = {"target": rows} if case.plan.last in stages else {}
    return lambda: known.step(*inputs, **target)


def measured(case: Case, mesh: Mesh, steps: int, beside: bool) -> dict[str, Any]:
    """Seconds of each way's steps, in turns, each as long as on its slowest rank; `beside`: PyTorch's runtime, too, and
    how far apart gradients are."""
    assert mesh.pipe is not None
    stages = {stage: Waiting(case, stage) for stage in case.plan.stages_of(mesh.pipe.rank)}
    ways = {OURS: ours(case, mesh, stages)} | ({TORCH: torchs(case, mesh, stages)} if beside else {})
    taken: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, list[Tensor]] = {}
    for turn in range(steps + 1):
        for name, step in ways.items():
            mesh.sum([0.0])  # all begin together
            begun = time.perf_counter()
            step()
            seconds = mesh.max([time.perf_counter() - begun])[0]
            found = [parameter for module in stages.values() for parameter in module.parameters()]
            gradients[name] = [parameter.grad.clone() for parameter in found if parameter.grad is not None]
            for parameter in found:
                parameter.grad = None
            if turn:  # the first makes what is needed only once
                taken[name].append(seconds)
    pairs = list(zip(gradients[OURS], gradients.get(TORCH, gradients[OURS]), strict=True))
    apart = max(float(((a - b).abs() / b.abs().clamp(min=1e-6)).max()) for a, b in pairs)
    return {"seconds": taken, "apart": mesh.max([apart])[0]}


def on_a_rank(placement: Placement, size: Mapping[str, Any], unequal: bool) -> dict[str, Any]:
    """Everything that is measured, of which all ranks know the same."""
    told: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in size.items()}
    of = Size(**told)
    torch.set_num_threads(1)
    with join(placement, timeout_s=60, axes=MeshAxes(pipeline=placement.world)) as mesh:
        return {name: measured(case, mesh, of.steps, beside=not unequal) for name, case in cases(of, unequal).items()}


# --------------------------------------------------------------------------------------------------------------- tables


def table(size: Size, found: Mapping[str, Any]) -> tuple[list[Row], list[Check]]:
    """Rows and checks of devices that are alike."""
    rows: list[Row] = []
    checks: list[Check] = []
    for name, case in cases(size, unequal=False).items():
        spans = simulate_schedule(build_actions(case.schedule, case.plan, case.micro_batches), case.plan, case.action_s)
        formula = None if case.schedule == "zero_bubble" else ideal_bubble_fraction(
            size.ranks, case.micro_batches, STAGES_PER_RANK[case.schedule]
        )  # fmt: skip
        for way, taken in found[name]["seconds"].items():
            step = statistics.median(taken)
            rows.append({
                "schedule": case.schedule, "micro-batches": case.micro_batches, "by": way, "step s": step,
                "theory s": step_s(spans), "over that": step / step_s(spans), "waiting": 1 - case.busy_s / step,
                "waiting, theory": bubble_fraction(spans), "by formula": formula,
            })  # fmt: skip
        ours = statistics.median(found[name]["seconds"][OURS])
        checks.append(at_most(f"{name} micro-batches: a step over its theory", ours / step_s(spans), NEAR))
    apart = max(each["apart"] for each in found.values())
    checks.append(at_most("gradients of both runtimes: largest relative difference", apart, 1e-6))
    return rows, checks


def table_unequal(size: Size, found: Mapping[str, Any]) -> tuple[list[Row], list[Check]]:
    """Rows and checks of two devices, one twice as fast as the other."""
    rows: list[Row] = []
    checks: list[Check] = []
    for name, case in cases(size, unequal=True).items():
        spans = simulate_schedule(build_actions(case.schedule, case.plan, case.micro_batches), case.plan, case.action_s)
        step = statistics.median(found[name]["seconds"][OURS])
        layers = [sum(len(case.plan.layers[stage]) for stage in case.plan.stages_of(rank)) for rank in range(2)]
        rows.append({
            "devices 2:1": name, "layers": ":".join(map(str, layers)), "step s": step, "theory s": step_s(spans),
            "of both speeds together": case.busy_s / step,
        })  # fmt: skip
        if "in proportion" in name:
            checks.append(at_least(f"devices 2:1, {name}: part of both speeds together", case.busy_s / step, SHARE))
    return rows, checks


def _worker(folder: Path, size: Size, unequal: bool, placement: Placement) -> int:
    found = on_a_rank(placement, asdict(size), unequal)
    if placement.rank == 0:
        (folder / FOUND).write_text(json.dumps(found))
    return 0


def _run(ranks: int, size: Size, unequal: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="phalanx-pipeline-") as folder:
        worker = functools.partial(_worker, Path(folder), size, unequal)
        causes: list[str] = []

        def note(kind: str, details: dict[str, Any]) -> None:
            if kind == "worker_died":
                causes.append(f"rank {details['rank']}: {details['reason']}")

        code = agent.run_local_job(
            agent.NodeJob(world=ranks, worker=worker, paths=RunPaths(Path(folder)), on_event=note)
        )
        assert code == 0, f"ended with exit code {code}: {'; '.join(causes)}"
        found: dict[str, Any] = json.loads((Path(folder) / FOUND).read_text())
        return found


def measure(size: Size) -> tuple[list[Row], list[Check]]:
    """On ranks of this machine."""
    rows, checks = table(size, _run(size.ranks, size, unequal=False))
    more_rows, more_checks = table_unequal(size, _run(2, size, unequal=True))
    return rows + more_rows, checks + more_checks


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    rows, checks = measure(QUICK if arguments.quick else Size())
    report(result("pipeline", machine(None, 1), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
