"""Four 8-bit integers in an int32, so that the sum of the int32 is the sum of each: Horovod sums no int8 of torch.

With levels l0 to l3 of at most `levels`, a word is l0 + l1 2^8 + l2 2^16 + l3 2^24, as numbers and not as bits.
While num_ranks * levels <= 127 a sum of words stays within int32, and its bytes, offset to be positive, are
the sums of the levels.
"""

from __future__ import annotations

import torch

ONES = 0x01010101


def num_words(num_values: int) -> int:
    return -(-num_values // 4)


def pack(values: torch.Tensor, *, levels: int) -> torch.Tensor:
    """int8 values within +-levels, a multiple of four of them, as int32 words in the same memory."""
    words = values.view(torch.int32)
    # Bytes wrap: -3 is 253, and 253 + 5 is 2.
    values.view(torch.uint8).add_(levels)
    return words.sub_(levels * ONES)


def unpack(words: torch.Tensor, *, levels: int, num_ranks: int) -> torch.Tensor:
    """The sums of `num_ranks` packed int8 values, as int8 in the memory of `words`."""
    words.add_(num_ranks * levels * ONES)
    return words.view(torch.uint8).sub_(num_ranks * levels).view(torch.int8)
