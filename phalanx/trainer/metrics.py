"""Step records: measured here, and written one step late so that the host never waits for the device to finish a
step."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.mesh import Mesh
from phalanx.core.records import StepRecord
from phalanx.engine.interface import StepOutcome
from phalanx.system import accelerator
from phalanx.system.accelerator import HostCopy
from phalanx.workload.work_split import WorkSplit

WAIT_S = 1.0  # limit of a commit's wait for the step's passes to be noted, which takes microseconds


@dataclass
class MfuCalculator:
    """Constants of model FLOPs utilization (MFU)."""

    full_flops: int  # model FLOPs of a token
    causal_flops: int
    peak_flops: float | None  # peak FLOP/s of all devices together

    def compute_mfu(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        if self.peak_flops is None:
            return None, None
        return tokens_per_s * self.full_flops / self.peak_flops, tokens_per_s * self.causal_flops / self.peak_flops


def make_mfu_calculator(flops: tuple[int, int] | None, mesh: Mesh, dtype: torch.dtype) -> MfuCalculator:
    """FLOPs of a token (full, causal) and peak FLOP/s of this job; no peak if any rank's device is not in the
    table, or if the FLOPs are unknown."""
    peak = accelerator.peak_flops(accelerator.get_device_name(mesh.device), dtype)
    known, total = mesh.sum([float(peak is not None), peak or 0.0])
    full, causal = flops or (0, 0)
    return MfuCalculator(full, causal, total if known == mesh.world and full else None)


@dataclass
class _PendingStep:
    """A step whose results are still on the device."""

    step: int
    values: HostCopy  # this rank's loss sum
    outcome: StepOutcome
    lr: float
    step_s: float
    data_s: float
    wait_s: float
    comm_bytes: int
    memory_bytes: int
    update_s: float


class StepRecorder:
    """Records the measurements of steps, each returned while the next step runs.

    `positions`: number of input tokens of a full global batch over all ranks. If only answers are trained on, it
    exceeds the number of labels in the loss; speed and utilization refer to all tokens.
    """

    def __init__(
        self,
        mesh: Mesh,
        mfu_calculator: MfuCalculator,
        attempt: int,
        total_tokens: int,
        positions: int,
        work_split: WorkSplit,
    ) -> None:
        self.total_tokens, self._positions, self._work_split = total_tokens, positions, work_split
        self._mesh, self._mfu_calculator, self._attempt = mesh, mfu_calculator, attempt
        self._pending_step: _PendingStep | None = None
        self._step_began = time.perf_counter()
        # For the last two steps: the loss sum, the learning rate, seconds for data, the step's start.
        self._computed: dict[int, tuple[HostCopy, float, float, float]] = {}
        self._changed = threading.Condition()

    def restart_clock(self) -> None:
        """Exclude the time since the last step (an evaluation, a checkpoint) from the next step's time."""
        self._step_began = time.perf_counter()

    def add_step(
        self,
        step: int,
        loss_sum: torch.Tensor,
        outcome: StepOutcome,
        lr: float,
        data_s: float,
        update_s: float = 0.0,
    ) -> None:
        """Add a step that has been queued; its loss sum is on the device. `update_s` is the time spent on updates
        since the last call."""
        assert self._pending_step is None
        now = time.perf_counter()
        traffic = self._mesh.traffic.take()
        wait_s = traffic.wait_s + self._mesh.bookkeeping.take().wait_s
        self.total_tokens += outcome.weight
        self._pending_step = _PendingStep(
            step, HostCopy([loss_sum]), outcome, lr, now - self._step_began, data_s, wait_s,
            traffic.payload_bytes, accelerator.peak_memory(self._mesh.device), update_s,
        )  # fmt: skip
        self._step_began = now
        accelerator.reset_peak_memory(self._mesh.device)

    def add_passes(self, step: int, loss_sum: torch.Tensor, lr: float, data_s: float) -> None:
        """Note that the passes of a step are queued and the previous step's record is written."""
        noted = HostCopy([loss_sum]), lr, data_s, self._step_began
        with self._changed:
            self._computed = {old: each for old, each in self._computed.items() if old == step - 1} | {step: noted}
            self._changed.notify_all()

    def collect_measurements(self, step: int, outcome: StepOutcome) -> dict[str, Any] | None:
        """This rank's measurements of a step being committed, in case its record cannot be written; any thread may
        call it. None if the main thread has not noted the step in time."""
        with self._changed:
            self._changed.wait_for(lambda: max(self._computed, default=0) >= step, WAIT_S)
            if step not in self._computed:
                return None
            values, lr, data_s, begun = self._computed[step]
        norm, skip = outcome.get()
        return {
            "loss": _finite(values.get()[0]),
            "lr": lr,
            "weight": outcome.weight,
            "grad_norm": _finite(norm),
            "skipped": skip != 0.0,
            "loss_scale": outcome.loss_scale,
            "step_s": time.perf_counter() - begun,
            "data_s": data_s,
            "memory_bytes": accelerator.peak_memory(self._mesh.device),
        }

    def rebuild_record(self, step: int, attempt: int, rows: Sequence[Mapping[str, Any]]) -> StepRecord:
        """Rebuild the record of a step that an earlier attempt committed without writing its record, from the
        measurements of its ranks in order (`collect_measurements`). Wait times and communicated bytes are unknown."""
        first, step_s = rows[0], max(float(row["step_s"]) for row in rows)
        losses = [row["loss"] for row in rows]
        tokens_per_s = self._positions * self._work_split.share_of_batch(step) / step_s
        mfu, mfu_causal = self._mfu_calculator.compute_mfu(tokens_per_s)
        return StepRecord(
            step=step,
            attempt=attempt,
            loss=None if None in losses or not first["weight"] else _finite(sum(losses) / first["weight"]),
            grad_norm=first["grad_norm"],
            lr=first["lr"],
            tokens=first["weight"],
            total_tokens=self.total_tokens,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            wait_s=None,
            comm_bytes=0,
            data_s=first["data_s"],
            mfu=mfu,
            mfu_causal=mfu_causal,
            memory_bytes=max(int(row["memory_bytes"]) for row in rows),
            skipped=first["skipped"],
            loss_scale=first["loss_scale"],
        )

    def rank_values(self) -> list[float]:
        """This rank's values for the record of the last step; empty without one."""
        if self._pending_step is None:
            return []
        done = self._pending_step
        return [*done.values.get(), done.step_s, done.wait_s, float(done.memory_bytes)]

    def flush(self, rows: Sequence[Sequence[float]] | None = None) -> StepRecord | None:
        """Return the record of the last step, once. All ranks must call it, since their losses are added up.
        `rows` has the `rank_values` of all ranks in order; by default they are gathered here."""
        if self._pending_step is None:
            return None
        # Losses are added in order of rank, the same everywhere.
        losses, steps_s, waits_s, memories = zip(*(rows or self._gather_rank_values()), strict=True)
        done, self._pending_step = self._pending_step, None
        norm, skip = done.outcome.get()
        weight = done.outcome.weight
        step_s = max(steps_s)
        tokens_per_s = self._positions * self._work_split.share_of_batch(done.step) / step_s
        mfu, mfu_causal = self._mfu_calculator.compute_mfu(tokens_per_s)
        on_host = self._mesh.device.type == "cpu"
        division, busy_s = self._work_split.describe_step(done.step)
        return StepRecord(
            step=done.step,
            attempt=self._attempt,
            loss=_finite(sum(losses) / weight if weight else math.nan),
            grad_norm=_finite(norm),
            lr=done.lr,
            tokens=weight,
            total_tokens=self.total_tokens,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            wait_s=sum(waits_s) / self._mesh.world if on_host else None,
            comm_bytes=done.comm_bytes,
            data_s=done.data_s,
            mfu=mfu,
            mfu_causal=mfu_causal,
            memory_bytes=int(max(memories)),
            skipped=skip != 0.0,
            **({} if division is None else division.to_json()),
            busy_s=busy_s,
            loss_scale=done.outcome.loss_scale,
            update_s=done.update_s if on_host else None,
        )

    def _gather_rank_values(self) -> list[list[float]]:
        """Gather the `rank_values` of all ranks, in order of rank."""
        mine = self.rank_values()
        table = [0.0] * (len(mine) * self._mesh.world)
        table[len(mine) * self._mesh.rank : len(mine) * (self._mesh.rank + 1)] = mine
        summed = self._mesh.sum(table)
        return [summed[first : first + len(mine)] for first in range(0, len(summed), len(mine))]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
