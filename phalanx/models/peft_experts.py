"""Adapters of stacks of experts in PEFT's format, where they are `target_parameters`.

PEFT wraps the module of a layer's experts once for each stack, in the order of definition, so that the first is the
`base_layer` of the second. A wrapper has one A (experts x rank, in), expert by expert, and one B (out, rank x experts),
rank by rank; here they are (experts, rank, in) and (experts, out, rank).
"""

import re
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from phalanx.layout.model_shape import EXPERT_TARGETS

KEY = "target_parameters"  # in adapter_config.json


def read_expert_targets(config: dict[str, Any]) -> set[str] | None:
    """Those of EXPERT_TARGETS that an adapter_config.json names; None where it names other parameters."""
    named = config.get(KEY) or []
    found = [re.fullmatch(r"(?:[\w.]+\.)?(experts\.\w+)_proj", str(each)) for each in named]
    targets = {match[1] for match in found if match is not None}
    known = isinstance(named, list) and all(found) and targets <= set(EXPERT_TARGETS)
    return targets if known else None


def write_expert_targets(targets: Collection[str]) -> list[str]:
    """What `read_expert_targets` reads."""
    return [f"{target}_proj" for target in EXPERT_TARGETS if target in targets]


def name_stack(hf_name: Callable[[str], str], index: int, target: str) -> str:
    """The name of a stack of layer `index` in a model of transformers, whatever the files call its matrices."""
    block, _, _ = hf_name(f"layers.{index}.attention.o.weight").partition(".self_attn.")
    return f"{block}.mlp.{target}_proj"


def name_wrapper(hf_name: Callable[[str], str], index: int, target: str, targets: Collection[str]) -> str:
    """The module that PEFT wraps a stack of layer `index` by, where these `targets` have an adapter."""
    module, _, _ = name_stack(hf_name, index, target).rpartition(".")
    inner = target == EXPERT_TARGETS[0] and set(EXPERT_TARGETS) <= set(targets)
    return f"{module}.base_layer" if inner else module


def split_experts(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor] | None:
    """Ours of PEFT's A and B; None where their shapes are of no whole number of experts."""
    if a.dim() != 2 or b.dim() != 2 or len(a) % rank or not len(a) or b.shape[1] != len(a):
        return None
    experts = len(a) // rank
    return a.view(experts, rank, -1), b.view(len(b), rank, experts).permute(2, 0, 1)


def join_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """PEFT's A and B of ours."""
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1).contiguous()
