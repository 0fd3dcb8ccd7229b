"""What the engine interface promises, for each engine: the same start anywhere, whole parameters, harmless repeats."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.models.llama import HF_NAMES
from phalanx.trainer import train_rank
from tests.helpers import ALL, cover, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, same_bits, walk

NO_STEPS = {"train__steps": 0}
WAYS = [(1, "bf16"), (2, "fp64"), (3, "fp64")] if ALL else []  # further ranks and types


@pytest.mark.parametrize("dtype", some(["fp32", "fp64"], 0))
def test_the_starting_weights_are_the_same_bits_everywhere(dtype: str, tokens: Path, tmp_path: Path) -> None:
    start = walk(1, tmp_path / "single", tokens, **NO_STEPS, train__dtype=dtype)
    for ranks in (1, 2, 3, 5) if ALL else (3,):
        other = walk(ranks, tmp_path / f"{ranks}", tokens, **NO_STEPS, train__dtype=dtype, parallel__engine="fsdp2")
        assert same_bits(other.state, start.state), ranks
    another = walk(1, tmp_path / "seed", tokens, **NO_STEPS, train__dtype=dtype, train__seed=1)
    assert not same_bits(another.state, start.state)


def write_hf_folder(folder: Path, tied: bool) -> dict[str, torch.Tensor]:
    """A random Llama written by transformers; returns its tensors by their names there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**shapes, **heads, tie_word_embeddings=tied)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
def test_imported_weights_are_the_folders_on_any_number_of_ranks(tied: bool, tokens: Path, tmp_path: Path) -> None:
    theirs = write_hf_folder(tmp_path / "hf", tied)
    names = {
        f"param/{ours.format(i=layer)}": name.format(i=layer)
        for ours, name in HF_NAMES.items()
        for layer in range(2)
        if name.format(i=layer) in theirs  # a tied head's is not, nor what other architectures have
    }
    unset: dict[str, Any] = {f"model__{key}": None for key in ("hidden", "layers", "heads", "kv_heads", "intermediate")}
    for ranks in (1, 2, 3) if ALL else (3,):
        found = walk(
            ranks,
            tmp_path / f"{ranks}",
            tokens,
            **NO_STEPS,
            **unset,
            train__dtype="fp32",
            model__vocab_size="auto",
            model__from_hf=str(tmp_path / "hf"),
        )
        params = {name: tensor for name, tensor in found.state.items() if name.startswith("param/")}
        assert same_bits(params, {ours: theirs[name].flatten() for ours, name in names.items()}), ranks


