"""Checks of collectives over all ranks, by the device backend and through the host: values and speed."""

import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.collectives import Traffic, all_gather, all_reduce, reduce_scatter
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.p2p import P2PChannel
from phalanx.core import placement
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.doctor.machine_checks import append_log_tail
from phalanx.doctor.results import CheckResult, CheckState
from phalanx.elastic.node import agent
from phalanx.elastic.node.worker import NodeJob
from phalanx.report import event_text
from phalanx.system import accelerator

TIMEOUT_S = 60.0  # of a collective
PARTS = (1, 1000, 2**16)  # elements of each rank's part of a tensor
ROUNDS = 3
TIMED_BYTES, TIMED_BYTES_ON_HOST = 2**24, 2**22
OWN, THROUGH_HOST = "own", "host"
REMEDIES = {
    OWN: "read the output of NCCL_DEBUG=INFO, and try NCCL_P2P_DISABLE=1, then also NCCL_SHM_DISABLE=1",
    THROUGH_HOST: "check the host's memory (`phalanx health --deep`) and loopback packet filters",
}
NAMES = {OWN: "collectives", THROUGH_HOST: "collectives-host"}


def check_collectives(folder: Path, devices: Sequence[str]) -> list[CheckResult]:
    """Run collectives and messages between all ranks, one for each of `devices`."""
    if len(devices) == 1:
        return [CheckResult("collectives", CheckState.SKIPPED, "there is only one device, so there is nothing to test")]
    died: list[str] = []

    def note(kind: str, details: dict[str, Any]) -> None:
        if kind == EventKind.WORKER_DIED:
            died.append(event_text.describe_event({"kind": kind, **details}))

    folder.mkdir()
    job = NodeJob(
        world=len(devices),
        worker=functools.partial(_rank, folder),
        paths=RunPaths(folder),
        devices=list(devices),
        on_event=note,
        grace_s=1.0,
    )
    code = agent.run_local_job(job)
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    failed = "" if code == ExitCode.DONE else "; ".join(died) or f"exit code {code}"
    if failed:
        for log in sorted(folder.glob("logs/*/*.log")):
            append_log_tail(log)
    return judge_collectives(rows, len(devices), failed)


def judge_collectives(rows: Sequence[dict[str, Any]], world: int, failed: str) -> list[CheckResult]:
    """Judge the ranks' results; `failed` is the error, or empty."""
    if failed:
        text = f"{world} ranks could not communicate ({failed}); {REMEDIES[OWN]}"
        return [CheckResult("collectives", CheckState.WRONG, text)]
    lines, rates = [], {}
    for way in (OWN, THROUGH_HOST):
        told = [row[way] for row in rows if way in row]
        if not told:
            continue
        wrong = sorted({what for each in told for what in each["wrong"]})
        rates[way] = min(each["bytes_per_s"] for each in told)
        backend = told[0]["backend"]
        if wrong:
            text = f"{world} ranks received wrong values over {backend}, in {', '.join(wrong)}"
            lines.append(CheckResult(NAMES[way], CheckState.WRONG, f"{text}; {REMEDIES[way]}"))
            continue
        text = f"{world} collectives of {world} ranks over {backend} are exact ({rates[way] / 1e9:.3g} GB/s reduced)"
        lines.append(CheckResult(NAMES[way], CheckState.OK, text, rates[way]))
    if rates.get(OWN, 0.0) < rates.get(THROUGH_HOST, 0.0) and OWN in rates:
        text = "device collectives are slower than collectives through host memory; NCCL_DEBUG=INFO shows which path "
        lines.append(
            CheckResult(
                "collectives speed", CheckState.SLOW, f"{text}they take, and `nvidia-smi topo -m` which paths exist"
            )
        )
    return lines


