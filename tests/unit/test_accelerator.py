"""What is known of a device by its name, and what is asked of it."""

from types import SimpleNamespace

import pytest
import torch

from phalanx.core.placement import Placement
from phalanx.system import accelerator
from tests.helpers import run_ranks


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA B200", 2250),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", None),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA L4", None),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla V100S-PCIE-32GB", None),
        ("Tesla T4", 65),
        ("NVIDIA T400", None),
        ("NVIDIA T400 4GB", None),
        ("cpu", None),
    ],
)
def test_a_peak_is_of_exactly_the_named_device(name: str, tflops: float | None) -> None:
    peak = accelerator.peak_flops(name, torch.float16)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_type_that_the_device_does_not_compute_in_has_no_peak() -> None:
    assert accelerator.peak_flops("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert accelerator.peak_flops("NVIDIA H200", torch.bfloat16) == pytest.approx(989.4e12)


def test_a_cpu_computes_in_bf16() -> None:
    assert accelerator.supports_bf16("cpu")


def test_a_device_is_asked_for_bf16_without_emulation() -> None:
    emulating = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation)
    plain = SimpleNamespace(is_bf16_supported=lambda: True)
    assert not accelerator._says_bf16(emulating)
    assert accelerator._says_bf16(plain)
    assert accelerator._says_bf16(torch.mps), "it knows no such question"


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine")
def test_this_machines_accelerators_answer() -> None:
    assert all(isinstance(accelerator.supports_bf16(device), bool) for device in accelerator.list_devices())


def test_the_best_type_is_narrow_on_accelerators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.best_dtype(torch.device("cpu")) == torch.float32
    for has, best in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(accelerator, "supports_bf16", lambda device, has=has: has)
        assert accelerator.best_dtype(torch.device("meta")) == best


def threads(placement: Placement) -> int:
    return placement.threads


def test_the_user_may_say_how_many_threads_a_rank_has() -> None:
    assert run_ranks(threads, 2) == [1, 1]  # OMP_NUM_THREADS, as the ranks of the tests have it
    assert accelerator.threads_per_rank(3, 2) == 3
    assert accelerator.threads_per_rank(0, 1) == accelerator.host_cores()
    assert accelerator.threads_per_rank(0, 10**6) == 1


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch was built with NCCL")
def test_collectives_that_torch_was_built_without_are_not_used() -> None:
    assert accelerator.backend_string(torch.device("cuda", 0)) == "gloo"


def test_a_slice_of_a_gpu_is_spelt_as_its_driver_does() -> None:
    assert accelerator.format_uuid("7c-1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb") == "MIG-7c-1"
    assert accelerator.format_uuid("MIG-7c-1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb") == "MIG-7c-1"
    assert accelerator.format_uuid("7c-1", "NVIDIA A100-SXM4-40GB") == "GPU-7c-1"
    assert accelerator.format_uuid("", "NVIDIA A100-SXM4-40GB") == ""
