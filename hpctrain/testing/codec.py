"""The contract of a codec: `hpctrain.reduce.Codec`."""

from __future__ import annotations

import math
import threading
from typing import ClassVar

import pytest
import torch

from hpctrain.reduce import Codec

# None, one, around a block of 256, around the pieces of 131,072 in which our codecs work.
LENGTHS = (0, 1, 2, 255, 256, 257, 511, 512, 1000, 131_071, 131_072, 131_073, 262_444)

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def some_values(numel: int, *, dtype: torch.dtype, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Returns normal values, shape (numel,), whose magnitude changes from block to block by e^spread and more."""
    random = torch.Generator().manual_seed(seed)
    factors = torch.exp(spread * torch.randn(-(-numel // 256) or 1, generator=random, dtype=torch.float64))
    values = torch.randn(numel, generator=random, dtype=torch.float64)
    return (values * factors.repeat_interleave(256)[:numel]).clamp(-6e4, 6e4).to(dtype)


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Returns the encoded bytes, 1-d uint8. Raises AssertionError if `encode` writes to memory behind its output."""
    num_bytes = codec.num_bytes(values.numel(), dtype=values.dtype)
    memory = torch.full((num_bytes + 8,), 0xA5, dtype=torch.uint8)
    codec.encode(values, out=memory[:num_bytes])
    assert (memory[num_bytes:] == 0xA5).all(), "encode wrote beyond its end"
    return memory[:num_bytes]


def decoded(codec: Codec, data: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, math.nan)
    codec.decode(data, out=out)
    return out


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return decoded(codec, encoded(codec, values), like=values)


class CodecContract:
    """Set `codec`; `error_bound` says how far a value may come out from what it was."""

    codec: ClassVar[Codec]

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the largest absolute error of each value: float64, shape of `values`. 0 for exact codecs."""
        if self.codec.exact:
            return torch.zeros(values.shape, dtype=torch.float64)
        raise NotImplementedError

    @every_dtype
    @pytest.mark.parametrize("numel", LENGTHS)
    def test_errors_stay_within_the_bound(self, dtype: torch.dtype, numel: int) -> None:
        values = some_values(numel, dtype=dtype, seed=numel)
        error = (there_and_back(self.codec, values).double() - values.double()).abs()
        assert (error <= self.error_bound(values)).all()

    @every_dtype
    @pytest.mark.parametrize("numel", LENGTHS)
    def test_add_is_decode_and_add_to_the_bit(self, dtype: torch.dtype, numel: int) -> None:
        values, total = some_values(numel, dtype=dtype), some_values(numel, dtype=dtype, seed=1)
        data = encoded(self.codec, values)
        expected = total + decoded(self.codec, data, like=total)
        self.codec.add(data, out=total)
        assert torch.equal(total, expected)

    @every_dtype
    def test_the_same_values_give_the_same_bytes_wherever_they_lie(self, dtype: torch.dtype) -> None:
        """Memory of another alignment, another thread, other things encoded before."""
        values = some_values(131_849, dtype=dtype)
        values[5], values[300] = math.nan, math.inf
        first = encoded(self.codec, values).clone()
        encoded(self.codec, some_values(999, dtype=dtype, seed=3))
        elsewhere = torch.empty(len(values) + 3, dtype=dtype)[3:].copy_(values)
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(encoded(self.codec, elsewhere)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], first)
        assert torch.equal(encoded(self.codec, elsewhere), first)

    @every_dtype
    def test_data_that_begin_inside_a_message_are_read_the_same(self, dtype: torch.dtype) -> None:
        """The 8-byte alignment that the contract promises is enough."""
        values = some_values(1003, dtype=dtype)
        data = encoded(self.codec, values)
        message = torch.zeros(len(data) + 24, dtype=torch.uint8)
        message[8 : 8 + len(data)] = data
        inside = decoded(self.codec, message[8 : 8 + len(data)], like=values)
        assert torch.equal(inside, decoded(self.codec, data, like=values))

    @every_dtype
    @pytest.mark.parametrize("numel", [1, 256, 300, 131_172])
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_what_is_not_finite_comes_out_not_finite(
        self, dtype: torch.dtype, numel: int, bad: float
    ) -> None:
        for place in {0, numel // 2, numel - 1}:
            values = some_values(numel, dtype=dtype)
            values[place] = bad
            assert not there_and_back(self.codec, values)[place].isfinite()
            total = torch.zeros_like(values)
            self.codec.add(encoded(self.codec, values), out=total)
            assert not total[place].isfinite()

    @every_dtype
    def test_zeros_stay_zeros(self, dtype: torch.dtype) -> None:
        zeros = torch.zeros(600, dtype=dtype)
        assert torch.equal(there_and_back(self.codec, zeros), zeros)
