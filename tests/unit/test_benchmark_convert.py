"""The benchmark of exports and imports in miniature: it writes what it says, reads it back, and measures memory."""

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import convert
from phalanx.models.families.catalog import PRESETS, parameter_shapes


def test_every_way_is_measured(tmp_path: Path) -> None:
    spec = replace(
        PRESETS["llama-3.2-1b"], vocab_size=512, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128
    )
    rows, checks = convert.compare(spec, 1, tmp_path, 100_000)
    assert [str(row["way"]).partition(",")[0] for row in rows] == [
        "plain writing", "export from fp32", "plain reading", "import as bfloat16", "plain reading",
        "import as bfloat16", "import as float32", "import as float32",
    ]  # fmt: skip
    assert all(row["GB/s"] > 0 for row in rows)
    assert len(checks) == 1 + 4 + 5
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_what_is_imported_is_what_was_exported(tmp_path: Path) -> None:
    spec = replace(
        PRESETS["llama-3.2-1b"], vocab_size=64, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=32
    )
    wanted = {name: torch.randn(shape) for name, shape in parameter_shapes(spec).items()}
    convert.export(tmp_path / "model", spec, wanted.__getitem__, torch.float32, max_shard_bytes=4000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    kept = {name: torch.zeros(tensor.numel()) for name, tensor in wanted.items()}
    convert.bring_in(tmp_path / "model", spec, kept)
    assert all(torch.equal(kept[name], tensor.flatten()) for name, tensor in wanted.items())


def test_memory_is_seen() -> None:
    with convert.Added() as memory:
        taken = torch.ones(64 << 20, dtype=torch.uint8)
        convert.time.sleep(0.05)
    assert taken.numel() <= memory.bytes < 4 * taken.numel()


def test_a_folder_goes_to_megatron_and_back(tmp_path: Path) -> None:
    spec = replace(
        PRESETS["llama-3.2-1b"], vocab_size=64, hidden=16, layers=2, heads=2, kv_heads=2, head_dim=8, intermediate=32
    )
    rows, checks = convert.compare_conversions(spec, tmp_path, 4000)
    assert [str(row["way"]).split()[0] for row in rows] == [
        "plain", "Hugging", "Megatron", "Hugging", "torch_dist"
    ]  # fmt: skip
    assert len(checks) == 8
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert list((tmp_path / "torch_dist").rglob("metadata.json"))
