"""What the trainer writes down of a step: summed in rank order, a step late, with what cannot be known left out."""

import dataclasses
import math
import time

import pytest
import torch

from phalanx.comm.mesh import Mesh, join
from phalanx.core.placement import Placement
from phalanx.engine.interface import DeviceStepOutcome
from phalanx.layout.balance import Speed, cut_into_micro_batches
from phalanx.system.accelerator import HostCopy
from phalanx.trainer.metrics import MfuCalculator as Flops
from phalanx.trainer.metrics import StepRecorder
from phalanx.workload.work_split import WorkSplit

ALONE = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device="cpu", store=None)


def alone(mesh: Mesh) -> WorkSplit:
    return WorkSplit("auto", 8, [Speed(1.0)], mesh)


def results(loss: float, weight: int, norm: float = 1.0, skip: float = 0.0) -> tuple[torch.Tensor, DeviceStepOutcome]:
    return torch.tensor(loss), DeviceStepOutcome(torch.tensor(norm), torch.tensor(skip), weight)


def test_a_record_is_handed_out_once_and_late() -> None:
    with join(ALONE, 10) as mesh:
        recorder = StepRecorder(mesh, Flops(600, 400, None), 2, total_tokens=1000, positions=16, work_split=alone(mesh))
        assert recorder.flush() is None
        recorder.add_step(7, *results(30.0, 10, 2.5), 1e-3, 0.25)
        record = recorder.flush()
        assert record is not None
        assert recorder.flush() is None
    found = dataclasses.asdict(record)
    expected = {"step": 7, "attempt": 2, "loss": 3.0, "grad_norm": 2.5, "lr": 1e-3, "tokens": 10, "total_tokens": 1010,
                "comm_bytes": 0, "data_s": 0.25, "mfu": None, "mfu_causal": None, "skipped": False}  # fmt: skip
    assert found | expected == found
    assert record.tokens_per_s == pytest.approx(16 / record.step_s)
    assert record.memory_bytes > 1 << 20


@pytest.mark.parametrize(("loss", "weight"), [(math.nan, 10), (math.inf, 10), (0.0, 0)])
def test_what_is_no_number_is_none(loss: float, weight: int) -> None:
    with join(ALONE, 10) as mesh:
        recorder = StepRecorder(
            mesh, Flops(6, 6, None), attempt=1, total_tokens=0, positions=10, work_split=alone(mesh)
        )
        recorder.add_step(1, *results(loss, weight, math.nan, 1.0), 1e-3, 0.0)
        record = recorder.flush()
    assert record is not None
    assert (record.loss, record.grad_norm, record.skipped) == (None, None, True)


def test_time_between_steps_is_left_out_when_the_clock_is_started_again() -> None:
    with join(ALONE, 10) as mesh:
        recorder = StepRecorder(
            mesh, Flops(6, 6, None), attempt=1, total_tokens=0, positions=10, work_split=alone(mesh)
        )
        time.sleep(0.3)
        begun = time.perf_counter()
        recorder.restart_clock()
        recorder.add_step(1, *results(1.0, 1), 1e-3, 0.0)
        record = recorder.flush()
    assert record is not None
    assert record.step_s <= time.perf_counter() - begun


def test_mfu_is_what_the_model_needs_of_what_the_devices_can() -> None:
    assert Flops(600, 450, 1e6).compute_mfu(1000) == (0.6, 0.45)
    assert Flops(600, 450, None).compute_mfu(1000) == (None, None)


def test_a_host_copy_is_of_that_moment() -> None:
    value = torch.tensor([1.5], requires_grad=True)
    copy = HostCopy([value, torch.tensor(2, dtype=torch.int64)])
    with torch.no_grad():
        value.mul_(10)
    assert copy.get() == [1.5, 2.0]


def test_very_many_ranks_are_named_now_and_then_and_whenever_their_shares_change() -> None:
    with join(ALONE, 10) as mesh:
        sharing = WorkSplit("even", 130, [Speed(1.0)] * 65, dataclasses.replace(mesh, world=65))
        named = []
        for step in range(1, 130):
            sharing.exchange(step, 0, 1.0)
            sharing.settle()
            if sharing.describe_step(step)[0] is not None:
                named.append(step)
            if step == 70:
                sharing.division = cut_into_micro_batches([66] + [1] * 64, sharing.micro_batch_limits)
    assert named == [1, 64, 71, 128]
