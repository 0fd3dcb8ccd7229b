"""What saves memory or time changes nothing: recomputation, compilation, and what bf16 may change and what not."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.placement import Placement
from phalanx.models.counter_rng import CounterRNG
from phalanx.optim import gradients
from phalanx.tasks.task import Batch
from phalanx.trainer.loop import TrainingLoop
from tests.helpers import ALL, cover, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import distance, farthest, same_bits, walk


@pytest.mark.parametrize(("ranks", "activations"), cover([1, 2], ["selective", "full"]))
def test_recomputed_activations_give_the_same_bits(ranks: int, activations: str, tokens: Path, tmp_path: Path) -> None:
    kept = walk(ranks, tmp_path / "kept", tokens, train__steps=3, train__micro_batch=3)
    again = walk(
        ranks, tmp_path / "again", tokens, train__steps=3, train__micro_batch=3, memory__activations=activations
    )  # fmt: skip
    assert again.losses == kept.losses
    assert same_bits(again.state, kept.state)


OFFLOADED: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"parallel__engine": "single"}),
    "fsdp2 bf16": (2, {"parallel__engine": "fsdp2", "train__dtype": "bf16"}),
    "zero 1": (2, {"parallel__zero": 1}),
    "zero 2": (2, {"parallel__zero": 2}),
    "zero 3 fp32": (2, {"parallel__zero": 3, "train__dtype": "fp32"}),
}


@pytest.mark.parametrize("case", some(OFFLOADED, 0, 1, 3))
def test_inputs_that_waited_on_the_host_give_the_same_bits(case: str, tokens: Path, tmp_path: Path) -> None:
    ranks, how = OFFLOADED[case]
    asked = {"train__steps": 3, "train__micro_batch": 2, "model__layers": 3, "train__eval_every": 2} | how
    kept, moved = (
        walk(ranks, tmp_path / mode, tokens, **asked, memory__activations=mode, memory__offload_prefetch_blocks=1)
        for mode in ("none", "offload")
    )
    assert moved.losses == kept.losses
    assert same_bits(moved.state, kept.state)


def count_forwards(placement: Placement, run: str, data: str, activations: str) -> int:
    """How often the norms of the blocks run in one step of two micro-batches."""
    described = runs.job(run, data, {"memory.activations": activations, "train.micro_batch": 4}, 1)
    calls = 0

    def note(*_: object) -> None:
        nonlocal calls
        calls += 1

    with runs.loop_of(placement, described) as loop:
        loop.restore()
        for block in loop.setup.components.model.layers:
            block.mlp_norm.register_forward_pre_hook(note)
        loop.train_step(1)
    return calls


def test_activations_are_really_recomputed(tokens: Path, tmp_path: Path) -> None:
    kept, again = (
        run_ranks(count_forwards, 1, run=str(tmp_path / how), data=str(tokens), activations=how)[0]
        for how in ("none", "full")
    )
    assert (kept, again) == (4, 8)


class _Counted(TorchDispatchMode):
    """Counts matrix products and attention, and knows the memory that is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.attentions += "scaled_dot_product" in str(func) and "backward" not in str(func)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def held_bytes(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def batches_of(loop: TrainingLoop) -> list[Batch]:
    """The micro-batches of the first step."""
    parts = loop.setup.components
    return [parts.task.collate(samples) for samples in parts.train.batches(0, parts.work_split.division)]


def keep(placement: Placement, run: str, data: str, activations: str) -> list[int]:
    """Bytes held between the forward and the backward pass, and [products, attentions] of the backward pass."""
    described = runs.job(run, data, {"memory.activations": activations, "train.dtype": "fp32"}, 1)
    with runs.loop_of(placement, described) as loop:
        loop.restore()
        batch = batches_of(loop)[0]
        with _Counted() as seen:
            loss = loop.setup.components.task.loss_sum(
                loop.setup.components.model, batch, CounterRNG(0, 1, batch.samples)
            )
            held = seen.held_bytes()
            seen.products = seen.attentions = 0
            loss.backward()
    return [held, seen.products, seen.attentions]


def test_selective_keeps_less_and_computes_no_product_twice(tokens: Path, tmp_path: Path) -> None:
    none, selective, full = (
        run_ranks(keep, 1, run=str(tmp_path / how), data=str(tokens), activations=how)[0]
        for how in ("none", "selective", "full")
    )
    print(f"held between the passes: {none[0]}, {selective[0]}, {full[0]} bytes")
    assert none[0] > 1.2 * selective[0] > 1.4 * full[0]
    assert selective[1:] == none[1:] == [2 * 2 * 7, 0], "two products for each of 7 matrices in 2 blocks"
    assert full[1:] == [none[1] + 2 * 7, 2]


# Half a minute of C++; in `make test` inductor compiles dropout, and blocks that walk alike are traced.
@pytest.mark.skipif(not ALL or shutil.which("g++") is None, reason="make test-all, where there is a C++ compiler")
def test_compiled_blocks_walk_the_same_curve(tokens: Path, tmp_path: Path) -> None:
    # All at once, since each compilation costs seconds: the sharding engine, recomputation, offload, dropout. Batches
    # of evaluation are as large as those of training: those of another size would be compiled once more.
    asked: dict[str, Any] = {"train__steps": 6, "train__dtype": "fp32", "train__eval_sequences": 8}
    plain = walk(1, tmp_path / "plain", tokens, **asked)
    compiled = walk(
        1, tmp_path / "compiled", tokens, **asked, train__compile=True, memory__activations="offload",
        memory__offload_prefetch_blocks=1, parallel__engine="fsdp2",
    )  # fmt: skip
    apart = farthest(compiled.losses, plain.losses), distance(compiled.state, plain.state, "param")
    print("compiled: losses {:.1e}, parameters {:.1e} apart".format(*apart))
    assert max(apart) < 1e-5


def test_bf16_is_close_to_float64_and_the_engines_to_each_other(tokens: Path, tmp_path: Path) -> None:
    few = {"train__steps": 5, "train__micro_batch": 4}
    exact = walk(1, tmp_path / "exact", tokens, **few)
    single = walk(1, tmp_path / "single", tokens, **few, train__dtype="bf16")
    sharded = walk(2, tmp_path / "sharded", tokens, **few, train__dtype="bf16")
    for one, other in ((single, exact), (sharded, exact), (sharded, single)):
        apart = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
        print(f"bf16: losses {apart:.1e} apart")
        assert 0 < apart < 2e-2
    for outcome in (single, sharded):
        assert {tensor.dtype for tensor in outcome.state.values()} == {torch.float32}, "masters and moments stay fp32"


def first_moments(placement: Placement, run: str, data: str) -> int:
    """One step in bf16 with a micro-batch for each sequence, saved."""
    return runs.train(placement, run, data, ONE_STEP)


def sum_of_bf16_gradients(placement: Placement, run: str, data: str) -> int:
    """The same step's gradients, each computed in bf16 by itself, summed in float64 and saved as the first moment."""
    described = runs.job(run, data, ONE_STEP, 1)
    with runs.loop_of(placement, described) as loop:
        parts = loop.setup.components
        loop.restore()
        wide: dict[str, torch.Tensor] = {}
        for batch in batches_of(loop):
            loss = parts.task.loss_sum(parts.model, batch, CounterRNG(described.config.train.seed, 1, batch.samples))
            gradients.backward(loss, parts.nominal_weight)
            for name, parameter in parts.model.named_parameters():
                assert parameter.grad is not None
                assert parameter.grad.dtype == torch.bfloat16
                wide[name] = wide.get(name, 0) + parameter.grad.double()
                parameter.grad = None
        torch.save({f"exp_avg/{name}": grad.flatten() for name, grad in wide.items()}, Path(run) / "sums.pt")
    return 0


ONE_STEP = {
    "train.steps": 1, "train.dtype": "bf16", "train.global_batch": 40, "train.micro_batch": 1,
    "optim.clip_norm": None, "train.eval_sequences": 0,
}  # fmt: skip


def test_gradients_in_bf16_are_accumulated_in_fp32(tokens: Path, tmp_path: Path) -> None:
    run_ranks(sum_of_bf16_gradients, 1, run=str(tmp_path / "sums"), data=str(tokens))
    sums = torch.load(tmp_path / "sums/sums.pt")
    sums = {name: 0.1 * grad for name, grad in sums.items()}  # 1 - beta1
    in_bf16 = {name: grad.bfloat16() for name, grad in sums.items()}
    rounding = distance(in_bf16, sums, "exp_avg")
    for ranks in (1, 2):
        run_ranks(first_moments, ranks, run=str(tmp_path / f"{ranks}"), data=str(tokens))
        found = {k: v for k, v in runs.state(tmp_path / f"{ranks}").items() if k.startswith("exp_avg/")}
        apart = distance(found, sums, "exp_avg")
        print(f"{ranks} ranks: sums of 40 bf16 gradients are {apart:.1e} off; one rounding to bf16 is {rounding:.1e}")
        assert apart < 1e-6 < rounding
