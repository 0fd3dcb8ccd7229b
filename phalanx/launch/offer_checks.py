"""Whether what a leader offers is what this node was started for. Pure functions.

An offer decides which code is imported and which files are opened here. So each node holds it against its own recipe,
spares and nodes that come back too: they were all started with one.
"""

import types
import typing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.config import load
from phalanx.config.schema import Config, get_knob, iter_knobs
from phalanx.core.errors import ConfigError
from phalanx.core.faults import Fault
from phalanx.elastic.membership.admission import redact
from phalanx.planner.recipe_keys import CHOICE_FIELDS

SHOWN = 3  # keys that a sentence names


def check_offer(requested: Config, offered: Config) -> None:
    """Raise ConfigError where a leader's resolved configuration does not follow from `requested`, this node's
    recipe."""
    different = [key for key, info in iter_knobs() if not _follows(key, info.annotation, requested, offered)]
    if different:
        both = [(key, _plain(offered, key), _plain(requested, key)) for key in different[:SHOWN]]
        said = "; ".join(f"{key} is {theirs!r} there and {mine!r} here" for key, theirs, mine in both)
        raise ConfigError(
            f"the leader offers another recipe than this node was started with: {said}; start all nodes with the same "
            "recipe and the same keys"
        )


def _follows(key: str, annotation: Any, wanted: Config, offered: Config) -> bool:
    """Whether the offered value of a key may be what the recipe's comes to. Besides what is the same, that is: what an
    `auto` was resolved to; what a plan decides, where parallel.layout is auto and the recipe does not say; and the
    second copy of the state, and a file of measurements, that are of no use in a layout and were left out."""
    mine, theirs = get_knob(wanted, key), get_knob(offered, key)
    if mine == theirs:
        return True
    if mine == "auto":
        return theirs in ("train", wanted.model.from_hf) if key == "data.tokenizer" else _resolves(annotation)
    planned = wanted.parallel.layout == "auto"
    if key == "parallel.layout":
        return planned and theirs == "given"
    if key == "balance.hardware":
        return planned and theirs is None
    if key == "optim.double_buffer" and not theirs:
        return True
    return planned and key in CHOICE_FIELDS and key not in load.find_explicit_keys(wanted)


def _resolves(annotation: Any) -> bool:
    """Whether the `auto` of a key of this type stands for what is found out, and that is no text of any content, which
    could name a file or a program."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    plain = [option.__origin__ if typing.get_origin(option) is typing.Annotated else option for option in options]
    return str not in plain and any("auto" in typing.get_args(option) for option in plain)


def _plain(config: Config, key: str) -> Any:
    """A value as JSON has it, as others may read it."""
    tree: Any = config.model_dump(mode="json")
    for part in key.split("."):
        tree = None if tree is None else tree[part]
    return redact(tree)


def check_faults(asked: Sequence[Fault], offered: Sequence[Fault]) -> None:
    """Raise ConfigError where a leader offers other faults than this node was asked for; their attempts count from the
    first one of the run folder."""
    later = {theirs.attempt - mine.attempt for mine, theirs in zip(asked, offered, strict=False)}
    same = [replace(each, attempt=1) for each in asked] == [replace(each, attempt=1) for each in offered]
    if not same or len(later) > 1 or any(by < 0 for by in later):
        raise ConfigError(
            "the leader offers other faults than this node's --inject; start all nodes with the same ones"
        )
