"""Runs that train adapters beside frozen weights keep the promises: any ranks, resumed, exported, continued."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.layout.model_shape import LORA_TARGETS, ModelSpec
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights
from phalanx.models.llama import Llama, init_slice
from phalanx.models.peft import Adapter
from phalanx.models.user_model import build_on_meta, hf_name, shapes_of
from phalanx.trainer import run_folder
from phalanx.trainer.export import export_run, load_trained_model
from phalanx.workload import adapters
from tests.dist.incidents import train_with_signal
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import VOCAB, Outcome, distance, farthest, same_bits, walk

SPEC = ModelSpec(
    vocab_size=VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=44, max_seq_len=16
)
STEPS = 12 if ALL else 7
EVERYTHING = list(LORA_TARGETS)
TOKENS = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder in float64 whose model is far from zero, so that adapters matter."""
    folder = tmp_path_factory.mktemp("base") / "hf"

    def tensor_of(name: str) -> torch.Tensor:
        n = torch.Size(shapes[name]).numel()
        return init_slice(SPEC, 1, name, 0, n, "cpu", torch.float64) * (1.0 if "norm" in name else 4.0)

    shapes = shapes_of(Llama, SPEC)
    export(folder, SPEC, tensor_of, torch.float64)
    return folder


def changes(base: Path, **lora: Any) -> dict[str, Any]:
    """What makes a run of the proofs one with adapters; dropout of both kinds is on."""
    section = {"rank": 3, "alpha": 9, "dropout": 0.2} | lora
    return {
        "model": {"from_hf": str(base), "dropout": 0.1, "lora": section},
        "train.steps": STEPS,
        "optim.decay_steps": STEPS,
        "optim.lr": 3e-2,
        "optim.clip_norm": 0.9,
    }


def walked(ranks: int, run: Path, tokens: Path, changed: dict[str, Any]) -> Outcome:
    return walk(ranks, run, tokens, **{key.replace(".", "__"): value for key, value in changed.items()})