def whole_parameters(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """Walk two steps, compare the whole parameters with the saved pieces, then walk on as if nothing had been."""
    described = runs.job(run, data, changes | {"train.steps": 2}, placement.world)
    with runs.loop_of(placement, described) as loop:
        assert train_rank.run_steps(loop, loop.restore()) == 0
        saved = runs.state(Path(run), 2)
        with loop.setup.components.engine.full_parameters() as whole:
            assert {f"param/{name}" for name in whole} == {name for name in saved if name.startswith("param/")}
            for name, tensor in whole.items():
                assert not isinstance(tensor, DTensor)
                assert torch.equal(tensor.flatten(), saved[f"param/{name}"].to(tensor.dtype)), name
        loop.setup = dataclasses.replace(
            loop.setup, job=runs.job(run, data, changes | {"train.steps": 4}, placement.world)
        )
        return int(train_rank.run_steps(loop, 2))


@pytest.mark.parametrize(("way", "tied"), cover([(1, "fp64"), (2, "bf16"), *WAYS], [False, True]))
def test_full_parameters_are_the_assembled_pieces(
    way: tuple[int, str], tied: bool, tokens: Path, tmp_path: Path
) -> None:
    ranks, dtype = way
    changes = {"train.dtype": dtype, "model.tie_embeddings": tied}
    codes = run_ranks(whole_parameters, ranks, run=str(tmp_path / "looked"), data=str(tokens), changes=changes)
    assert codes == [0] * ranks
    other = walk(ranks, tmp_path / "not", tokens, train__steps=4, train__dtype=dtype, model__tie_embeddings=tied)
    assert same_bits(runs.state(tmp_path / "looked"), other.state)


@pytest.mark.parametrize(("ranks", "tied"), cover([1, 2], [False, True]))
def test_evaluating_and_saving_on_the_way_changes_no_bit(ranks: int, tied: bool, tokens: Path, tmp_path: Path) -> None:
    four = {"train__steps": 4, "model__tie_embeddings": tied}
    quiet = walk(ranks, tmp_path / "quiet", tokens, **four)
    busy = walk(ranks, tmp_path / "busy", tokens, **four, train__eval_every=2, checkpoint__every=2)
    assert [event["step"] for event in runs.events(tmp_path / "busy", EventKind.CHECKPOINT_SAVED)] == [2, 4]
    assert list(busy.evaluations) == [(step, "held_out") for step in (2, 4)]
    assert busy.losses == quiet.losses
    assert busy.evaluations[4, "held_out"] == quiet.evaluations[4, "held_out"]
    assert same_bits(busy.state, quiet.state)
    # What was saved beside an evaluation is that step's state and no other's.
    stopped = walk(ranks, tmp_path / "stopped", tokens, **four | {"train__steps": 2})
    assert same_bits(runs.state(tmp_path / "busy", 2), stopped.state)


def announce_again(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """Walk four steps, saying after every micro-batch, twice, that each unit's gradients are ready."""
    described = runs.job(run, data, changes | {"train.steps": 4, "train.micro_batch": 2}, placement.world)
    with runs.loop_of(placement, described) as loop:
        engine: Any = loop.setup.components.engine
        inner = engine.micro_batch

        @contextlib.contextmanager
        def micro_batch(last: bool) -> Iterator[None]:
            with inner(last):
                yield
                for name, _ in reversed(loop.setup.components.model.units()):
                    engine.grads_ready(name)
                    engine.grads_ready(name)

        engine.micro_batch = micro_batch
        return int(train_rank.run_steps(loop, loop.restore()))


@pytest.mark.parametrize(("way", "tied"), cover([(1, "fp64"), (2, "bf16"), *WAYS], [False, True]))
def test_saying_again_that_gradients_are_ready_changes_no_bit(
    way: tuple[int, str], tied: bool, tokens: Path, tmp_path: Path
) -> None:
    ranks, dtype = way
    changes = {"train.dtype": dtype, "model.tie_embeddings": tied}
    codes = run_ranks(announce_again, ranks, run=str(tmp_path / "again"), data=str(tokens), changes=changes)
    assert codes == [0] * ranks
    once = walk(
        ranks,
        tmp_path / "once",
        tokens,
        train__steps=4,
        train__micro_batch=2,
        train__dtype=dtype,
        model__tie_embeddings=tied,
    )
    again = runs.outcome(tmp_path / "again")
    assert again.losses == once.losses
    assert same_bits(again.state, once.state)


def gradients_by_hand(placement: Placement, run: str, data: str) -> float:
    """Give every parameter of every unit the gradient rank + 1, outside autograd, and return the step's norm."""
    described = runs.job(run, data, {"parallel.engine": "fsdp2"}, placement.world)
    with runs.loop_of(placement, described) as loop:
        parts = loop.setup.components
        loop.restore()
        # One step as usual first: fully_shard sets itself up when it first runs.
        loop.train_step(1)
        parts.engine.begin_step(2, parts.nominal_weight // placement.world, 1e-3, None)
        with parts.engine.full_parameters():
            for parameter in parts.model.parameters():
                parameter.grad = torch.full_like(parameter, placement.rank + 1.0)
            for unit in ("head", "layers.1", "layers.0", "embed"):
                parts.engine.grads_ready(unit)
        outcome = parts.engine.finish_step()
        assert outcome.weight == parts.nominal_weight
        return outcome.get()[0]


def test_fsdp2_reduces_gradients_that_autograd_did_not_see(tokens: Path, tmp_path: Path) -> None:
    norms = run_ranks(gradients_by_hand, 2, run=str(tmp_path), data=str(tokens))
    elements = sum(t.numel() for t in walk(1, tmp_path / "one", tokens, **NO_STEPS).state.values()) / 3
    assert norms == pytest.approx([3.0 * elements**0.5] * 2, rel=1e-12)  # 1 + 2 from the two ranks, summed


def test_evaluation_is_the_same_with_fewer_sequences_than_ranks(tokens: Path, tmp_path: Path) -> None:
    few = {"train__steps": 1, "train__eval_sequences": 2}
    found: list[Outcome] = [walk(ranks, tmp_path / f"{ranks}", tokens, **few) for ranks in (1, 3)]
    (one,), (three,) = (outcome.evaluations.values() for outcome in found)
    assert three == pytest.approx(one, rel=1e-12)
