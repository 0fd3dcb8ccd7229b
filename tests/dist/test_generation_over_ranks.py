"""Text of a run's model that several ranks hold: the same as that of one, and chosen as transformers chooses."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.placement import ExitCode, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.generate.decode import SamplingOptions
from phalanx.generate.text import Sampling
from phalanx.layout.mesh_axes import MeshAxes
from tests.dist.command import phalanx, refused, write_place
from tests.helpers import run_ranks, some

PROMPTS = ("document", "hello hello says")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two layers, with a file of prompts."""
    folder = write_place(tmp_path_factory.mktemp("writing"))
    changes = ["model.layers=2", "model.hidden=32", "model.init_std=0.3", "model.max_seq_len=64", "train.eval_every=0"]
    changes += ["model.architecture=mixtral", "model.moe.experts=3", "model.moe.experts_per_token=2"]
    # What training alone cannot combine with slices and stages.
    changes += ["model.moe.balance=step", "optim.name=adamw8bit", "train.fp8=block", "resilience.on_spike=skip"]
    code, out, err = phalanx(folder, "train", "recipe.yaml", "--run-dir", "run", *changes)
    assert code == 0, (out, err)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return folder


def written(placement: Placement, folder: str, tensor: int, pipeline: int, as_lines: bool) -> str:
    """What a rank prints."""
    from phalanx.generate import distributed

    asked = distributed.GenerationRequest(
        RunPaths(Path(folder)),
        MeshAxes(tensor, pipeline),
        list(PROMPTS),
        Sampling(max_tokens=8, temperature=0.0),
        as_lines,
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert distributed._run_rank(asked, placement) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def alone(place: Path) -> list[dict[str, Any]]:
    """What one process writes."""
    code, out, _ = phalanx(
        place, "generate", "run", "--prompts", "prompts.txt", "--max-tokens", "8", "--temperature", "0"
    )
    assert code == 0
    written = [json.loads(line) for line in out.splitlines()]
    assert [each["prompt"] for each in written] == list(PROMPTS)
    assert all(each["completion"] for each in written)
    return written


@pytest.mark.parametrize(("tensor", "pipeline"), some([(2, 2), (2, 1), (1, 2)], 0))
def test_ranks_write_what_one_process_does(
    tensor: int, pipeline: int, place: Path, alone: list[dict[str, Any]]
) -> None:
    lines, *others = run_ranks(
        written, tensor * pipeline, folder=place / "run", tensor=tensor, pipeline=pipeline, as_lines=True
    )
    assert [json.loads(line) for line in lines.splitlines()] == alone
    assert set(others) == {""}


def test_text_comes_as_it_is_written_and_the_command_ends(place: Path, alone: list[dict[str, Any]]) -> None:
    shown, _ = run_ranks(written, 2, folder=place / "run", tensor=2, pipeline=1, as_lines=False)
    assert shown == "".join(f"{each['prompt']}{each['completion']}\n" for each in alone)
    assert phalanx(place, "generate", "run", "--tensor", "2", "--max-tokens", "2")[0] == 0


def test_what_cannot_be_is_refused(place: Path) -> None:
    assert "--chat cannot be combined with --tensor and --pipeline" in refused(
        place, "generate", "run", "--tensor", "2", "--chat"
    )
    assert "recipe.yaml is none; name one" in refused(place, "generate", "recipe.yaml", "--pipeline", "2")
    code, _, err = phalanx(place, "generate", "run", "--tensor", "3")
    assert code == ExitCode.CONFIG
    assert "attention heads, and there are 2 (model.heads)" in err
    assert "each needs a layer, but the model has 2" in refused(place, "generate", "run", "--pipeline", "3")


@pytest.mark.parametrize(
    "choice",
    [
        SamplingOptions(0.7),
        SamplingOptions(1.0, top_k=5),
        SamplingOptions(1.3, top_p=0.6),
        SamplingOptions(0.5, top_p=0.9, top_k=7, repetition_penalty=1.4),
        SamplingOptions(1.0, top_p=1e-6),
    ],
)
def test_tokens_are_as_probable_as_with_transformers(choice: SamplingOptions) -> None:
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits, seen = torch.randn(40) * 3, torch.tensor([3, 9, 3])
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(choice.repetition_penalty)])
    theirs.append(TemperatureLogitsWarper(choice.temperature))
    if choice.top_k:
        theirs.append(TopKLogitsWarper(choice.top_k))
    theirs.append(TopPLogitsWarper(choice.top_p))
    expected = theirs(seen[None], logits[None].clone()).softmax(-1)[0]
    torch.testing.assert_close(choice.token_probabilities(logits, seen), expected)
    drawn = {choice.sample_token(logits, seen, torch.Generator().manual_seed(seed)) for seed in range(30)}
    assert all(expected[token] > 0 for token in drawn)
    assert len(drawn) > 1 or choice.top_p < 0.1
    assert SamplingOptions(0.0).sample_token(logits, seen, torch.Generator()) == int(logits.argmax())
