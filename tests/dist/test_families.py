"""Families of decoders walk the curve of one process on three ranks with unlike shares of the data, cut into slices
over two, and into stages over two: one start of ranks for all of them."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.comm.mesh import join, single_rank_mesh
from phalanx.core.placement import Placement
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.models.families.catalog import family_of
from tests.dist.tensor_cases import among, driven, whole
from tests.dist.test_pipeline import Walker
from tests.family_cases import CONFIGS, spec_of
from tests.helpers import ALL, run_ranks, some

STEPS = 2 if ALL else 1  # of which the moments are the gradients
# Grouped and whole heads, windows, caps, and key heads that ranks share.
# `make test` divides data of those whose units are unlike: tied and narrow embeddings, experts, and dense blocks first.
UNITS = ("qwen2", "opt, 350M kind", "mixtral", "deepseek_v3")
# And into stages those that differ in their ends, or from block to block.
ENDS = (
    "llama", "qwen2", "gemma3", "falcon, alibi", "gemma2", "gpt2", "gptj", "opt, 350M kind", "baichuan2", "qwen3_moe",
    "gpt_oss", "deepseek_v3", "mixtral",
)  # fmt: skip
# And into slices all but those whose matrices are those of another one, or are cut by tests/dist/test_hf_transform.py.
CUT_ALIKE = (
    "gpt_neox, in turn", "falcon, new decoder", "falcon, 7B kind", "phi3, longrope", "phi3", "opt", "llama, biases",
    "baichuan", "baichuan2, alibi", "qwen2", "mistral", "internlm2", "opt, narrow embedding", "olmo2",
)  # fmt: skip
DROPS_SCORES = ("llama", "mistral", "gemma2", "gpt2", "olmo2, one key head")


def divided(placement: Placement, tensor: int, kinds: list[str], ways: list[dict[str, Any]]) -> dict[str, list[float]]:
    """How far each of `ways` is apart from one process, in losses, norms, parameters and moments."""
    found: dict[str, list[float]] = {}
    with among(placement, tensor) as mesh:
        for kind in kinds:
            spec = replace(spec_of(kind), dropout=0.1, attention_dropout=0.1 if kind in DROPS_SCORES else 0.0)
            with whole(mesh, spec) as other:
                other.walk(STEPS)
                for way in ways:
                    mine = driven(mesh, spec, **way)
                    mine.walk(STEPS)
                    found.setdefault(kind, []).append(mine.apart(other))
                    mine.engine.close()
                other.engine.close()
    return found


def staged(placement: Placement, kinds: list[str]) -> dict[str, list[float]]:
    """The same of two stages."""
    found: dict[str, list[float]] = {}
    with join(placement, 60, axes=MeshAxes(pipeline=placement.world)) as mesh:
        for kind in kinds:
            spec = replace(spec_of(kind), dropout=0.1, attention_dropout=0.1 if kind in DROPS_SCORES else 0.0)
            mine = Walker(mesh, spec, schedule="1f1b")
            with single_rank_mesh(mesh) as single:
                other = Walker(single, spec)
                walked = [[walker.step(number) for number in range(1, STEPS + 1)] for walker in (mine, other)]
                apart = [abs(a[1] - b[1]) for a, b in zip(*walked, strict=True)]
                if mine.pipeline is not None and mine.pipeline.has_loss:
                    apart += [abs(a[0] - b[0]) / b[0] for a, b in zip(*walked, strict=True)]
                state = {(piece.kind, piece.name): piece.tensor for piece in other.engine.pieces()}
                for piece in mine.engine.pieces():
                    part = state[piece.kind, piece.name][piece.start : piece.stop]
                    apart.append(float((piece.tensor - part).abs().max()))
                other.close()
            mine.close()
            found[kind] = apart
    return found


@pytest.mark.parametrize(
    ("world", "tensor", "ways"),
    [
        (3, 1, [{"zero": 1, "sequence": False}]),
        (2, 2, some([{"zero": 0, "sequence": True}, {"zero": 0, "sequence": False}], 0)),  # the latter: test_tensor.py
    ],
    ids=["three ranks", "tensor 2"],
)
def test_ranks_walk_the_curve_of_one(world: int, tensor: int, ways: list[dict[str, Any]]) -> None:
    kinds = [kind for kind in CONFIGS if tensor == 1 or family_of(spec_of(kind)).tensor_plan]
    if not ALL:
        kinds = [kind for kind in kinds if (kind in UNITS if tensor == 1 else kind not in CUT_ALIKE)]
    for found in run_ranks(divided, world, 240, tensor=tensor, kinds=kinds, ways=ways):
        assert list(found) == kinds
        assert {kind: apart for kind, apart in found.items() if not max(apart) < 1e-9} == {}


def test_stages_walk_the_curve_of_one() -> None:
    for found in run_ranks(staged, 2, 240, kinds=list(CONFIGS if ALL else ENDS)):
        assert {kind: apart for kind, apart in found.items() if not max(apart) < 1e-9} == {}
