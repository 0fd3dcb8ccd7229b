"""Tensor parallelism: ranks that share every layer walk the trajectory of one, and exchange what theory says."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.placement import Placement
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights
from phalanx.models.llama import Llama
from phalanx.parallel import parallelize
from phalanx.parallel.init_weights import make_hf_fill, materialize
from phalanx.parallel.model_part import fill_by_runs
from phalanx.parallel.tensor import apply_tensor_parallel, make_tensor_context
from tests import helpers
from tests.dist.tensor_cases import (
    GLOBAL_BATCH,
    SEQ_LEN,
    among,
    data,
    driven,
    gradients_apart,
    greatest,
    loss_of,
    spec_of,
    taken,
    values,
    whole,
)
from tests.helpers import cover, run_ranks, some

ALL = slice(0, GLOBAL_BATCH)
QWEN2 = {"architecture": "qwen2", "tie_embeddings": True, "vocab_size": 59}
QWEN3 = {"architecture": "qwen3", "head_dim": 12}
MISTRAL = {"architecture": "mistral", "sliding_window": 5, "full_attention_layers": [1]}
# In fp32 and among more ranks than key heads; all families in fp64 on two ranks: test_families.py.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": QWEN2,
    "qwen3 tied": QWEN3 | {"tie_embeddings": True},
    "mistral": MISTRAL,
    "olmo2": {"architecture": "olmo2"},
}


# --------------------------------------------------------------------------------------------------------- whole curves


def walked(placement: Placement, tensor: int, cases: list[dict[str, Any]], steps: int) -> list[float]:
    found = []
    with among(placement, tensor) as mesh:
        for case in cases:
            spec = spec_of(case.pop("spec", {}))
            mine = driven(mesh, spec, **case)
            mine.walk(steps)
            with whole(mesh, spec) as other:
                other.walk(steps)
                found.append(mine.apart(other))
                other.engine.close()
            mine.engine.close()
    return found


@pytest.mark.parametrize(
    ("world", "tensor", "cases"),
    some(
        [
            (2, 2, [{"zero": 0, "sequence": False}, {"zero": 0, "sequence": True}]),
            (4, 4, [{"zero": 0, "sequence": False}, {"zero": 0, "sequence": True}]),
            (
                4,
                2,
                [
                    {"zero": 1, "sequence": True},
                    {"zero": 2, "sequence": True, "slots": 2, "spec": QWEN2},
                    {"zero": 3, "sequence": False},
                ],
            ),
        ],
        1,
        2,
    ),
    ids=some(["TP2", "TP4 with 2 key heads", "TP2 x shard 2"], 1, 2),
)
def test_steps_are_those_of_one_process(world: int, tensor: int, cases: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(run_ranks(walked, world, 120, tensor=tensor, cases=cases, steps=2)):
        for case, apart in zip(cases, found, strict=True):
            assert apart < 1e-8, (rank, case, apart)


def test_recomputing_and_offloading_change_nothing() -> None:
    cases = [
        {"zero": 0, "sequence": sequence, "memory": memory, "spec": {"layers": 3}}
        for memory, sequence in cover(("full", "selective", "offload"), (False, True))
    ]
    for found in run_ranks(walked, 2, 120, tensor=2, cases=cases, steps=1):
        assert max(found) < 1e-9, found


# ------------------------------------------------------------------------------------------------------ first gradients


def first_gradients(placement: Placement, cases: list[tuple[str, bool]]) -> dict[str, list[float]]:
    """Of kinds of models, with `sequence` or without: how far loss, gradients and logits are apart."""
    found = {}
    with among(placement, placement.world) as mesh:
        for name, sequence in cases:
            spec = spec_of(KINDS[name])
            packed = name == "mistral"
            other, mine = (values(spec, torch.float32) for _ in range(2))
            held = apply_tensor_parallel(mine, make_tensor_context(mesh, spec.kv_heads, sequence))
            losses = [loss_of(model, 1, ALL, packed) for model in (mine, other)]
            for loss in losses:
                loss.backward()
            tokens = data(2, spec)[0]["tokens"]
            with torch.no_grad():
                apart_logits = greatest(mine(tokens) - other(tokens))
            apart_loss = abs(losses[0].item() / losses[1].item() - 1)
            found[f"{name}, {sequence=}"] = [gradients_apart(mine, other, held), apart_loss, apart_logits]
    return found


@pytest.mark.parametrize("world", some([2, 4], 1))
def test_first_gradients_are_those_of_one_process(world: int) -> None:
    cases = cover(KINDS, (True, False))
    for found in run_ranks(first_gradients, world, 120, cases=cases):
        assert len(found) == len(cases) >= len(KINDS)
        for case, (apart, loss, logits) in found.items():
            assert apart < 1e-6, (case, apart)
            assert loss < 1e-6, (case, loss)
            assert logits < 1e-5, (case, logits)


def backward_of_logits(placement: Placement) -> float:
    """A loss of one's own on the whole logits."""
    spec = spec_of({"dropout": 0.0})
    with among(placement, placement.world) as mesh:
        mine, other = values(spec, torch.float64), values(spec, torch.float64)
        held = apply_tensor_parallel(mine, make_tensor_context(mesh, spec.kv_heads, False))
        tokens = data(1, spec)[0]["tokens"]
        for model in (mine, other):
            (model(tokens).tanh() ** 2).sum().backward()
        return gradients_apart(mine, other, held)


