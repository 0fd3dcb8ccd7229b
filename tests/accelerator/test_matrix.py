"""Whatever can be combined on accelerators computes what one CPU rank does: any three values together, and in `make
test` a few with each value."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.errors import ConfigError
from phalanx.core.records import EventKind
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_export import export
from phalanx.models.llama import Llama, init_slice
from phalanx.models.user_model import shapes_of
from tests.accelerator import matrix
from tests.accelerator.curves import EVERYTHING, killed, on_cpu, on_device
from tests.accelerator.device import needs_device
from tests.accelerator.matrix import Cell
from tests.numerics import runs

QUICK = ("lazy", "main_last", "threads")
PAIRS = matrix.cells(2, QUICK)
CELLS = matrix.cells(3, tuple(matrix.ORDERS)) if EVERYTHING else matrix.covering(PAIRS)
STEPS, KILLED = 4, 3
RECIPE = {
    "train.steps": STEPS, "optim.decay_steps": STEPS, "train.micro_batch": 2 if EVERYTHING else 4,
    "model.layers": 3 if EVERYTHING else 2,
    "resilience.heartbeat_timeout_s": 1,
}  # fmt: skip
LORA = {"rank": 3, "alpha": 9, "dropout": 0.2}
SPEC = ModelSpec(
    vocab_size=runs.VOCAB, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=44, max_seq_len=16
)
# How far losses may be from those of one CPU rank: sums over ranks round elsewhere, and so do kernels of narrow types.
# A moment of 8 bits may then be the next of its 255 codes.
NEAR = {"fp32": 3e-7, "8-bit AdamW": 3e-6, "fp16": 5e-5, "bf16": 3e-4}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose model is far from zero, so that adapters matter."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    shapes = shapes_of(Llama, SPEC)

    def tensor_of(name: str) -> torch.Tensor:
        drawn = init_slice(SPEC, 1, name, 0, torch.Size(shapes[name]).numel(), "cpu", torch.float32)
        return drawn * (1.0 if "norm" in name else 4.0)

    export(folder, SPEC, tensor_of, torch.float32)
    return folder


def changes(keys: dict[str, Any], cell: Cell, base: Path) -> dict[str, Any]:
    """`on_device`'s changes: these keys, with the model of a folder where adapters are trained."""
    if "LoRA" in cell:
        keys = {key: value for key, value in keys.items() if not key.startswith("model.")}
        keys["model"] = {"from_hf": str(base), "dropout": 0.1, "lora": LORA}
    return {key.replace(".", "__"): value for key, value in keys.items()}


@pytest.fixture(scope="session")
def alone(tokens: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one CPU rank computes, by a cell's values that say what is computed; each is run once."""

    @functools.cache
    def of(told: frozenset[str]) -> runs.Outcome:
        keys = RECIPE | matrix.recipe_of(tuple(sorted(told)))
        keys = {
            key: value
            for key, value in keys.items()
            if not key.startswith(("parallel.", "balance.", "optim.double_buffer"))
        }
        folder = tmp_path_factory.mktemp("alone")
        return on_cpu(1, folder, tokens, **changes(keys | {"parallel.engine": "single"}, tuple(told), base))

    telling = frozenset({*matrix.TYPES, *matrix.UPDATES, "tied pipeline", "zero 1, two slots"})
    return lambda cell: of(telling & frozenset(cell))


@needs_device
@pytest.mark.parametrize("number", range(len(CELLS)), ids=["/".join(cell) for cell in CELLS])
def test_a_combination_computes_what_one_cpu_rank_does(
    number: int, alone: Any, base: Path, tokens: Path, tmp_path: Path, shared: Path
) -> None:
    cell = CELLS[number]
    ranks = 1 if "one rank" in cell else 2
    (order,) = set(cell) & set(matrix.ORDERS)
    (place,) = set(cell) & set(matrix.PLACES)
    (ending,) = set(cell) & set(matrix.ENDS)
    how = {"order": order, "seed": number} | matrix.ORDERS[order] | matrix.PLACES[place]
    changed = changes(RECIPE | matrix.recipe_of(cell), cell, base)
    if ending == "undisturbed":
        found = on_device(ranks, tmp_path, tokens, how, **changed)
    else:
        memory = ending == "resumed from memory"
        changed["checkpoint__every"] = 0 if memory else 2
        found = killed(ranks, tmp_path, tokens, how | ({"shared": shared} if memory else {}), KILLED, **changed)
        (resumed,) = runs.events(tmp_path, EventKind.RESUMED)
        assert bool(resumed.get("memory")) == memory
    near = max(NEAR[name] for name in cell if name in NEAR)
    wanted = alone(cell)
    assert found.losses == pytest.approx(wanted.losses, rel=near)
    assert found.evaluations == pytest.approx(wanted.evaluations, rel=near)
    said = [
        each["message"]
        for each in runs.events(tmp_path, EventKind.WARNING)
        if "share one accelerator" in each["message"]
    ]
    assert {message[:11] for message in said} == ({"ranks 0, 1 "} if place == "one device" else set())


def test_every_value_occurs() -> None:
    used = tuple(matrix.ORDERS) if EVERYTHING else QUICK
    assert set(itertools.chain(*CELLS)) == set(itertools.chain(*matrix.factors(used)))


def test_every_two_values_occur_together() -> None:
    """But for those that are said never to."""
    apart = {frozenset(pair) for one, other in matrix.APART for pair in itertools.product(one, other)}
    seen = {frozenset(pair) for cell in PAIRS for pair in itertools.combinations(cell, 2)}
    assert not apart & seen
    for one, other in itertools.combinations(matrix.factors(QUICK), 2):
        assert [pair for pair in itertools.product(one, other) if frozenset(pair) not in apart | seen] == []


@pytest.mark.parametrize("pair", sorted(itertools.chain(*(itertools.product(*each) for each in matrix.REFUSED))))
def test_what_the_package_refuses_is_in_no_cell(
    pair: tuple[str, str], base: Path, tokens: Path, tmp_path: Path
) -> None:
    keys = {"parallel.engine": "sharded"} | RECIPE | matrix.recipe_of(pair)
    given = {key.replace("__", "."): value for key, value in changes(keys, pair, base).items()}
    with pytest.raises(ConfigError, match=r"set parallel|set optim|set memory|remove"):
        runs.job(tmp_path, tokens, given, world=2)