def _rank(folder: Path, placement: Placement) -> int:
    device = torch.device(placement.device)
    accelerator.set_device(device, accelerator.threads_per_rank(placement.threads, placement.local_world))
    found: dict[str, Any] = {}
    with join(placement, TIMEOUT_S) as mesh:
        for way, group in _groups(mesh):
            found[way] = {
                "backend": str(dist.get_backend(group)),
                "wrong": sorted(_wrong_operations(mesh, group)),
                "bytes_per_s": _rate(mesh, group),
            }
    write_atomic(folder / f"rank-{placement.rank}.json", json.dumps(found))
    return ExitCode.DONE


def _groups(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    if not mesh.devices.on_host and dist.get_backend(mesh.transfers) != "gloo":
        yield OWN, mesh.transfers
    yield THROUGH_HOST, mesh.split(mesh.world, through_host=True)[0]


def _test_values(count: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers whose sums are exact in the dtype, on up to 85 ranks."""
    numbers = torch.arange(count) % 3 + rank % 2 if dtype == torch.bfloat16 else torch.arange(count) % 1021 + 3 * rank
    return numbers.to(dtype)


def _wrong_operations(mesh: Mesh, group: dist.ProcessGroup) -> set[str]:
    """The operations with wrong values."""
    wrong = set()
    for dtype in (torch.float32, torch.bfloat16):
        for part in PARTS:
            count = part * mesh.world
            everyone = [_test_values(count, rank, dtype) for rank in range(mesh.world)]
            total = torch.stack([each.double() for each in everyone]).sum(0)
            mine, own = everyone[mesh.rank], slice(mesh.rank * part, (mesh.rank + 1) * part)
            for _ in range(ROUNDS):
                # Computed by the device immediately before, so that sending too early changes the values.
                summed = mine.to(mesh.device) * 2 - mine.to(mesh.device)
                gathered, shard = torch.empty_like(summed), torch.empty_like(summed[own])
                scattered = summed.clone()
                pending = [
                    all_gather(gathered, summed[own].clone(), group, Traffic()),
                    reduce_scatter(shard, scattered, group, Traffic()),
                    all_reduce(summed, group, Traffic()),
                ]
                for each in pending:
                    each.wait()
                expected = torch.cat([each[r * part : (r + 1) * part] for r, each in enumerate(everyone)])
                for name, result, right in (
                    ("all-gather", gathered, expected.double()),
                    ("reduce-scatter", shard, total[own]),
                    ("all-reduce", summed, total),
                ):
                    if not torch.equal(result.cpu().double(), right):
                        wrong.add(f"{name} of {str(dtype).removeprefix('torch.')}")
    return wrong | _wrong_messages(mesh, group)


def _wrong_messages(mesh: Mesh, group: dist.ProcessGroup) -> set[str]:
    letters, wrong = P2PChannel(group, mesh.device, Traffic(), max_in_flight=1), set()
    for other in placement.round_robin_partners(mesh.rank, mesh.world):
        if other is not None:
            mine, theirs = (_test_values(PARTS[-1], rank, torch.float32) for rank in (mesh.rank, other))
            got = letters.exchange(mine.to(mesh.device), other)
            if not torch.equal(got.cpu(), theirs):
                wrong.add(f"messages between {min(mesh.rank, other)} and {max(mesh.rank, other)}")
    letters.close()
    return wrong


def _rate(mesh: Mesh, group: dist.ProcessGroup) -> float:
    """Bytes per second of an all-reduce over all ranks."""
    tensor = torch.zeros(
        TIMED_BYTES_ON_HOST if mesh.devices.on_host else TIMED_BYTES, dtype=torch.uint8, device=mesh.device
    ).view(torch.float32)
    best_s = float("inf")
    for _ in range(ROUNDS):
        mesh.sum([0.0])  # all begin together
        begun = time.perf_counter()
        all_reduce(tensor, group, Traffic()).wait()
        accelerator.synchronize(mesh.device)
        best_s = min(best_s, time.perf_counter() - begun)
    return tensor.nbytes / best_s
