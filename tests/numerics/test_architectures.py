"""Whole runs of a family unlike the others and of a model of one's own walk one curve on any number of ranks, and go on
as if nothing was. Every family without the rest of a run: tests/dist/test_families.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.numerics.runs import walk
from tests.numerics.test_rank_layout import assert_same

# A norm after the feed-forward layer, whose weight starts at zero and so the layer as if it had none.
OWN = """
from phalanx.models import layers, llama


class Block(llama.Block):
    def __init__(self, spec, layer):
        super().__init__(spec, layer)
        self.after = layers.RMSNorm(spec.hidden, spec.norm_eps)

    def forward(self, x, *rest):
        return self.after(super().forward(x, *rest)) + x


class Model(llama.Llama):
    block = Block
    hf_names = llama.HF_NAMES | {"layers.{i}.after.weight": "model.layers.{i}.after.weight"}

    @staticmethod
    def initial(name, spec):
        return ("zeros",) if ".after." in name else llama.llama_init_rule(name, spec)
"""
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"model__architecture": "gpt2", "model__kv_heads": 4, "model__tie_embeddings": True},
    "own": {"model__code": "FOLDER/own.py"},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_two_ranks_walk_the_curve_of_one(kind: str, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    changes = {key: str(value).replace("FOLDER", str(tmp_path)) if key == "model__code" else value
               for key, value in CHANGES[kind].items()} | {"train__steps": 4}  # fmt: skip
    one = walk(1, tmp_path / "one", tokens, **changes)
    assert_same(walk(2, tmp_path / "two", tokens, **changes), one)
    if kind == "own":
        # It goes on from its checkpoint, and its own parameters with it.
        walk(1, tmp_path / "torn", tokens, **changes | {"train__steps": 2, "optim__decay_steps": 12})
        whole = walk(1, tmp_path / "whole", tokens, **changes | {"optim__decay_steps": 12})
        torn = walk(1, tmp_path / "torn", tokens, **changes | {"optim__decay_steps": 12})
        assert torn.losses == whole.losses
        assert any("after" in name for name in torn.state)