@pytest.fixture(scope="module")
def alone(base: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    run = tmp_path_factory.mktemp("alone")
    return run, walked(1, run, tokens, changes(base))


def test_frozen_weights_gathered_in_fp8_change_no_bit(base: Path, tokens: Path, tmp_path: Path) -> None:
    """Their scales are agreed on once, those of trained weights before each step."""
    changed = changes(base) | {"train.fp8": "block", "train.steps": 2, "optim.clip_norm": None, "train.micro_batch": 2}
    kept, found = (
        walked(2, tmp_path / str(zero), tokens, changed | {"parallel.zero": zero, "balance.optimizer_state": [1, 2]})
        for zero in (2, 3)
    )
    assert found.losses == kept.losses
    assert all(torch.equal(found.state[name], value) for name, value in kept.state.items())


@pytest.mark.parametrize(
    ("ranks", "more"), some([(2, {}), (3, {"memory.activations": "full", "train.micro_batch": 2})], 1)
)
def test_ranks_in_float64(
    ranks: int, more: dict[str, Any], base: Path, alone: tuple[Path, Outcome], tokens: Path, tmp_path: Path
) -> None:
    one, other = alone[1], walked(ranks, tmp_path, tokens, changes(base) | more)
    assert min(one.norms) < 0.9 < max(one.norms)
    assert one.losses[-1] < one.losses[0] - 0.1
    assert farthest(other.losses, one.losses) < 1e-9
    assert farthest(other.norms, one.norms) < 1e-9
    assert farthest([*other.evaluations.values()], [*one.evaluations.values()]) < 1e-9
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        assert distance(other.state, one.state, kind) < 1e-9


def test_a_checkpoint_holds_adapters_alone(alone: tuple[Path, Outcome]) -> None:
    names = {name.partition("/")[2] for name in alone[1].state}
    assert len(names) == 2 * 7 * 2
    assert all(name.endswith((".lora_a", ".lora_b")) for name in names)


def test_dropout_of_adapters_and_their_shape_matter(
    base: Path, alone: tuple[Path, Outcome], tokens: Path, tmp_path: Path
) -> None:
    others: list[dict[str, Any]] = [{"dropout": 0.0}, {"rank": 4}, {"alpha": 10}, {"targets": ["q", "v"]}]
    for number, other in enumerate(others):
        few = walked(1, tmp_path / str(number), tokens, changes(base, **other) | {"train.steps": 3})
        # B starts as zero, so that the first step tells no rank or scale, but the third does.
        assert abs(few.losses[2] - alone[1].losses[2]) > 1e-6


@pytest.mark.parametrize(
    ("ranks", "more"),
    some(
        [
            (1, {"optim.name": "adamw8bit", "train.dtype": "bf16"}),
            (2, {"train.dtype": "bf16", "train.micro_batch": 2}),
        ],
        1,
    ),
)
def test_killed_and_started_again_it_is_the_same_run(
    ranks: int, more: dict[str, Any], base: Path, tokens: Path, tmp_path: Path
) -> None:
    changed = changes(base) | more | {"train.steps": 4}
    quiet = walked(ranks, tmp_path / "quiet", tokens, changed)
    run = tmp_path / "killed"
    kill: dict[str, Any] = {"step": 3, "number": signal.SIGKILL, "ranks": [ranks - 1]}
    run.mkdir()
    often = changed | {"checkpoint.every": 1}  # of two, one is whole by the third step
    codes = run_ranks(train_with_signal, ranks, restarts=1, run=str(run), data=str(tokens), changes=often, **kill)
    assert codes == [0] * ranks
    assert len(runs.events(run, EventKind.RESUMED)) == 1
    found = runs.outcome(run)
    assert found.losses == quiet.losses
    assert found.norms == quiet.norms
    assert same_bits(found.state, quiet.state)


def test_eight_bit_state_on_any_ranks(base: Path, tokens: Path, tmp_path: Path) -> None:
    changed = changes(base) | {"optim.name": "adamw8bit"}
    one, other = (walked(ranks, tmp_path / str(ranks), tokens, changed) for ranks in (1, 3 if ALL else 2))
    assert farthest(other.losses, one.losses) < 1e-9
    assert one.losses[-1] < one.losses[0] - 0.1


# ----------------------------------------------------------------------------------------- exported and continued


def finished(run: Path, base: Path, tokens: Path) -> RunPaths:
    """A run folder as the launcher leaves it, of the checkpoint in `run`."""
    described = runs.job(run, tokens, changes(base), 1)
    run_folder.check_run_data(
        described.paths, {}, False, adapters.compute_base_fingerprint(described.config, described.spec, Llama)
    )
    run_folder.write_start(described.paths, described.config, base)
    return described.paths


def logits_of_run(placement: Placement, run: str, data: str, changed: dict[str, Any]) -> Any:
    """What the trained model of a run computes, and whether its frozen weights are those of the folder, to the bit."""
    described = runs.job(run, data, changed, 1)
    weights = Weights(Path(described.config.model.from_hf or ""))
    with runs.loop_of(placement, described) as loop:
        loop.restore()
        with loop.setup.components.engine.full_parameters() as whole, torch.no_grad():
            for name in shapes_of(Llama, described.spec):
                assert torch.equal(whole[name].flatten(), weights.read(name, 0, whole[name].numel())), name
            return loop.setup.components.model(TOKENS).tolist()


def logits_of(exported: Path) -> torch.Tensor:
    model, weights = build_on_meta(spec_from_config(read_config(exported), "it")), Weights(exported)
    model.to(weights.dtype()).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, 0, parameter.numel()).view(parameter.shape))
        return model(TOKENS)


