"""The test of devices: wrong bits and wrong memory are found, slow devices and links are named, a device that does not
answer is named too."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.placement import Placement, round_robin_partners
from phalanx.health import burn_in_report
from phalanx.health.findings import Severity, verdict
from tests.dist.command import phalanx
from tests.helpers import run_ranks

SECONDS = 0.05


def row(rank: int, **changes: Any) -> dict[str, Any]:
    """What a rank of four sound devices writes."""
    sound = {
        "rank": rank, "host": "n1", "device": f"xpu:{rank}", "model": "H100", "products": 9, "wrong": 0, "checksum": 5,
        "off": 1e-3, "tolerance": 1e-2, "flops_per_s": 6e14, "memory_bytes": 2**30, "memory_wrong": 0,
        "copied_bytes_per_s": 1e12, "host_bytes_per_s": 5e10, "all_reduce_bytes_per_s": 3e11,
        "pairs": [(other, 1e11) for other in range(4) if other != rank],
    }  # fmt: skip
    return sound | changes


def judged(*changes: dict[str, Any], wrong: str = "") -> list[tuple[str, str, str | None]]:
    """Findings of four ranks, in which some differ from sound ones, without what was merely measured."""
    rows = [row(rank) for rank in range(4)]
    for change in changes:
        rows[change["rank"]] |= change
    rows = [each for each in rows if not each.get("gone")]
    found = burn_in_report.judge_burn_in(rows, [f"xpu:{rank}" for rank in range(4)], wrong)
    return [(each.check, str(each.severity), each.where) for each in found if each.check != "measured"]


def test_sound_devices() -> None:
    assert judged() == []
    found = burn_in_report.judge_burn_in([row(0)], ["xpu:0"])
    assert [(each.check, each.severity) for each in found] == [("measured", Severity.OK)]
    assert "600 TFLOP/s" in found[0].sentence


@pytest.mark.parametrize(
    ("change", "check", "severity"),
    [
        ({"wrong": 1}, "burn-in", "isolate"),
        ({"off": 0.2}, "burn-in", "isolate"),
        ({"memory_wrong": 3}, "device memory", "isolate"),
        ({"flops_per_s": 4e14}, "compute speed", "watch"),
        ({"copied_bytes_per_s": 5e11}, "memory speed", "watch"),
        ({"host_bytes_per_s": 1e10}, "copy speed", "watch"),
        ({"checksum": 6}, "checksum", "reset"),
    ],
)
def test_what_is_wrong_with_a_device_is_named(change: dict[str, Any], check: str, severity: str) -> None:
    assert judged({"rank": 2} | change) == [(check, severity, "xpu:2")]


def test_a_device_is_compared_with_those_of_its_kind_alone() -> None:
    others = [{"rank": rank, "model": "A10G", "flops_per_s": 6e13, "checksum": 7} for rank in (2, 3)]
    assert judged(*others) == []


def test_a_slow_link_between_two_devices() -> None:
    pairs = [[(other, 1e10 if rank + other == 3 else 1e11) for other in range(4) if other != rank] for rank in range(4)]
    slow = [{"rank": rank, "pairs": found} for rank, found in enumerate(pairs)]
    found = judged(*slow)
    assert {(check, severity) for check, severity, _ in found} == {("link speed", "watch")}
    assert [where for _, _, where in found] == ["xpu:0 on n1 and xpu:3 on n1", "xpu:1 on n1 and xpu:2 on n1"]
    # Links between hosts are slower than those within one, and that is how it should be.
    far = [{"rank": rank, "host": f"n{rank // 2}",
            "pairs": [(other, 1e11 if other // 2 == rank // 2 else 1e9) for other in range(4) if other != rank]}
           for rank in range(4)]  # fmt: skip
    assert judged(*far) == []


def test_a_device_that_does_not_answer() -> None:
    hung = judged({"rank": 1, "memory_wrong": None}, wrong="no answer within 310 s")
    assert hung == [("burn-in", "reset", "xpu:1")]
    assert judged({"rank": 3, "gone": True}, wrong="rank 3 was killed") == [("burn-in", "reset", "xpu:3")]
    # All have computed: what failed was between them.
    assert judged(wrong="rank 0 ended with exit code 1") == [("exchange", "reset", None)]


@given(st.integers(1, 40))
def test_every_pair_meets_once_and_nobody_two_at_a_time(world: int) -> None:
    plans = [round_robin_partners(rank, world) for rank in range(world)]
    for rank, plan in enumerate(plans):
        assert sorted(other for other in plan if other is not None) == [r for r in range(world) if r != rank]
        for turn, other in enumerate(plan):
            assert other is None or plans[other][turn] == rank


# ------------------------------------------------------------------------------------------------------ on real devices


def test_two_ranks_are_tested_and_a_wrong_bit_is_found(tmp_path: Path) -> None:
    run_ranks(_tested, 2, folder=str(tmp_path))
    rows = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [each["wrong"] for each in rows] == [0, 1]
    assert rows[0]["checksum"] == rows[1]["checksum"]
    assert all(each["off"] < each["tolerance"] and each["memory_wrong"] == 0 for each in rows)
    assert all(each["flops_per_s"] > 0 and each["copied_bytes_per_s"] > 0 for each in rows)
    assert [other for other, _ in rows[0]["pairs"]] == [1]
    assert rows[0]["all_reduce_bytes_per_s"] > 0
    found = burn_in_report.judge_burn_in(rows, ["cpu", "cpu"])
    assert verdict(found) == Severity.ISOLATE
    assert "gave different results in 1 of" in found[0].sentence


def _tested(placement: Placement, folder: str) -> None:
    from phalanx.health import burn_in

    burn_in.CHUNK_BYTES = burn_in.COPY_BYTES = 2**24

    def flip(product: Any, number: int) -> None:
        """One bit of one number, on rank 1, in one product."""
        if placement.rank == 1 and number == 1:
            product.view(-1).view(dtype=_int32())[1234] ^= 1

    assert burn_in.run_burn_in(SECONDS, Path(folder), placement, flip) == 0


def _int32() -> Any:
    import torch

    return torch.int32


def test_a_first_product_that_is_wrong_is_found_by_the_host() -> None:
    off, tolerance, wrong = run_ranks(_first_wrong, 1)[0]
    assert off > tolerance
    assert wrong > 0  # and all later ones differ from it


def _first_wrong(placement: Placement) -> list[float]:
    import torch

    from phalanx.health.burn_in import BurnInResult, check_products

    def double(product: Any, number: int) -> None:
        if number == 0:
            product[0, 7] *= 2

    found = check_products(BurnInResult(0, "here", "cpu", "cpu"), torch.device("cpu"), SECONDS, double)
    assert found.off is not None and found.tolerance is not None and found.wrong is not None
    return [found.off, found.tolerance, found.wrong]


def test_the_command(tmp_path: Path) -> None:
    code, out, err = phalanx(tmp_path, "health", "--deep", "--seconds", "0.1", "--json")
    result = json.loads(out)
    assert code in (0, 3), err  # this machine is what it is; its CPU computes right
    measured = [each for each in result["findings"] if each["check"] == "measured"]
    assert measured
    assert all(each["severity"] == "ok" for each in measured)
