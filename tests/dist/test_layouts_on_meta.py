"""Models larger than a device, laid out over ranks before anything takes memory: what each rank holds of them."""

import itertools
import math
import resource
import time
from typing import Any

import pytest

from phalanx.comm.mesh import join
from phalanx.config import load, resolve
from phalanx.config.schema import Config
from phalanx.core.placement import Placement
from phalanx.engine.schedule import describe_parameters
from phalanx.layout.buckets import make_buckets
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.models.families.catalog import parameter_count
from phalanx.models.user_model import build_on_meta
from phalanx.optim.make_rule import make_rule
from phalanx.parallel.model_part import partition_model, partition_model_at
from phalanx.parallel.parallelize import precision_of, sharding_units
from phalanx.workload.workload import read_model_shape
from tests.helpers import run_ranks, some

LARGE = {
    "layers": 20, "hidden": 16384, "heads": 128, "kv_heads": 16, "intermediate": 57344, "vocab_size": 32000,
    "max_seq_len": 4096,
}  # fmt: skip
SMALL = {"layers": 6, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "vocab_size": 61}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 x 2 x 2": {"tensor": 2, "pipeline": 2},
    "tensor 8": {"tensor": 8},
    "zero bubble": {"pipeline": 2, "tensor": 2, "schedule": "zero_bubble"},
}


def checked(model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> Config:
    given = {"model": model, "data": {"seq_len": 32}, "parallel": parallel, **sections}
    config, _ = resolve.resolve_autos(load.build_config(given, "a recipe"), device="cpu", world=8)
    return config


def held_on_meta(placement: Placement, model: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of the model, by the way of a run and by counting alone."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    config = checked(model, parallel)
    spec, axes = read_model_shape(config), config.parallel.axes
    with join(placement, 60, axes=axes) as mesh:
        mine, counted = build_on_meta(spec), build_on_meta(spec)
        parted = partition_model(mine, config, mesh, precision_of("bf16", mesh))
        partition_model_at(counted, config, axes.coordinates(placement.rank, placement.world))
        assert all(each.is_meta for each in mine.parameters())
        own = {name: [list(each.shape), each.requires_grad] for name, each in mine.named_parameters()}
        assert own == {name: [list(p.shape), p.requires_grad] for name, p in counted.named_parameters()}
        described = [
            describe_parameters(each, sharding_units(each), make_rule(config.optim)) for each in (mine, counted)
        ]
        assert described[0] == described[1]
        buckets = make_buckets(described[0], (1.0,) * mesh.data.world)
        share = sum(bucket.count_elements(mesh.data.rank) for bucket in buckets)
        ranges = {
            name: [parted.shards[name].offset, parted.shards[name].window] if name in parted.shards else None
            for name in own
        }
        assert sum(math.prod(shape) for shape in parted.shapes.values()) == parameter_count(spec)
    return {
        "elements": {name: math.prod(shape) for name, (shape, _) in own.items()},
        "copies": dict(parted.copies),
        "ranges": ranges,
        "share": share,
        "seconds": time.monotonic() - began,
        "grown_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
    }


@pytest.mark.parametrize(("name", "size"), some(itertools.product(LAYOUTS, ["70 billion", "small"]), 0, 3, 5))
def test_each_rank_has_its_part_on_meta(name: str, size: str) -> None:
    """A model of 69 billion parameters is laid out in seconds and in no memory to speak of."""
    model = SMALL if size == "small" else LARGE
    if name == "tensor 8" and model is SMALL:
        model = model | {"heads": 8}
    found = run_ranks(held_on_meta, 8, 120, model=model, parallel=LAYOUTS[name])
    spec = read_model_shape(checked(model, LAYOUTS[name]))
    axes = MeshAxes(LAYOUTS[name].get("tensor", 1), LAYOUTS[name].get("pipeline", 1))
    copies = axes.data_parallel_size(8)
    # All that ranks hold, each element as often as there are copies of it, is every copy of the model.
    held = sum(count / each["copies"].get(name, 1) for each in found for name, count in each["elements"].items())
    assert held == pytest.approx(copies * parameter_count(spec), rel=1e-12)
    shares = sum(each["share"] for each in found)
    whole = sum(sum(each["elements"].values()) for each in found) / copies
    assert whole <= shares < whole * 1.001 + 64 * 8 * 10 * copies  # with the padding of buckets
    assert max(each["seconds"] for each in found) < 60
    assert sum(each["grown_bytes"] for each in found) < 4e9
    for one, other in itertools.combinations(range(8), 2):
        alike = found[one]["ranges"] == found[other]["ranges"]
        places = [axes.coordinates(rank, 8) for rank in (one, other)]
        assert alike == ((places[0].pipe, places[0].tensor) == (places[1].pipe, places[1].tensor))