def test_what_is_exported_is_what_was_trained(
    base: Path, alone: tuple[Path, Outcome], tokens: Path, tmp_path: Path
) -> None:
    run, outcome = alone
    paths = finished(run, base, tokens)
    described = changes(base)
    expected = torch.tensor(
        run_ranks(logits_of_run, 1, run=str(run), data=str(tokens), changed=described)[0], dtype=torch.float64
    )
    assert export_run(paths, tmp_path / "merged", None, merge=True) == STEPS
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(load_trained_model(paths)(TOKENS), expected, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(logits_of(base), expected, atol=1e-2)
    export_run(paths, tmp_path / "narrow", "bf16", merge=None)
    assert Weights(tmp_path / "narrow").dtype() == torch.bfloat16

    assert export_run(paths, tmp_path / "adapter", None) == STEPS
    adapter = Adapter(tmp_path / "adapter", 2, hf_name)
    for name, tensor in outcome.state.items():
        if name.startswith("param/"):
            assert torch.equal(adapter.read(name.removeprefix("param/"), 0, tensor.numel()), tensor)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )
    # Another run goes on from it, and with no steps writes just what it read.
    again = described | {"train.steps": 0, "train.dtype": "fp64"}
    again["model"] = again["model"] | {
        "lora": again["model"]["lora"] | {"adapter": str(tmp_path / "adapter"), "targets": EVERYTHING}
    }
    begun = walked(2, tmp_path / "again", tokens, again)
    params = {name: tensor for name, tensor in outcome.state.items() if name.startswith("param/")}
    assert same_bits({name: tensor for name, tensor in begun.state.items() if name in params}, params)


def test_other_weights_in_the_place_of_the_base_are_refused(
    base: Path, alone: tuple[Path, Outcome], tokens: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "base")
    run = tmp_path / "run"
    shutil.copytree(alone[0], run)
    paths = finished(run, tmp_path / "base", tokens)
    described = runs.job(run, tokens, changes(tmp_path / "base"), 1)
    run_folder.check_run_data(
        paths, {}, True, adapters.compute_base_fingerprint(described.config, described.spec, Llama)
    )
    export_run(paths, tmp_path / "before", None)
    going_on = changes(tmp_path / "base", adapter=str(tmp_path / "before"), targets=EVERYTHING)
    another = runs.job(tmp_path / "another", tokens, going_on, 1)
    assert another.spec is not None
    assert adapters.adapter_warnings(another.config, another.spec, Llama) == []
    shutil.rmtree(tmp_path / "base")
    export(tmp_path / "base", SPEC, lambda name: torch.ones(shapes_of(Llama, SPEC)[name]), torch.float64)
    with pytest.raises(RunError, match=r"the weights in model.from_hf have changed since the run in .* began"):
        run_folder.check_run_data(
            paths, {}, True, adapters.compute_base_fingerprint(described.config, described.spec, Llama)
        )
    with pytest.raises(RunError, match=r"does not have the weights that the adapters of .* were trained with"):
        export_run(paths, tmp_path / "merged", None, merge=True)
    export_run(paths, tmp_path / "adapter", None)  # needs no base
    (warning,) = adapters.adapter_warnings(another.config, another.spec, Llama)
    assert warning.startswith(f"the adapter {tmp_path / 'before'} was trained with other weights than those in")


def test_an_adapter_gives_what_the_recipe_leaves_open_and_contradicts_the_rest(
    base: Path, alone: tuple[Path, Outcome], tokens: Path, tmp_path: Path
) -> None:
    paths = finished(alone[0], base, tokens)
    export_run(paths, tmp_path / "adapter", None)
    own = {"adapter": str(tmp_path / "adapter"), "rank": "auto", "alpha": "auto", "targets": "auto"}

    def found(**section: Any) -> dict[str, Any]:
        config = runs.job(tmp_path / "x", tokens, changes(base, **(own | section)), 1).config
        return {key: value for key, value, _ in adapters.resolve_adapter_options(config, SPEC, Llama)}

    assert found() == {"model.lora.rank": 3, "model.lora.alpha": 9, "model.lora.targets": EVERYTHING}
    assert found(rank=3, targets=EVERYTHING[::-1]) == {"model.lora.alpha": 9}
    for key, value in (("rank", 4), ("alpha", 8), ("targets", ["q"])):
        with pytest.raises(ConfigError, match=rf"model.lora.{key} is .* but the adapter .* has"):
            found(**{key: value})


def test_merging_needs_adapters(alone: tuple[Path, Outcome], base: Path, tokens: Path, tmp_path: Path) -> None:
    described = runs.job(tmp_path / "run", tokens, {"model": {"from_hf": str(base)}}, 1)
    shutil.copytree(alone[0] / "checkpoints", tmp_path / "run" / "checkpoints")
    run_folder.write_start(described.paths, described.config, base)
    with pytest.raises(ConfigError, match="--merge is for a run that trains adapters"):
        export_run(described.paths, tmp_path / "merged", None, merge=True)
