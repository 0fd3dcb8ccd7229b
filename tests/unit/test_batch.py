"""How the batch of a step is made, by the formula of docs/data.md written out with plain numbers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load
from phalanx.data.prepare import prepare_for
from phalanx.data.record_files import TokenFile
from tests.dist.command import phalanx, write_place

MASK = 2**64 - 1
BLOCK = 4096


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permuted(j: int, count: int, seed: int, epoch: int, name: str = "") -> int:
    """Where the j-th of `count` things goes."""
    bits = (count - 1).bit_length()
    right_bits = (bits + 1) // 2
    text = f"phalanx order {seed} {epoch}" + (f" {name}" if name else "")
    digest = hashlib.shake_256(text.encode()).digest(64)
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]
    while True:
        left, right = j >> right_bits, j & ((1 << right_bits) - 1)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left ^= mix((right + even) & MASK) & ((1 << bits // 2) - 1)
            right ^= mix((left + odd) & MASK) & ((1 << right_bits) - 1)
        j = left << right_bits | right
        if j < count:
            return j


def window(file: TokenFile, row: int, seq_len: int) -> list[int]:
    return [int(token) for token in file.slice(row * seq_len, row * seq_len + seq_len + 1)]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_place(tmp_path)
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 9}) + "\n" for i in range(40)))
    return tmp_path


def batch(here: Path, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = phalanx(here, "data", "batch", "recipe.yaml", "--json", *arguments)
    assert code == 0, err
    samples: list[dict[str, Any]] = json.loads(out)["samples"]
    return samples


def files_of(here: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[TokenFile]:
    monkeypatch.chdir(here)
    wanted = load.load_recipe(here / "recipe.yaml", [*overrides, "data.tokenizer=train"])
    return [TokenFile(folder) for folder, _ in prepare_for(wanted).train]


def test_the_batch_of_a_step_is_that_of_the_formula(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = files_of(here, monkeypatch, "train.seed=5")
    length, size, seed = 8, 4, 5
    count = (file.tokens - 1) // length
    for step, skipped in ((1, 0), (count // size + 1, 0), (3, 2)):  # the second begins the next epoch within it
        found = batch(here, f"--step={step}", f"--skipped={skipped}", f"train.seed={seed}")
        for offset, sample in enumerate(found):
            i = (step - 1 + skipped) * size + offset
            row = permuted(i % count, count, seed, i // count)
            assert (sample["position"], sample["epoch"], sample["row"]) == (i, i // count, row)
            assert sample["tokens"] == window(file, row, length)
            assert sample["place"] == f"tokens {row * length} to {row * length + length}"
    assert {sample["epoch"] for sample in batch(here, f"--step={count // size + 1}", f"train.seed={seed}")} == {0, 1}


def test_so_is_that_of_a_mixture(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = "data.source=[{path: text.jsonl, weight: 3}, {path: other.jsonl}]"
    files = files_of(here, monkeypatch, mixture)
    quotas = (3072, 1024)
    counts = [(file.tokens - 1) // 8 for file in files]
    for step in (1, 1100):  # the second lies in the second block
        for offset, sample in enumerate(batch(here, f"--step={step}", mixture)):
            block, within = divmod((step - 1) * 4 + offset, BLOCK)
            takes = [permuted(at, BLOCK, 0, block, "mixture") >= quotas[0] for at in range(within + 1)]
            source = int(takes[-1])
            number = block * quotas[source] + takes[:-1].count(takes[-1])
            epoch, index = divmod(number, counts[source])
            row = permuted(index, counts[source], 0, epoch, f"source {source}")
            assert (sample["source"], sample["epoch"], sample["row"]) == (source, epoch, row)
            assert sample["tokens"] == window(files[source], row, 8)


def test_a_batch_is_shown_with_the_beginnings_of_its_texts(here: Path) -> None:
    code, out, err = phalanx(here, "data", "batch", "recipe.yaml", "--step", "2")
    assert code == 0, err
    assert "step 2: 4 samples" in out and "says hello" in out and "source 0 is " in out
    assert phalanx(here, "data", "batch", "recipe.yaml", "--step", "0")[0] == 2
    (here / "talks.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{i}"}]})
            + "\n"
            for i in range(50)
        )
    )
    packed = batch(here, "data.format=chat", "data.chat_template=chatml", "data.seq_len=64", "data.source=talks.jsonl")
    assert all(sample["place"].startswith("document") for sample in packed)
