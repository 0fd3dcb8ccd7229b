"""`DelayedScaling` in a script: a history is that of any micro-batches, ranks and slices, and lives with its layer."""

import copy
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from phalanx.compat.sagemaker import delayed_scaling, loader
from phalanx.compat.sagemaker import transformer_engine as te
from phalanx.compat.sagemaker.install import install
from phalanx.core.errors import ConfigError
from tests.dist.scripts import run_script, written
from tests.helpers import ALL, run_ranks

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch import TransformerLayer, fp8_autocast
from transformers import AutoModelForCausalLM, LlamaConfig

kind, micro = sys.argv[1], int(sys.argv[2])
recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=2, margin=1)
tsm.init()
rank, slices = dist.get_rank(), tsm.state.tp_size
ranks, place = dist.get_world_size() // slices, rank // slices
torch.manual_seed(1)



class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(48, 32)
        self.layer = TransformerLayer(32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")
        self.head = torch.nn.Linear(32, 48)

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids)))


def logits_of(ids):
    found = model(ids)
    return found if kind == "layers" else found["logits"]


if kind == "layers":
    model = Layers().double()
else:
    model = tsm.transform(AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, tie_word_embeddings=False,
    )).double())
model = FSDP(model, use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for step in range(4):
    ids = ((torch.arange(8).unsqueeze(1) * 7 + step + 3 * torch.arange(16)) % 48).chunk(ranks)[place]
    total = 0.0
    for part in ids.chunk(micro):
        with fp8_autocast(enabled=True, fp8_recipe=recipe):
            logits = logits_of(part)[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / micro
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad(), fp8_autocast(enabled=True, fp8_recipe=recipe):  # records nothing
        logits_of(100 * ids % 48)
    total = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(total)
    print(f"step {step} loss {total.item() / dist.get_world_size():.12f}")
kept = {name: table for name, table in model.state_dict().items() if name.endswith(".fp8_history")}
for name, table in sorted(kept.items()):
    print("history", name, *(number.hex() for number in table.flatten().tolist()))
dist.destroy_process_group()
"""


def run(folder: Path, kind: str, ranks: int, micro: int, settings: str = "{}") -> tuple[list[float], list[list[float]]]:
    """The losses, and the histories by name, each (products, 3, 2) flattened."""
    folder.mkdir()
    printed: list[str] = run_ranks(
        run_script, ranks, timeout_s=200, script=written(folder, SCRIPT), arguments=[kind, str(micro)],
        settings=settings,
    )  # fmt: skip
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed[0])]
    tables = re.findall(r"^history \S+ (.*)$", printed[0], re.MULTILINE)
    return losses, [[float.fromhex(number) for number in table.split()] for table in tables]


def test_a_history_is_that_of_any_micro_batches_and_ranks(tmp_path: Path) -> None:
    whole, tables = run(tmp_path / "whole", "layers", 1, 1)
    assert [len(table) for table in tables] == [12, 6, 6] and all(min(table) > 0 for table in tables)
    for number, (ranks, micro) in enumerate([(1, 4), (2, 2), *([(4, 1)] if ALL else [])]):
        losses, found = run(tmp_path / str(number), "layers", ranks, micro)
        assert losses == pytest.approx(whole, rel=1e-9)
        assert found == tables


@pytest.mark.skipif(not ALL, reason="PHALANX_TEST_ALL is not set")
def test_a_history_is_that_of_any_slices(tmp_path: Path) -> None:
    """transformers' norms compute in float32, whatever the model is in."""
    whole, tables = run(tmp_path / "whole", "llama", 1, 1)
    assert len(tables) == 7
    losses, found = run(tmp_path / "sliced", "llama", 4, 1, '{"tensor_parallel_degree": 2}')
    assert losses == pytest.approx(whole, rel=1e-6)
    for table, wanted in zip(found, tables, strict=True):
        assert table == pytest.approx(wanted, rel=1e-4)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recipe is left to other tests."""
    monkeypatch.setattr(te._autocast, "newest", lambda: None)


def train_step(layer: Any, x: torch.Tensor, recipe: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y: torch.Tensor = layer(x)
    y.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_layer_has_a_history_in_its_state(kind: str) -> None:
    recipe = te.DelayedScaling(fp8_format=te.Format.HYBRID, amax_history_len=3)
    torch.manual_seed(0)
    sizes, products = (48, 80), 2 if kind == "LayerNormMLP" else 1
    layer, other = getattr(te, kind)(*sizes), getattr(te, kind)(*sizes)
    x = torch.randn(4, 48)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    first = train_step(layer, x, recipe, optimizer)
    assert torch.equal(layer(x), layer(x)) and layer.state_dict()["fp8_history"].shape == (products, 3, 3)
    plain = layer(x).detach()
    other.load_state_dict(layer.state_dict())
    copied = copy.deepcopy(layer)
    for each in (layer, other, copied):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            rounded = each(x).detach()
        assert 1e-4 < float((rounded - plain).norm() / plain.norm()) < 0.1
    again = [
        train_step(each, x, recipe, torch.optim.SGD(each.parameters(), lr=1e-3)) for each in (layer, other, copied)
    ]
    assert torch.equal(again[0], again[1]) and torch.equal(again[0], again[2]) and not torch.equal(again[0], first)
    tables = [each.state_dict()["fp8_history"] for each in (layer, other, copied)]
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    assert bool((tables[0][..., 1:] > 0).all()) and not tables[0][..., 0].any()
    recipe = te.DelayedScaling(amax_history_len=4)
    longer = getattr(te, kind)(*sizes)
    with pytest.raises(ConfigError, match="the amax_history_len that it was saved with"):
        longer.load_state_dict(layer.state_dict())


@pytest.mark.usefixtures("newest")
def test_where_there_is_no_place_for_a_history_blocks_are_scaled(caplog: pytest.LogCaptureFixture) -> None:
    te._tell.cache_clear()
    before = te.Linear(48, 32)
    recipe = te.DelayedScaling(fp8_format=te.Format.HYBRID)
    after, x = te.Linear(48, 32), torch.randn(2, 48)
    for layer, given, words in (
        (before, recipe, "DelayedScaling was made after the model"),
        (after, None, "it got no DelayedScaling"),
        (after, te.DelayedScaling(fp8_format=te.Format.E4M3), "the recipe's format is E4M3"),
        (after, te.DelayedScaling(amax_compute_algo=max), "a custom amax_compute_algo"),
        (after, te.DelayedScaling(reduce_amax=False), "the recipe's reduce_amax is not supported"),
    ):
        caplog.clear()
        with te.fp8_autocast(enabled=True, fp8_recipe=given):
            assert torch.equal(layer(x), te.fp8.linear_by_emulation(x, layer.weight, layer.bias))
        assert words in caplog.text
    assert "fp8_history" not in before.state_dict()
    before.load_state_dict(after.state_dict())
    assert torch.equal(before.weight, after.weight)
    words = "margin=2, but when its layers were made the newest had 0"
    with te.fp8_autocast(fp8_recipe=te.DelayedScaling(margin=2)), pytest.raises(ConfigError, match=words):
        after(x)


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("delayed", [False, True])
def test_within_torch_autocast_products_are_of_its_type(delayed: bool) -> None:
    recipe = te.DelayedScaling(fp8_format=te.Format.HYBRID) if delayed else None
    torch.manual_seed(0)
    layer, x = te.LayerNormMLP(48, 80), torch.randn(4, 48, requires_grad=True)
    for _ in range(2):
        found = []
        for fp8 in (False, True):
            layer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16), te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
                y = layer(x)
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
            grad = layer.fc1_weight.grad
            assert grad is not None and grad.dtype == torch.float32
            found.append(grad)
        if delayed:
            delayed_scaling.end_step()
    difference = float((found[0] - found[1]).norm() / found[0].norm())
    assert 1e-3 < difference < 0.2


def write(layer: torch.nn.Module, folder: Path) -> None:
    dcp.save_state_dict({"model": layer.state_dict()}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("read", ["phalanx", "torch"])
def test_a_checkpoint_without_histories_can_be_read(read: str, tmp_path: Path) -> None:
    install()
    before, x = te.Linear(48, 32), torch.randn(4, 48)
    write(before, tmp_path / "before")
    recipe = te.DelayedScaling(fp8_format=te.Format.HYBRID, amax_history_len=3)
    trained, found = te.Linear(48, 32), te.Linear(48, 32)
    train_step(trained, x, recipe, torch.optim.SGD(trained.parameters(), lr=1e-3))
    write(trained, tmp_path / "after")
    for folder, layer in (("after", trained), ("before", before)):
        state = {"model": found.state_dict()}
        if read == "phalanx":
            loader.load(state, checkpoint_id=tmp_path / folder)
        else:
            dcp.load_state_dict(
                state_dict=state, storage_reader=dcp.FileSystemReader(tmp_path / folder), no_dist=True
            )  # fmt: skip
        found.load_state_dict(state["model"])
        assert torch.equal(found.weight, layer.weight)
        assert torch.equal(found.state_dict()["fp8_history"], trained.state_dict()["fp8_history"])


def test_what_is_not_finite_does_not_stay() -> None:
    history = delayed_scaling.LayerHistory(1, SimpleNamespace(amax_history_len=2, amax_compute_algo="most_recent"))
    history.scalings[0].note(0, torch.tensor([1.0, torch.inf]))
    history.scalings[0].note(0, torch.tensor([3.0]))
    history.append(history.take_maxima())
    assert history.table.tolist() == [[[0.0, 3.0], [0.0, 0.0], [0.0, 0.0]]]
    history.append(torch.tensor([[1.0, 2.0, -1.0]]))
    assert history.table.tolist() == [[[3.0, 1.0], [0.0, 2.0], [0.0, 0.0]]]
    assert history.scalings[0].scales == [2.0**-8, 2.0**-7, None]


def test_a_copy_takes_part_in_steps_once_it_is_trained() -> None:
    """Such as an average of weights, which may be on one rank alone."""
    history = delayed_scaling.LayerHistory(1, SimpleNamespace(amax_history_len=2))
    copied = copy.deepcopy(history)
    x, weight = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)
    with torch.no_grad():
        copied.linear(0, x, weight, None)
    assert places(history) == 1 and places(copied) == 0
    copied.linear(0, x, weight, None)
    copied.linear(0, x, weight, None)
    assert places(copied) == 1


def places(history: delayed_scaling.LayerHistory) -> int:
    return sum(living() is history for _, living in delayed_scaling._places)


def test_the_history_of_a_model_that_is_gone_takes_no_part() -> None:
    gone, kept = (delayed_scaling.LayerHistory(1, SimpleNamespace(amax_history_len=2)) for _ in range(2))
    kept.scalings[0].note(0, torch.tensor([3.0]))
    dead = weakref.ref(gone)
    del gone
    assert dead() is None  # nothing else keeps it
    delayed_scaling.end_step()
    assert kept.table[0, 0].tolist() == [0.0, 3.0]
    before = kept.table
    delayed_scaling.end_step()  # of an optimizer of another model
    assert kept.table is before
