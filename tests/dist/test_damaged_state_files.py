"""Flipped bits in what a run has kept: the step before, a checkpoint or a replica is gone on from, and no bit differs.

`PHALANX_FLIPS=200` makes as many of them (about ten minutes); a few of each kind are made otherwise.
"""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import inventory, shared_memory, state_file
from tests.dist.test_in_memory_checkpoints import SHORT, assert_same, begin, resumed, train_and_die
from tests.helpers import run_ranks
from tests.numerics import runs
from tests.numerics.runs import Outcome, walk

CHANGES = SHORT | {"checkpoint.every": 2, "balance.optimizer_state": [3, 1]}
FLIPS = int(os.environ.get("PHALANX_FLIPS", "0"))
PLACES = ("facts", "words", "headers", "index", "newest slot", "older slot", "checkpoint", "manifest", "events")


@pytest.fixture(scope="module")
def left(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
    """A run folder whose ranks were killed behind the commit of step 5, a copy of it and of what is in shared memory;
    the folder there is the first one's."""
    shared = shared_memory.SHM_ROOT / f"phalanx-test-{os.getpid()}-{random.randrange(1 << 30)}"
    shared.mkdir(mode=0o700)
    run, copy = tmp_path_factory.mktemp("left") / "run", tmp_path_factory.mktemp("copy")
    begin(run)
    arguments: dict[str, Any] = {"run": str(run), "data": str(tokens), "changes": CHANGES}
    with pytest.raises(AssertionError, match="killed by SIGKILL"):
        run_ranks(train_and_die, 2, shared=shared, deaths=[("behind the commit", 5, 1)], **arguments)
    shutil.copytree(run, copy / "run")
    shutil.copytree(shared, copy / "shared")
    yield run, shared, copy
    shutil.rmtree(shared)


@pytest.fixture(scope="module")
def quiet(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    changes = {key.replace(".", "__"): value for key, value in CHANGES.items()}
    return walk(2, tmp_path_factory.mktemp("quiet"), tokens, **changes)


def damaged(place: str, run: Path, shared: Path, draw: random.Random) -> Path:
    """Flip a bit of one of the files, and say which."""
    low, high = 0, 0
    match place:
        case "checkpoint" | "manifest":
            name = "manifest.json" if place == "manifest" else f"rank-0000{draw.randrange(2)}.safetensors"
            path = max((run / "checkpoints").glob("step-*")) / name
        case "events":
            path = RunPaths(run).events
        case _:
            path = draw.choice(inventory.list_state_files(shared))
            facts = state_file.read_metadata(path)
            assert facts is not None
            low, high = {
                "facts": (0, state_file._CHECK + 4),
                "words": (state_file.WORDS[0], state_file.WORDS[1] + 8),
                "headers": (state_file.HEADERS[0], state_file.INDEX),
                "index": (state_file.INDEX, state_file.INDEX + facts.index_bytes),
                "newest slot": (slot := facts.slot_offset(facts.steps[max(facts.steps)]), slot + facts.slot_bytes),
                "older slot": (slot := facts.slot_offset(facts.steps[min(facts.steps)]), slot + facts.slot_bytes),
            }[place]
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * low, 8 * (high or len(content)))
    content[bit // 8] ^= 1 << bit % 8
    with open(path, "r+b") as file:
        file.write(content)
    return path


def goes_on(left: tuple[Path, Path, Path], tokens: Path, places: list[str], seed: int) -> tuple[Path, int]:
    """Damage what was left, and go on from it as the same command does; the run, and how far back it went."""
    run, shared, copy = left
    draw = random.Random(seed)
    for folder, name in ((run, "run"), (shared, "shared")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(copy / name, folder)
    print(seed, places, [str(damaged(place, run, shared, draw)) for place in places])
    codes = run_ranks(
        train_and_die, 2, restarts=0, shared=shared, run=str(run), data=str(tokens), changes=CHANGES, deaths=[],
        first_attempt=2,
    )  # fmt: skip
    assert codes == [0, 0]
    return run, resumed(run)[0][0]


def test_flips_of_every_kind_change_nothing(left: tuple[Path, Path, Path], tokens: Path, quiet: Outcome) -> None:
    flips = [(place, number) for number in range(FLIPS // len(PLACES) + 1) for place in PLACES][:FLIPS]
    for place, seed in flips or [("words", 1), ("headers", 2), ("newest slot", 3)]:
        run, step = goes_on(left, tokens, [place], seed)
        assert step >= 4 or place == "events"  # by whose first line the state is known
        if not (place == "events" and seed):  # a line of it may be what is compared
            assert_same(runs.outcome(run), quiet)


def test_damage_in_every_slot_takes_the_run_back_to_the_disk(
    left: tuple[Path, Path, Path], tokens: Path, quiet: Outcome
) -> None:
    run, step = goes_on(left, tokens, ["newest slot", "older slot"] * 6, 1)
    assert resumed(run) == [(step, False)] and step in (2, 4)
    assert_same(runs.outcome(run), quiet)
    # Ranks found the one, and when they had been started again the other: neither counts as a failure.
    assert max(line["attempt"] for line in read_lines(RunPaths(run).metrics)) == 4
    assert not runs.events(run, EventKind.GAVE_UP)
