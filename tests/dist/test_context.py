"""Context parallelism: attention has the results and gradients of one process, and sends the bytes of the formula."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.layout.context_exchange import AttentionShape, count_exchanged_elements
from phalanx.layout.context_slices import count_keys_received, slice_by_work, slice_in_pairs
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.models.attention import ScoreDropout
from phalanx.models.counter_rng import CounterRNG
from phalanx.parallel.context import ContextParallel, ContextRows, positions_of, reference_context_attention
from phalanx.planner.layer_exchanges import context_bytes
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork
from tests.helpers import run_ranks

LENGTH, ROWS, HEADS, KV_HEADS, WIDTH = 24, 2, 4, 2, 8
DOCUMENTS = [[0, 5, 6, 17, 24], [0, 14, 24]]


def make_case(
    case: dict[str, Any], rank: int, device: torch.device | str = "cpu"
) -> tuple[ContextRows, dict[str, Any], tuple[Tensor, ...]]:
    """Slices, options of attention, and whole q, k, v and the gradient of the result."""
    length, kv_heads = case.get("length", LENGTH), case.get("kv_heads", KV_HEADS)
    documents = DOCUMENTS if case.get("packed") else None
    shares = tuple(case["shares"])
    slices = slice_in_pairs(length, shares)
    segments = None
    if documents is not None:
        slices = slice_by_work(documents, 4.0, shares, None)
        flat = [begin + LENGTH * number for number, row in enumerate(documents) for begin in row[:-1]]
        segments = torch.tensor([*flat, ROWS * LENGTH], dtype=torch.int32, device=device)
    torch.manual_seed(5)
    dtype = getattr(torch, case.get("dtype", "float64"))
    shapes = [(ROWS, heads, length, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    tensors = tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    options: dict[str, Any] = {"window": case.get("window"), "cap": case.get("cap", 0.0), "dropout": None}
    if case.get("dropout"):
        draws = CounterRNG(seed=3, step=2, samples=torch.tensor([11, 12]))
        options["dropout"] = ScoreDropout(draws, torch.tensor(4), 0, 0.3)
    return ContextRows(slices, rank, ROWS, documents, segments), options, tensors


def differences(placement: Placement, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Of each case the greatest errors of the result and of the gradients, and the bytes that this rank has sent."""
    found = []
    with join(placement, 60, axes=MeshAxes(context=placement.world)) as mesh:
        assert mesh.context is not None
        for case in cases:
            rows, options, (q, k, v, grad) = make_case(case, placement.rank)
            context = ContextParallel(mesh.context, mesh.traffic, case["by"], case["shares"])
            mine = positions_of(rows.slices, placement.rank)
            expected = one_process(rows, options, (q, k, v, grad))
            parts = [each[:, :, mine].clone().requires_grad_() for each in (q, k, v)]
            mesh.traffic.take()
            got = context.attend(parts[0], parts[1], parts[2], segments=rows, **options)
            forward = mesh.traffic.take().payload_bytes
            (got * grad[:, :, mine]).sum().backward()
            backward = mesh.traffic.take().payload_bytes
            apart = {"out": greatest(got - expected[0])}
            for name, part, wanted in zip("qkv", parts, expected[1:], strict=True):
                assert part.grad is not None
                apart[name] = greatest(part.grad - wanted)
            found.append(apart | {"forward": forward, "backward": backward})
    return found


def one_process(rows: ContextRows, options: dict[str, Any], whole: tuple[Tensor, ...]) -> list[Tensor]:
    """A rank's part of the result and of the gradients of q, k and v, of attention in one process."""
    q, k, v, grad = whole
    every = ContextRows(slice_in_pairs(rows.slices.length, (1.0,)), 0, ROWS, rows.documents, rows.segments)
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    out = reference_context_attention(inputs[0], inputs[1], inputs[2], every, **options)
    mine = positions_of(rows.slices, rows.rank)
    found = (out.detach(), *torch.autograd.grad((out * grad).sum(), inputs))
    return [each[:, :, mine] for each in found]


def greatest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


KINDS: list[dict[str, Any]] = [
    {},
    {"packed": True},
    {"window": 5},
    {"window": 5, "packed": True},
    {"cap": 2.0},
    {"dropout": True},
    {"dropout": True, "packed": True, "window": 7},
    {"length": 25, "kv_heads": 4},
]
SPLITS = {2: [[1.0, 1.0], [3.0, 1.0]], 3: [[5.0, 2.0, 1.0], [1.0, 0.0, 1.0]]}


@cache
def found_on(world: int) -> tuple[list[dict[str, Any]], list[list[dict[str, float]]]]:
    """All cases, and what each rank finds of each."""
    cases = [
        kind | {"shares": shares, "by": by}
        for kind in KINDS
        for shares in SPLITS[world]
        for by in ("gather", "ring", "heads")
    ]
    return cases, run_ranks(differences, world, 240, cases=cases)


@pytest.mark.parametrize("world", [2, 3])
def test_attention_is_that_of_one_process(world: int) -> None:
    cases, everyones = found_on(world)
    for rank, found in enumerate(everyones):
        for case, apart in zip(cases, found, strict=True):
            most = max(apart[name] for name in ("out", "q", "k", "v"))
            # A soft cap and dropout materialize scores either way, of other numbers of queries at a time.
            bitwise = case["by"] == "heads"
            assert most == 0.0 if bitwise else most < 1e-12, (rank, case, apart)


def test_bytes_are_those_of_the_formula() -> None:
    cases, everyones = found_on(3)
    for number, case in enumerate(cases):
        if case.keys() & {"cap", "dropout", "length"}:
            continue
        rows, options, _ = make_case(case, 0)
        slices, sent = rows.slices, [found[number] for found in everyones]
        if case["by"] == "heads":
            shape = AttentionShape(HEADS, KV_HEADS, WIDTH, HEADS * WIDTH)
            wanted = count_exchanged_elements("heads", slices, shape, case["shares"])
            assert sum(each["forward"] for each in sent) == wanted[0] * ROWS * 8
            assert sum(each["backward"] for each in sent) == wanted[1] * ROWS * 8
            continue
        keys = [count_keys_received(slices, rank, rows.documents, options["window"]) for rank in range(3)]
        one = ROWS * KV_HEADS * 2 * WIDTH * 8  # bytes of a key and a value
        assert sum(each["forward"] for each in sent) == sum(keys) * one
        again = 2 if case["by"] == "ring" else 1
        assert sum(each["backward"] for each in sent) == again * sum(keys) * one


def test_a_plan_has_the_bytes_that_a_layer_sends() -> None:
    cases, everyones = found_on(2)
    for number, case in enumerate(cases):
        if case["shares"] != [1.0, 1.0] or case.keys() & {"packed", "cap", "dropout", "length"}:
            continue
        work = StepWork(
            1, HEADS * WIDTH, HEADS, KV_HEADS, ffn=1, vocabulary=8, seq_len=LENGTH, global_batch=ROWS,
            precision="fp64", window=case.get("window", 0), context_by=case["by"],
        )  # fmt: skip
        forward, backward, _ = context_bytes(work, LayoutChoice(context=2))
        sent = [found[number] for found in everyones]
        assert sum(each["forward"] for each in sent) == ROWS * forward
        assert sum(each["backward"] for each in sent) == ROWS * backward
