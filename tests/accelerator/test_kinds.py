"""Ranks start on any kind of accelerator: with collectives of its own or without, sharing a device, beside a CPU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.api.fsdp.clip_norm import _norm
from phalanx.api.shard import sync_initial_values
from phalanx.comm import backend
from phalanx.comm.collectives import device_for_group
from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import attention
from phalanx.system import accelerator
from phalanx.trainer.setup import find_kernel_differences
from tests.accelerator.curves import References, assert_near, on_device, paired
from tests.accelerator.device import needs_device, run_on_device
from tests.helpers import ALL
from tests.numerics import runs

pytestmark = needs_device
FEW = {"train__steps": 4, "optim__decay_steps": 4, "train__micro_batch": 4}
ALONE = FEW | {"parallel__engine": "single"}
SHARDED = FEW | {"parallel__engine": "sharded"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": SHARDED | {"parallel__zero": 1, "balance__optimizer_state": [3, 1]},
    "zero 3": SHARDED | {"parallel__zero": 3},
    "two copies": SHARDED | {"parallel__shard_degree": 1},
    "fsdp2": FEW | {"parallel__engine": "fsdp2"},
    "tensor": SHARDED | {"parallel__tensor": 2},
    "pipeline": SHARDED | {"parallel__pipeline": 2},
}
PLACES: dict[str, dict[str, Any]] = {
    "no collectives": {"collectives": False},
    "a device and the CPU": {"on": ["sim:0", "cpu"]},
    "one device": {"on": ["sim:0", "sim:0"], "devices": 1},
    "the second device alone": {"on": ["cpu", "sim:1"]},
}


def _is_allowed(places: str, layout: str) -> bool:
    return layout != "two copies" or "cpu" not in PLACES[places].get("on", [])  # unlike kinds have one copy


def backends(placement: Placement) -> list[str]:
    """What a rank offers, before and after other backends are registered, and what is torch's own default."""
    device = torch.device(placement.device)
    backend.register("another")
    return [accelerator.backend_string(device), dist.Backend.default_device_backend_map.get("sim", "none")]


def test_a_kind_of_device_without_collectives_uses_those_of_the_host() -> None:
    assert run_on_device(backends, collectives=False) == [["gloo", "none"]]
    assert run_on_device(backends) == [["cpu:gloo,sim:simccl", "simccl"]]


def slices(placement: Placement) -> list[str]:
    """The groups of four ranks on slices of GPUs: of all, of neighbours, and of every second one."""
    device = torch.device(placement.device)
    torch.accelerator.set_device_index(device.index)
    with join(placement, 20, axes=MeshAxes(tensor=2)) as mesh:
        assert mesh.tensor is not None
        groups = [mesh.transfers, mesh.tensor.group, mesh.data.transfers]
        return [str(dist.get_backend(group)) for group in groups]


def test_slices_of_one_gpu_have_the_groups_of_the_host() -> None:
    """NCCL finds the GPU that slices are of twice, and refuses that, though each slice has a mark of its own."""
    whole = "cpu:gloo,sim:simccl"
    assert run_on_device(slices, 4, order="threads", slices=2) == [["gloo", "gloo", whole]] * 4
    assert run_on_device(slices, 4, order="threads", slices=1) == [[whole, whole, whole]] * 4


def kernels(placement: Placement, having: list[int]) -> list[str]:
    """What is said of the kernels of ranks, of which those `having` one find it."""
    attention._tried = lambda device, dtype, head_dim: (  # type: ignore[assignment]
        placement.rank in having and (dtype, head_dim) == (torch.bfloat16, 64)
    )
    spec = ModelSpec(
        vocab_size=8, hidden=128, layers=1, heads=2, kv_heads=2, head_dim=64, intermediate=8, max_seq_len=8
    )
    with join(placement, 20) as mesh:
        return find_kernel_differences(mesh, "bf16", spec)


def test_ranks_that_find_other_kernels_on_the_same_device_are_named() -> None:
    every = {"order": "lazy", "collectives": False}
    assert run_on_device(kernels, 3, having=[0, 1, 2], **every) == run_on_device(kernels, 3, having=[], **every)
    for said in run_on_device(kernels, 3, having=[1], **every):
        (sentence,) = said
        assert sentence.startswith("ranks 0, 2 found no attention kernel")
        assert "but rank 1 did on the same" in sentence
    assert run_on_device(kernels, 2, having=[0], on=["sim:0", "cpu"], **every) == [[], []]  # unlike devices may differ


def sent_from(placement: Placement) -> list[str]:
    """Where a tensor of the device, and one of the host, must lie to be sent by a script's own calls."""
    with join(placement, 20) as mesh:
        return [device_for_group(mesh.transfers, torch.device(kind)).type for kind in (placement.device, "cpu")]


def begun_alike(placement: Placement) -> list[Any]:
    """What ranks have of a model whose values were unlike, and the norms that each is told of another tensor."""
    device = torch.device(placement.device)
    with join(placement, 20) as mesh:
        torch.manual_seed(mesh.rank)
        model = torch.nn.Linear(3, 2).to(device)
        sync_initial_values(model, mesh, {})
        ours = torch.full((2,), 3.0 + mesh.rank, device=device)
        norms = [_norm([(ours, 1)], mesh.transfers, kind).item() for kind in (2.0, math.inf)]
        return [model.weight.tolist(), norms]


@pytest.mark.parametrize("places", PLACES)
def test_a_script_of_ones_own_begins_alike_and_has_one_norm(places: str) -> None:
    first, second = run_on_device(begun_alike, 2, **PLACES[places])
    assert first == second
    assert first[1] == pytest.approx([50**0.5, 4.0])


def test_tensors_are_sent_from_where_their_group_takes_them() -> None:
    assert run_on_device(sent_from, collectives=False) == [["cpu", "cpu"]]
    assert run_on_device(sent_from) == [["sim", "cpu"]]


@pytest.mark.skipif(not ALL, reason="the matrix has each of these: make test-all")
@pytest.mark.parametrize(
    ("places", "layout"),
    [each for each in paired(PLACES, LAYOUTS) if _is_allowed(*each)],
)
def test_ranks_whose_groups_are_those_of_the_host(
    places: str, layout: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    found = on_device(2, tmp_path, tokens, {"order": "lazy"} | PLACES[places], **LAYOUTS[layout])
    assert_near(found, references.of(1, *ALONE.items()), 2e-7)
    said = [
        each["message"]
        for each in runs.events(tmp_path, EventKind.WARNING)
        if "share one accelerator" in each["message"]
    ]
    assert [message[:11] for message in said] == (["ranks 0, 1 "] if places == "one device" else [])


WIDE = {"model__hidden": 256, "model__intermediate": 512, "train__micro_batch": 1, "train__steps": 3}


def test_a_device_of_less_memory_holds_less_of_the_state(references: References, tokens: Path, tmp_path: Path) -> None:
    """In equal parts it does not fit."""
    how = {"order": "threads", "devices": 2, "memory_mb": [64, 19]}
    found = on_device(2, tmp_path / "auto", tokens, how, **SHARDED | WIDE)
    assert_near(found, references.of(1, *(ALONE | WIDE).items()), 2e-7)
    (chosen,) = [
        each
        for each in runs.events(tmp_path / "auto", EventKind.AUTO_RESOLVED)
        if each["key"] == "balance.optimizer_state"
    ]
    assert chosen["value"][0] > 2 * chosen["value"][1]
    with pytest.raises(AssertionError, match="memory"):
        on_device(2, tmp_path / "even", tokens, how, **SHARDED | WIDE, balance__optimizer_state="even")
