"""What a run on an accelerator can be, and the fewest runs in which any two, or three, of these occur together.

A cell names one value of each factor; no two values have the same name.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

Cell = tuple[str, ...]

SHARDED = {"parallel.engine": "sharded"}
ENGINES: dict[str, dict[str, Any]] = {
    "single": {"parallel.engine": "single"},
    "fsdp2": {"parallel.engine": "fsdp2"},
    "zero 1": SHARDED | {"parallel.zero": 1},
    "zero 1, two slots": SHARDED | {"parallel.zero": 1, "optim.double_buffer": True, "optim.clip_norm": None},
    "zero 2": SHARDED | {"parallel.zero": 2},
    "zero 3": SHARDED | {"parallel.zero": 3},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {},
    "uneven shards": {"balance.optimizer_state": [3, 1], "balance.batch": [5, 3]},
    "two copies": {"parallel.shard_degree": 1},
    "tensor": {"parallel.tensor": 2, "parallel.sequence_parallel": False},
    "tensor and sequence": {"parallel.tensor": 2, "parallel.sequence_parallel": True},
    "pipeline": {"parallel.pipeline": 2},
    "tied pipeline": {"parallel.pipeline": 2, "model.tie_embeddings": True},
}
# Where ranks are, as `run_on_device` has it.
PLACES: dict[str, dict[str, Any]] = {
    "alone": {},
    "a device each": {},
    "no collectives": {"collectives": False},
    "one device": {"on": ["sim:0", "sim:0"], "devices": 1},
    "the CPU and the second device": {"on": ["cpu", "sim:1"]},
}
ORDERS: dict[str, dict[str, Any]] = {
    "lazy": {},
    "main_last": {},
    "side_last": {},
    "random": {},
    "threads": {"delay_ms": 2},
}
TYPES: dict[str, dict[str, Any]] = {
    "fp32": {"train.dtype": "fp32"},
    "fp16": {"train.dtype": "fp16", "optim.lr": 1e-3},
    "bf16": {"train.dtype": "bf16", "optim.lr": 1e-3},
}
UPDATES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "8-bit AdamW": {"optim.name": "adamw8bit", "model.hidden": 64, "model.intermediate": 80},
    "LoRA": {},  # whose model is that of a folder
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "kept": {},
    "selective": {"memory.activations": "selective"},
    "full": {"memory.activations": "full"},
    "offload": {"memory.activations": "offload", "memory.offload_prefetch_blocks": 1},
}
ENDS: dict[str, dict[str, Any]] = {"undisturbed": {}, "resumed from memory": {}, "resumed from a checkpoint": {}}
CANDIDATES = 12  # for each cell
FACTORS = (ENGINES, LAYOUTS, PLACES, ORDERS, TYPES, UPDATES, ACTIVATIONS, ENDS)

SEVERAL = frozenset(LAYOUTS) - {"one rank"}
PIPELINES, TENSORS = {"pipeline", "tied pipeline"}, {"tensor", "tensor and sequence"}
# What the package refuses (test_matrix.py sees that it does): any of the first with any of the second.
REFUSED = (
    ({"single"}, SEVERAL),
    ({"fsdp2"}, SEVERAL - {"two ranks"}),
    ({"zero 3", "offload"}, PIPELINES),
    ({"LoRA"}, PIPELINES | TENSORS),
    ({"8-bit AdamW"}, TENSORS),
)
# What there is not.
NOTHING = (
    ({"one rank"}, set(PLACES) - {"alone"}),
    ({"alone"}, SEVERAL),
    ({"single"}, set(PLACES) - {"alone"}),
    ({"a device each"}, set(ORDERS) - {"threads"}),  # whose collectives need threads
    ({"two copies"}, {"the CPU and the second device"}),  # unlike devices hold one copy
)
APART = (*REFUSED, *NOTHING)


def factors(orders: Sequence[str]) -> list[list[str]]:
    """The values of each factor, with these orders alone."""
    return [[name for name in factor if factor is not ORDERS or name in orders] for factor in FACTORS]


def goals(strength: int, orders: Sequence[str]) -> set[frozenset[str]]:
    """All sets of values, of so many factors, that some cell has."""
    search = _Search(strength, factors(orders))
    return {
        frozenset(values)
        for some in itertools.combinations(search.factors, strength)
        for values in itertools.product(*some)
        if next(search.completed(values), None)
    }


def cells(strength: int, orders: Sequence[str]) -> list[Cell]:
    """Few cells, always the same, in which all `goals` occur: of several that begin with one that is left each, and
    have, factor by factor, the value with which most others occur, the one that has most of those left."""
    search, found = _Search(strength, factors(orders)), list[Cell]()
    search.left = goals(strength, orders)
    while search.left:
        first = sorted(map(sorted, search.left))[:: max(1, len(search.left) // CANDIDATES)]
        found.append(max((next(search.completed(goal)) for goal in first), key=lambda cell: len(search.had(cell))))
        search.left -= search.had(found[-1])
    return found


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """Few of these in which each of their values occurs: again and again the one that has most of those left."""
    left, found = set(itertools.chain(*cells)), list[Cell]()
    while left:
        found.append(max(cells, key=lambda cell: len(left & set(cell))))
        left -= set(found[-1])
    return found


class _Search:
    """Looks for cells that have what is left of the goals."""

    def __init__(self, strength: int, factors: list[list[str]]) -> None:
        self.strength, self.factors, self.left = strength, factors, set[frozenset[str]]()
        pairs = (pair for one, other in APART for pair in itertools.product(one, other))
        self.apart = {frozenset(pair) for pair in pairs}  # no cell has both

    def had(self, cell: Cell) -> set[frozenset[str]]:
        return {frozenset(values) for values in itertools.combinations(cell, self.strength)} & self.left

    def completed(self, chosen: Sequence[str]) -> Iterator[Cell]:
        """Cells that have all `chosen` values, those first that are needed most."""
        if any(frozenset(pair) in self.apart for pair in itertools.combinations(chosen, 2)):
            return
        factor = next((each for each in self.factors if not set(each) & set(chosen)), None)
        if factor is None:
            yield tuple(name for each in self.factors for name in chosen if name in each)
            return

        def gain(value: str) -> int:
            others = itertools.combinations(chosen, self.strength - 1)
            return sum(frozenset((value, *some)) in self.left for some in others)

        for value in sorted(factor, key=gain, reverse=True):
            yield from self.completed([*chosen, value])


def recipe_of(cell: Cell) -> dict[str, Any]:
    """The keys of a cell's recipe."""
    kinds = [factor for factor in FACTORS if factor is not PLACES and factor is not ORDERS]
    return {key: value for kind in kinds for name in cell for key, value in kind.get(name, {}).items()}