def test_a_loss_of_ones_own_on_the_logits_has_the_same_gradient() -> None:
    assert max(run_ranks(backward_of_logits, 2)) < 1e-12


def compiled(placement: Placement) -> float:
    spec = spec_of({"layers": 1})
    with among(placement, placement.world) as mesh:
        mine, other = values(spec, torch.float32), values(spec, torch.float32)
        held = apply_tensor_parallel(mine, make_tensor_context(mesh, spec.kv_heads, True))
        if not helpers.ALL:  # inductor takes ten times longer
            torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
        parallelize.compile_units(mine, mine.blocks())
        for model in (mine, other):
            loss_of(model, 1, ALL).backward()
        return gradients_apart(mine, other, held)


def test_compiled_blocks_exchange_just_the_same() -> None:
    assert max(run_ranks(compiled, 2, 240)) < 1e-5


# -------------------------------------------------------------------------------------------------------------- traffic


def counted(placement: Placement, ways: list[tuple[bool, str]]) -> list[list[list[int]]]:
    """Calls and bytes of one block's forward and backward pass, and those of all else, in float64, each way."""
    found = []
    with among(placement, placement.world) as mesh:
        for (sequence, memory), layers in itertools.product(ways, (1, 2)):
            spec = spec_of({"layers": layers})
            mine = driven(mesh, spec, 0, sequence, memory)
            mesh.traffic.take()
            loss = loss_of(mine.model, 1, ALL)
            forward = mesh.traffic.take()
            loss.backward()
            backward = mesh.traffic.take()
            found.append([forward.calls, forward.payload_bytes, backward.calls, backward.payload_bytes])
    return [
        [[b - a for a, b in zip(one, two, strict=True)], [2 * a - b for a, b in zip(one, two, strict=True)]]
        for one, two in zip(found[::2], found[1::2], strict=True)
    ]


