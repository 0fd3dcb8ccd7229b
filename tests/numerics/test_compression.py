"""Compression is an algorithm of its own, and keeps the promise: on one node any ranks walk one curve, and a run that
was interrupted walks on."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.compression import describe_node_change
from phalanx.comm.mesh import join
from phalanx.comm.rendezvous import Topology
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.trainer import train_rank
from tests.helpers import run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, farthest, walk
from tests.numerics.test_rank_layout import assert_same

INT8: dict[str, Any] = {"comm__compress": "int8"}


@pytest.fixture(scope="module")
def rounded(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = tmp_path_factory.mktemp("rounded")
    yield walk(1, folder, tokens, **INT8)
    (warning,) = [event["message"] for event in runs.events(folder, EventKind.WARNING)]
    assert warning == "compress: int8 rounds weights but makes nothing faster here, since all ranks are on one node"


def test_it_is_another_curve_that_learns_as_much(rounded: Outcome, alone: Outcome) -> None:
    assert 1e-5 < farthest(rounded.losses, alone.losses) < 0.05
    assert rounded.losses[-1] == pytest.approx(alone.losses[-1], rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    some(
        [
            (2, {"parallel__zero": 1, "optim__double_buffer": True, "train__micro_batch": 2}),
            (3, {"parallel__zero": 2, "balance__optimizer_state": [4, 0, 1]}),
            (3, {"parallel__zero": 3, "balance__optimizer_state": [1, 2, 1], "train__micro_batch": 3}),
            (4, {"parallel__zero": 2, "parallel__shard_degree": 4}),
        ],
        0,
    ),  # others in tests/dist/test_compression.py
)
def test_any_ranks_of_a_node(
    ranks: int, changes: dict[str, Any], rounded: Outcome, tokens: Path, tmp_path: Path
) -> None:
    assert_same(walk(ranks, tmp_path, tokens, **INT8, **changes), rounded)


def on_two_nodes(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """A run whose ranks take turns at being on one of two nodes."""
    described = runs.job(run, data, changes, placement.world)
    with join(placement, described.config.comm.timeout_s) as mesh:
        apart = replace(mesh, topology=Topology.from_hosts([f"{rank % 2}" for rank in range(mesh.world)]))
        loop = runs.loop_among(apart, placement, described)
        try:
            return int(train_rank.run_steps(loop, loop.restore()))
        finally:
            loop.setup.components.engine.close()


@pytest.mark.parametrize(("ranks", "compress"), some([(2, "int8"), (4, "bf16"), (4, "int8")], 0))
def test_interrupted_it_goes_on_bit_by_bit(
    ranks: int, compress: str, alone: Outcome, tokens: Path, tmp_path: Path
) -> None:
    changes = {"comm.compress": compress, "parallel.zero": 2, "train.micro_batch": 2, "train.dtype": "fp32"}
    for name, stops in (("whole", [runs.STEPS]), ("in two", [runs.STEPS // 2, runs.STEPS])):
        for steps in stops:
            arguments = {"run": str(tmp_path / name), "data": str(tokens), "changes": changes | {"train.steps": steps}}
            assert run_ranks(on_two_nodes, ranks, timeout_s=240, **arguments) == [0] * ranks
    assert [event["step"] for event in runs.events(tmp_path / "in two", EventKind.RESUMED)] == [runs.STEPS // 2]
    assert not runs.events(tmp_path / "whole", EventKind.WARNING)
    whole, in_two = runs.outcome(tmp_path / "whole"), runs.outcome(tmp_path / "in two")
    assert whole.losses == in_two.losses
    assert whole.state.keys() == in_two.state.keys()
    assert all(torch.equal(tensor, in_two.state[name]) for name, tensor in whole.state.items())
    assert farthest(whole.losses, alone.losses) > 1e-6
    assert whole.losses[-1] == pytest.approx(alone.losses[-1], rel=0.01)


def test_going_on_where_ranks_share_nodes_otherwise_is_told(tokens: Path, tmp_path: Path) -> None:
    for way, steps in ((on_two_nodes, 1), (on_two_nodes, 2), (runs.train, 3)):
        changes = {"comm.compress": "bf16", "train.steps": steps}
        arguments = {"run": str(tmp_path / "run"), "data": str(tokens), "changes": changes}
        run_ranks(way, 2, timeout_s=240, **arguments)
        told = [event["message"] for event in runs.events(tmp_path / "run", EventKind.WARNING)]
        assert any("the ranks are placed on nodes differently" in message for message in told) == (steps == 3), told


def test_only_what_changes_a_compressed_sum_is_told() -> None:
    pairs, one = Topology.from_hosts("aabb"), Topology.from_hosts("aa")
    assert describe_node_change("int8", [0, 1], pairs)
    assert describe_node_change("bf16", [0, 1], one)
    for compress, before, now in (("none", [0, 1], pairs), ("int8", None, pairs), ("int8", [0, 0, 1, 1], pairs),
                                  ("int8", [0, 0, 0], one)):  # fmt: skip
        assert describe_node_change(compress, before, now) is None


@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_other_engines_refuse_it(engine: str, tmp_path: Path, tokens: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"comm\.compress int8 has no effect with parallel\.engine {engine}; remove it"
    ):
        runs.job(tmp_path, tokens, {"comm.compress": "int8", "parallel.engine": engine}, 1)
