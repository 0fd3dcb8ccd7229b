"""What is found out before step 0 and what comes of it: the micro-batch that fits, and a loss that runs away."""

import os
import re
from pathlib import Path

import pytest

from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from tests.dist.command import contents, phalanx, refused, write_place
from tests.helpers import run_ranks


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return write_place(tmp_path)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(here: Path) -> None:
    found = refused(here, "train", "recipe.yaml", "train.micro_batch=auto", free_bytes=2**16)
    assert re.fullmatch(
        r"the model does not fit: one sample takes [\d.]+ GiB, the state [\d.]+ GiB, and 0.0 GiB are free for this "
        r"rank; shard it over more ranks, set memory.activations=full, or lower data.seq_len",
        found,
    )
    assert contents(here / "runs") == {}


def test_a_probe_that_runs_out_of_memory_says_what_to_do(here: Path) -> None:
    wide = ("model.intermediate=65536", "data.seq_len=256", "train.global_batch=3")
    found = refused(here, "train", "recipe.yaml", "train.micro_batch=auto", *wide, room_bytes=2**29)
    assert re.fullmatch(
        r"train.micro_batch auto found no answer: of the [\d.]+ GiB free for this rank two blocks and three sequences "
        r"took more; set train.micro_batch yourself, or lower data.seq_len",
        found,
    )


def cuts(placement: Placement, folder: str, key: str) -> list[int]:
    """How many micro-batches each rank makes of its share, having found that 1 or 4 sequences fit."""
    from phalanx.comm.mesh import join
    from phalanx.config import load, resolve
    from phalanx.trainer.resolve import resolve_with_files, token_folders
    from phalanx.workload.build import build_components
    from phalanx.workload.workload import read_model_shape

    os.chdir(folder)
    fits = f"train.micro_batch={1 if placement.rank else 4}"
    config, _ = resolve.resolve_autos(
        load.load_recipe(Path("recipe.yaml"), ["train.global_batch=8", fits, key]), device="cpu", world=2
    )
    answer = resolve_with_files(load.to_yaml(config), ["cpu"], 2, 2, None)
    config = load.build_config(load.parse_yaml(answer["config"], "the answer"), "the answer")
    with join(placement, 30) as mesh:
        parts = build_components(config, read_model_shape(config), mesh, *token_folders(answer))
        return [len(micro_batch) for micro_batch in parts.train.batches(0, parts.work_split.division)]


@pytest.mark.parametrize(
    ("key", "made"), [("parallel.zero=3", [[1, 1, 1, 1]] * 2), ("parallel.zero=1", [[4], [1, 1, 1, 1]])]
)
def test_ranks_that_found_different_micro_batches_run_as_many_where_they_have_to(
    key: str, made: list[list[int]], here: Path
) -> None:
    """Under torchrun each rank measures for itself; where something travels in a micro-batch, unequal numbers of them
    would hang."""
    assert run_ranks(cuts, 2, folder=str(here), key=key) == made


def test_a_loss_that_runs_away_is_recorded_and_does_not_end_the_run(here: Path) -> None:
    """Numbers that are not finite have no spelling in JSON; the records and the report must bear them."""
    assert phalanx(here, "train", "recipe.yaml", "--run-dir", "run", "optim.lr=1e+300", "train.steps=4")[0] == 0
    paths = RunPaths(here / "run")
    steps, events = read_steps(paths.metrics), list(read_lines(paths.events))
    assert [step["loss"] is None for step in steps] == [False, True, True, True]
    assert [event["loss"] for event in events if event["kind"] == EventKind.EVALUATED] == [None]
    assert [event["step"] for event in events if event["kind"] == EventKind.STEP_SKIPPED] == [2, 3, 4]
    assert paths.report.exists()


def test_the_micro_batch_is_probed_once_and_kept(here: Path) -> None:
    first = ("train", "recipe.yaml", "--run-dir", "run", "train.micro_batch=auto")
    assert phalanx(here, *first)[0] == 0
    paths = RunPaths(here / "run")
    (event,) = [e for e in read_lines(paths.events) if e.get("key") == "train.micro_batch"]
    assert event["kind"] == EventKind.AUTO_RESOLVED
    assert event["value"] == 4  # the whole global batch fits
    assert re.fullmatch(
        r"one sample takes .* GiB, the state .* GiB, and .* GiB are free for this rank", event["reason"]
    )
    assert "micro_batch: 4" in paths.config.read_text()
    # Were it probed again, it would not fit this time.
    assert phalanx(here, *first, "train.steps=3", free_bytes=2**16)[0] == 0
    assert len([e for e in read_lines(paths.events) if e.get("key") == "train.micro_batch"]) == 1
    assert [step["step"] for step in read_steps(paths.metrics)] == [1, 2, 3]
