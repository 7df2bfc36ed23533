"""Codecs against float64: error bounds, lengths, what is not finite, and that the same values give the same bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.errors import UsageError
from hpctrain.reduce.codecs import PIECE, Codec, codec_named
from hpctrain.reduce.wire_formats import CODEC_WIRES
from hpctrain.testing.reductions import encoded, some_values, there_and_back

DTYPES = (torch.float32, torch.float64)
# None, one, around a block, around what is worked on at a time.
LENGTHS = (0, 1, 2, 255, 256, 257, 511, 512, 1000, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 300)
LARGEST_FP32 = torch.finfo(torch.float32).max

every_codec = pytest.mark.parametrize("codec", [codec_named(n) for n in CODEC_WIRES], ids=CODEC_WIRES)
lossy_codec = pytest.mark.parametrize(
    "codec", [codec_named(n) for n in CODEC_WIRES if n != "fp32"], ids=lambda codec: codec.name
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def error_bound(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """What the docstrings promise, for each value, in float64."""
    size = values.double().abs()
    through_float32 = size * 2.0**-24 if values.dtype == torch.float64 else torch.zeros_like(size)
    match codec.name:
        case "fp32":
            return torch.zeros_like(size)
        case "fp16":
            return torch.maximum(size * 2.0**-11, torch.tensor(2.0**-25)) + through_float32
        case "bf16":
            return torch.maximum(size * 2.0**-8, torch.tensor(2.0**-134).double()) + through_float32
        case "int8":
            blocks = [block.amax(dim=0).expand(len(block)) for block in size.split(256) if len(block)]
            largest = torch.cat([*blocks, size[:0]])
            return torch.maximum(largest / 253, torch.tensor(2.0**-126).double())
    raise ValueError(codec.name)


# Nothing above the range of fp16; many of the smallest.
in_range = st.floats(-65504, 65504, width=32) | st.floats(-(2.0**-100), 2.0**-100, width=32)


@every_dtype
@every_codec
@settings(max_examples=150, deadline=None)
@given(values=st.lists(in_range, max_size=600))
def test_any_values_in_range_stay_within_the_bound(
    codec: Codec, dtype: torch.dtype, values: list[float]
) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    back = there_and_back(codec, tensor)
    assert ((back.double() - tensor.double()).abs() <= error_bound(codec, tensor)).all()


@pytest.mark.parametrize("name", ["bf16", "int8"])
@settings(max_examples=150, deadline=None)
@given(values=st.lists(st.floats(-3.38e38, 3.38e38, width=64), min_size=1, max_size=300))
def test_bf16_and_int8_keep_the_range_of_float32(name: str, values: list[float]) -> None:
    codec, tensor = codec_named(name), torch.tensor(values, dtype=torch.float64)
    back = there_and_back(codec, tensor)
    assert ((back - tensor).abs() <= error_bound(codec, tensor)).all()


def test_int8_holds_the_largest_floats_without_overflow() -> None:
    largest = torch.tensor(LARGEST_FP32).view(torch.int32) - torch.arange(5000, dtype=torch.int32)
    values = torch.zeros(5000, 256)
    values[:, 0] = largest.view(torch.float32)
    assert there_and_back(codec_named("int8"), values.view(-1)).isfinite().all()


@every_dtype
@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.floats(width=32), max_size=300))
def test_fp32_gives_back_every_bit(dtype: torch.dtype, values: list[float]) -> None:
    codec, tensor = codec_named("fp32"), torch.tensor(values, dtype=dtype)
    assert codec.exact
    back = there_and_back(codec, tensor)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_fp32_gives_back_float64_in_its_own_precision() -> None:
    values = torch.randn(1001, dtype=torch.float64)
    assert torch.equal(there_and_back(codec_named("fp32"), values), values)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_casts_round_to_nearest_even(name: str, dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    halves = torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2])
    expected = torch.tensor([1.0, 1 + 2 * step, -1.0])
    assert torch.equal(there_and_back(codec_named(name), halves), expected)


def test_int8_rounds_to_nearest_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])  # the scale is 1
    expected = torch.tensor([127.0, 0.0, 2.0, 2.0, 0.0, -2.0])
    assert torch.equal(there_and_back(codec_named("int8"), values), expected)


def test_int8_lays_out_scales_and_then_levels() -> None:
    values = torch.zeros(300)
    values[0], values[256:] = 127.0, -254.0
    data = encoded(codec_named("int8"), values)
    assert data[:8].view(torch.float32).tolist() == [1.0, 2.0]
    levels = data[8:].view(torch.int8)
    assert levels[:2].tolist() == [127, 0]
    assert levels[256:].tolist() == [-127] * 44


@pytest.mark.parametrize(
    ("numel", "num_bytes"),
    [(0, 0), (1, 5), (255, 259), (256, 260), (257, 265), (1 << 32, (1 << 32) + (1 << 26))],
)
def test_int8_takes_a_byte_a_value_and_four_a_block(numel: int, num_bytes: int) -> None:
    assert codec_named("int8").num_bytes(numel) == num_bytes
    assert codec_named("int8").num_bytes(numel, dtype=torch.float64) == num_bytes


def test_casts_take_two_bytes_a_value_and_fp32_what_the_value_takes() -> None:
    for name in ("fp16", "bf16"):
        assert [codec_named(name).num_bytes(7, dtype=d) for d in DTYPES] == [14, 14]
    assert [codec_named("fp32").num_bytes(7, dtype=d) for d in DTYPES] == [28, 56]


@lossy_codec
def test_a_float64_beyond_the_range_comes_out_not_finite(codec: Codec) -> None:
    values = torch.tensor([1.0, -1e300], dtype=torch.float64)
    assert not there_and_back(codec, values)[1].isfinite()


def test_a_block_that_is_not_finite_leaves_the_others_alone() -> None:
    values = some_values(1024, dtype=torch.float32)
    clean = there_and_back(codec_named("int8"), values)
    values[300] = math.nan
    back = there_and_back(codec_named("int8"), values)
    assert not back[256:512].isfinite().any()
    assert torch.equal(torch.cat([back[:256], back[512:]]), torch.cat([clean[:256], clean[512:]]))


def test_int8_blocks_of_denormal_values_lose_no_more_than_the_bound() -> None:
    smallest = 2.0**-149
    values = torch.tensor([smallest, 190 * smallest, -(2.0**-127), 2.0**-120, 0.0]).repeat_interleave(256)
    back = there_and_back(codec_named("int8"), values)
    assert ((back.double() - values.double()).abs() <= 2.0**-126).all()
    assert back[3 * 256] != 0


def test_a_codec_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageError, match="no codec 'int4': give one of fp32, fp16, bf16, int8"):
        codec_named("int4")
