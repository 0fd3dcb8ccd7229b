"""Two nodes whose ranks compute on simulated devices: one is lost within a step, a spare takes its place."""

import functools
import os
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from tests.accelerator.device import needs_device, run_on_device
from tests.cluster import lives
from tests.cluster.lives import curve, events, life, state
from tests.dist import command

pytestmark = needs_device
STEPS = 12
SHORT = [f"train.steps={STEPS}", "train.compile=false", "train.dtype=fp32"]


def node(placement: Placement, **arguments: Any) -> Any:
    """A node whose device is no other's, so that their ranks have collectives between devices."""
    os.environ["SIM_MACHINE"] = str(placement.rank)
    return lives.live(placement, **arguments)


def test_a_node_is_lost_and_every_bit_stays(tmp_path: Path) -> None:
    command.write_place(tmp_path)
    (tmp_path / "recipe.yaml").write_text(lives.RECIPE)

    def train(run: str, *nodes: list[lives.Life]) -> None:
        start = functools.partial(run_on_device, order="threads")
        ended = lives.train(tmp_path, run, list(nodes), 2, *SHORT, start=start, node=node)
        assert [each[-1][0] for each in ended] == ([0, -9, 0] if run == "lost" else [0, 0]), ended

    train("calm", [life()], [life()])
    train("lost", [life()], [life(end=3)], [life()])
    (begun, *_) = events(tmp_path / "lost", EventKind.RUN_STARTED)
    assert begun["device"] == "sim"
    assert not [
        told for told in events(tmp_path / "lost", EventKind.WARNING) if "on one accelerator" in told["message"]
    ]
    (told,) = events(tmp_path / "lost", EventKind.NODE_LOST)
    assert told["node"] == 1
    assert state(tmp_path / "lost", STEPS) == state(tmp_path / "calm", STEPS)
    assert curve(tmp_path / "lost") == curve(tmp_path / "calm")
