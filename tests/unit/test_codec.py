"""Codecs: what they lose is bounded, what they keep is the same however a tensor is cut, and nothing odd gets lost."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.compression import BLOCK, CODECS, NO_COMPRESSION, Codec, Int8Codec, wire_bytes_per_element
from phalanx.layout.buckets import COMPRESSED_BYTES

TYPES = [torch.float32, torch.float64, torch.bfloat16]


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    coded = torch.full((codec.byte_size(values.numel()) + 1,), 7, dtype=torch.uint8)
    codec.encode(values, coded[:-1])
    assert coded[-1] == 7
    found = torch.empty_like(values)
    codec.decode(coded[:-1], found)
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 1000])
def test_int8_is_off_by_half_a_step_at_most(count: int, dtype: torch.dtype) -> None:
    magnitudes = torch.logspace(-20, 20, max(count, 1), dtype=torch.float64)[:count]
    values = (torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)).mul(magnitudes)
    values = values.to(dtype)
    found = there_and_back(CODECS["int8"], values)
    for block, coded in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        greatest = block.double().abs().max() if len(block) else 0.0
        rounded = 2**-8 if dtype == torch.bfloat16 else 0.0
        assert (block.double() - coded.double()).abs().le(greatest * (0.5 / 127 * 1.002 + rounded)).all()
        assert (block.sign() * coded.sign() >= 0).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_bf16_rounds_to_the_nearest(dtype: torch.dtype) -> None:
    values = torch.randn(77, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    assert torch.equal(there_and_back(CODECS["bf16"], values), values.to(torch.bfloat16).to(dtype))


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_stays_so(name: str) -> None:
    for odd in (math.inf, -math.inf, math.nan):
        values = torch.full((3 * BLOCK,), 127.0)
        values[BLOCK + 5] = odd
        found = there_and_back(CODECS[name], values)
        assert not found[BLOCK + 5].isfinite()
        assert torch.equal(found[:BLOCK], values[:BLOCK]) and torch.equal(found[2 * BLOCK :], values[2 * BLOCK :])


def test_zeros_and_the_least_numbers_stay_what_they_are() -> None:
    values = torch.zeros(2 * BLOCK)
    values[BLOCK:] = torch.linspace(-1, 1, BLOCK) * 1e-38
    found = there_and_back(CODECS["int8"], values)
    assert torch.equal(found[:BLOCK], values[:BLOCK])
    assert (found - values).abs().max() < 1e-39 and found.isfinite().all()


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 70))
def test_what_becomes_of_an_element_does_not_depend_on_cuts_between_blocks(a: int, b: int, rest: int) -> None:
    values = torch.randn(6 * BLOCK + rest, generator=torch.Generator().manual_seed(rest))
    cuts = sorted([a * BLOCK, b * BLOCK])
    parts = values.tensor_split(cuts)
    for codec in CODECS.values():
        cut = torch.cat([there_and_back(codec, part) for part in parts])
        assert torch.equal(cut, there_and_back(codec, values))


def test_sizes() -> None:
    assert [Int8Codec().byte_size(count) for count in (0, 1, 64, 65, 128)] == [0, 4, 66, 70, 132]
    assert wire_bytes_per_element(torch.float32, NO_COMPRESSION) == 4
    assert wire_bytes_per_element(torch.float32, "bf16") == wire_bytes_per_element(torch.bfloat16, "bf16") == 2
    assert wire_bytes_per_element(torch.float32, "int8") == wire_bytes_per_element(torch.bfloat16, "int8") == 1 + 2 / 64


def test_layouts_count_the_bytes_that_codecs_send() -> None:
    assert {name: codec.byte_size(BLOCK) / BLOCK for name, codec in CODECS.items()} == {
        name: count for name, count in COMPRESSED_BYTES.items() if name != NO_COMPRESSION
    }
