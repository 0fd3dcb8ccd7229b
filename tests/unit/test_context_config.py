"""Recipes with context parallelism: what is refused, what `auto` becomes, and how ranks form groups."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.autotune.micro_batch import bytes_of_other_keys, bytes_of_scores
from phalanx.autotune.probe_model import shorten_rows
from phalanx.config import load
from phalanx.config.resolve import resolve_autos
from phalanx.core.errors import ConfigError
from phalanx.layout.balance import UNBOUND, Speed
from phalanx.layout.context_exchange import (
    TILE_QUERIES,
    TILE_SCORE_BYTES,
    AttentionShape,
    choose_exchange,
    count_exchanged_elements,
)
from phalanx.layout.context_slices import slice_in_pairs
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import LatentSpec
from phalanx.workload.context_task import join_speeds
from phalanx.workload.workload import make_workload, read_model_shape

MODEL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 44, "vocab_size": 61}


def config_of(changes: dict[str, Any], **model: Any) -> Any:
    tree: dict[str, Any] = {"model": MODEL | model, "data": {"seq_len": 16}}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return load.build_config(tree, "here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.context_by": "ring"}, "parallel.context_by has no effect with parallel.context 1"),
        ({"balance.context": [1, 2]}, "balance.context has no effect with parallel.context 1"),
        ({"parallel.context": 2, "balance.context": [1, 2, 3]}, "balance.context has 3 numbers"),
        ({"parallel.context": 2, "parallel.engine": "fsdp2"}, "cannot be combined with parallel.engine fsdp2"),
        ({"parallel.context": 2, "task.kind": "masked"}, "built-in decoders only"),
        (
            {"parallel.context": 2, "train.compile": True, "memory.activations": "selective"},
            "selective recomputes parts",
        ),
        ({"parallel.context": 9}, "too short for parallel.context 9"),
        ({"parallel.context": 4, "parallel.context_by": "heads"}, "a key head at least, and there are 2"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    model = {"architecture": "bert"} if changes.get("task.kind") == "masked" else {}
    with pytest.raises(ConfigError, match=words):
        config_of(changes, **model)


def test_ranks_must_form_groups() -> None:
    asked = config_of({"parallel.context": 2, "parallel.tensor": 2})
    with pytest.raises(ConfigError, match=r"6 ranks cannot form groups of 4 ranks .*parallel.context=2"):
        resolve_autos(asked, device="cpu", world=6)
    with pytest.raises(ConfigError, match=r"balance.batch has 4 numbers for groups of ranks that share rows"):
        resolve_autos(config_of({"parallel.context": 2, "balance.batch": [8, 8, 8, 8]}), device="cpu", world=4)
    assert asked.parallel.axes == MeshAxes(2, 1, 2)
    resolved, _ = resolve_autos(asked, device="sim", world=4)
    assert (resolved.train.compile, resolved.parallel.sequence_parallel) == ("auto", True)  # a trial decides
    selective = config_of({"parallel.context": 2, "memory.activations": "selective"})
    assert resolve_autos(selective, device="sim", world=2)[0].train.compile is False


def test_groups_are_neighbours_on_the_data_axis() -> None:
    axes = MeshAxes(tensor=2, context=2)
    assert list(axes.groups("context", 8)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [axes.row_group(rank, 8) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert axes.count_row_groups(8) == 2


def test_auto_goes_by_heads_bytes_and_memory() -> None:
    wide = AttentionShape(heads=32, kv_heads=32, head_dim=128, hidden=4096)
    grouped = AttentionShape(heads=32, kv_heads=8, head_dim=128, hidden=4096)
    assert choose_exchange(wide, 4, 8192)[0] == "heads"
    assert choose_exchange(grouped, 2, 8192)[0] == "gather"
    assert choose_exchange(grouped, 8, 8192)[0] == "heads"
    assert choose_exchange(AttentionShape(32, 4, 128, 4096), 16, 8192)[0] == "gather"
    assert choose_exchange(AttentionShape(32, 8, 128, 4096), 16, 8192)[0] == "ring"
    one = count_exchanged_elements("ring", slice_in_pairs(64, (1.0, 1.0)), grouped, (1.0, 1.0))
    # The inner rank needs what is before it, the outer one all: 16 + 32 keys.
    assert one == (48 * 2 * 8 * 128, 2 * 48 * 2 * 8 * 128)


def test_keys_of_latent_heads_and_scores_of_the_largest_part_are_reckoned_with() -> None:
    def bytes_of(count: Any, changes: dict[str, Any], **model: Any) -> int:
        asked = config_of({"parallel.context": 2, "parallel.context_by": "ring", "train.dtype": "bf16"} | changes)
        spec = replace(read_model_shape(asked), **model)
        found: int = count(asked, SimpleNamespace(spec=spec))
        return found

    latent = LatentSpec(query_rank=0, key_rank=16, plain_dim=24, value_dim=16)
    plain = bytes_of(bytes_of_other_keys, {})
    assert plain == 2 * 8 * 2 * 2 * 8 * 2  # two parts of a row, keys and values of two heads of 8
    assert bytes_of(bytes_of_other_keys, {}, latent=latent) == 4 * plain
    # Of 16 positions the rank with twelve holds four of the other, which a ring has twice.
    assert bytes_of(bytes_of_other_keys, {"balance.context": [3, 1]}) == plain / 2
    layers = {"parallel.context_by": "gather", "memory.activations": "none"}
    assert bytes_of(bytes_of_other_keys, layers | {"balance.context": [3, 1]}) == plain / 4 * config_of({}).model.layers
    even = bytes_of(bytes_of_scores, {})
    assert even == TILE_QUERIES * 8 * 4 * TILE_SCORE_BYTES
    assert bytes_of(bytes_of_scores, {"balance.context": [3, 1]}) == 1.5 * even


def test_a_group_is_as_fast_as_its_slowest_rank_with_its_part() -> None:
    speeds = [Speed(1.0, 0.1, 4), Speed(3.0, 0.2, 4), Speed(2.0), Speed(2.0, 0.0, UNBOUND)]
    by_speed = join_speeds(config_of({"parallel.context": 2}), speeds)
    assert by_speed[0].sequence_s == pytest.approx(1.5) and by_speed[1].sequence_s == 2.0
    assert [each.most for each in by_speed] == [2, UNBOUND]  # a rank with 3/4 of a row has room for 4 halves
    few = join_speeds(config_of({"parallel.context": 2}), [Speed(1.0, most=1), Speed(3.0, most=1)])
    assert few[0].most == 1
    even = join_speeds(config_of({"parallel.context": 2, "balance.context": "even"}), speeds)
    assert (even[0].sequence_s, even[0].fixed_s, even[0].most) == (3.0, 0.2, 4)
    assert join_speeds(config_of({}), speeds) == speeds


def test_ranks_are_measured_with_a_part_of_a_row() -> None:
    asked = config_of({"parallel.context": 2, "balance.context": [3, 1], "parallel.context_by": "gather"})
    asked, _ = resolve_autos(asked, device="cpu", world=2)
    short, part = shorten_rows(asked, make_workload(asked, read_model_shape(asked)))
    assert (short.data.seq_len, part.positions, short.parallel.context) == (8, 8, 1)