# Whether along the sequence, and the memory of activations: calls in a backward pass, and when it computes again.
CALLS = {
    (False, "none"): (2, 0), (True, "none"): (4, 0), (False, "selective"): (2, 0), (True, "selective"): (4, 2),
    (False, "full"): (2, 2), (True, "full"): (4, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def traffic() -> list[list[list[list[int]]]]:
    """By rank and way."""
    return run_ranks(counted, 2, ways=list(CALLS))


@pytest.mark.parametrize("way", CALLS)
def test_a_block_exchanges_what_theory_says(way: tuple[bool, str], traffic: list[list[list[list[int]]]]) -> None:
    (sequence, _), (backward_calls, again) = way, CALLS[way]
    activations = GLOBAL_BATCH * SEQ_LEN * 32 * 8
    norms = 2 if sequence else 0  # whose gradients are parts of a sum, too: 32 numbers each
    chunk = GLOBAL_BATCH * SEQ_LEN * 3 * 2 * 8  # three numbers for each token and rank
    for of_rank in traffic:
        block, rest = of_rank[list(CALLS).index(way)]
        forward_calls = 4 if sequence else 2
        assert block[:2] == [forward_calls, forward_calls * activations]
        calls = backward_calls + norms + again
        assert block[2:] == [calls, (backward_calls + again) * activations + norms * 32 * 8]
        # The embedding leaves, the head enters (which carries nothing forward without `sequence`), and the loss.
        assert rest[:2] == [2 + sequence, (1 + sequence) * activations + chunk]
        assert rest[2:] == [1 + 2 * sequence, (1 + sequence) * activations + sequence * 32 * 8]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def save_walked(placement: Placement, folder: str) -> float:
    """Two ways of cutting: over four ranks two steps, saved; then loaded, and two steps more beside one process."""
    with among(placement, 2) as mesh:
        mine = driven(mesh, spec_of(QWEN2), zero=2, sequence=True)
        mine.walk(2)
        mine.save(Path(folder))
        with whole(mesh, spec_of(QWEN2)) as other:
            other.walk(2)
            apart = mine.apart(other)
        mine.engine.close()
        return apart


def load_and_save(placement: Placement, source: str, target: str, tensor: int, zero: int) -> int:
    """What another division reads, and saves again."""
    with among(placement, tensor) as mesh:
        mine = driven(mesh, spec_of(QWEN2), zero=zero, sequence=tensor > 1, seed=77)
        mine.load(Path(source))
        mine.save(Path(target))
        mine.engine.close()
    return 0


def test_what_four_ranks_saved_is_read_by_any_others_and_back(tmp_path: Path) -> None:
    from tests.numerics.runs import same_bits, state

    assert max(run_ranks(save_walked, 4, 120, folder=tmp_path / "cut" / "checkpoints")) < 1e-8
    first = state(tmp_path / "cut")
    assert sum(tensor.numel() for tensor in first.values()) > 50_000
    ways = [("three", 3, 1, 3), ("four", 4, 4, 0), ("one", 1, 1, 0), ("again", 4, 2, 1)]
    source = "cut"
    for name, world, tensor, zero in some(ways, 0, 1):
        folders = {"source": tmp_path / source / "checkpoints", "target": tmp_path / name / "checkpoints"}
        run_ranks(load_and_save, world, 120, **folders, tensor=tensor, zero=zero)
        assert same_bits(state(tmp_path / name), first), name
        source = name


def read_folder(placement: Placement, folder: str) -> list[str]:
    """Names of parameters that are not their slices of the folder's."""
    spec = spec_of(QWEN3)
    wrong = []
    with among(placement, placement.world) as mesh:
        mine = driven(mesh, spec, 0, sequence=False, seed=77)
        weights = Weights(Path(folder))
        materialize(mine.model, mine.engine, fill_by_runs(make_hf_fill(weights, spec), mine.held))
        original = values(spec, torch.float32)
        for name, parameter in original.named_parameters():
            part = taken(parameter.detach(), mine.held.get(name))
            if not torch.equal(mine.model.get_parameter(name).detach().float(), part):
                wrong.append(name)
    return wrong


def test_a_hugging_face_folder_is_read_by_slices(tmp_path: Path) -> None:
    spec = spec_of(QWEN3)
    model: Llama = values(spec, torch.float32)
    export(tmp_path / "hf", spec, model.get_parameter, torch.float32)
    assert run_ranks(read_folder, 4, folder=tmp_path / "hf") == [[]] * 4
