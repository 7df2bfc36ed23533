"""Permutations that are evaluated, never stored: constant memory at any index of any size.

A generalised Feistel cipher on Z_a x Z_b with a * b just above the number of values, and cycle walking for the
few values beyond it. All arithmetic is on unsigned 64-bit integers, so every machine gets the same.
Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002: its generalised-Feistel
and its cycle-walking cipher. The round function is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014).
numpy's own permutation is not used: its stream may change between versions, and a resumed run must not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_VALUES = 1 << 62
"""Of one permutation of its own (`permute`)."""
MAX_GROUP_VALUES = 1 << 48
"""Of each of many permutations evaluated together (`permute_groups`)."""

# Few values leave a round little to mix: small sets get more rounds, or some permutations would be favoured.
_ROUNDS_LARGE = 10
_ROUNDS_SMALL = 24
_SMALL = 1 << 16
# Up to so many values tables of the rounds' functions, 8 bytes x rounds x their root, are worth their memory: 320 KB.
_TABLE_VALUES = 1 << 24
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Values = NDArray[np.uint64]


class Direction(Enum):
    FORWARD = "forward"
    INVERSE = "inverse"


def mix(values: Values) -> Values:
    """splitmix64's finaliser, elementwise; arithmetic is modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def epoch_key(seed: int, epoch: int, *, purpose: int = 0) -> Values:
    """A 64-bit key, shape (1,). purpose: tells the keys of one order's several permutations apart."""
    seed_key = mix(np.array([seed & _MASK], dtype=np.uint64) + np.uint64(_GOLDEN))
    key = mix(seed_key ^ np.array([epoch & _MASK], dtype=np.uint64))
    return mix(key + np.uint64(purpose)) if purpose else key


def hashes(key: Values, numbers: NDArray[Any]) -> Values:
    """Independent uniform 64-bit integers, one for each of `numbers`: a pure function of key and number."""
    return mix(mix(key + numbers.astype(np.uint64) * np.uint64(_GOLDEN)) ^ key)


def _round_keys(key: Values, *, rounds: int) -> Values:
    """Independent keys for each round: shape (rounds,) of one key, (rounds, n) of n."""
    steps = np.arange(1, rounds + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(key + steps) if len(key) == 1 else mix(key + steps[:, None])


def _below(hashed: Values, bound: Any) -> Values:
    """Map 64-bit hashes to [0, bound), bound <= 2**32, by a multiplication instead of a division."""
    return ((hashed >> np.uint64(32)) * bound) >> np.uint64(32)


def _encrypt(
    values: Values, *, a: Any, b: Any, keys: Values, which: NDArray[np.intp] | None = None
) -> Values:
    """One pass of the network: a bijection of [0, a * b). a, b: uint64, one for all values or one each.

    keys: shape (rounds,); or, with `which`, (rounds, groups): value i has the keys of group which[i].
    """
    left, right = values % a, values // a
    for number in range(len(keys)):
        key = keys[number] if which is None else keys[number][which]
        if number % 2 == 0:
            left = left + _below(mix(right + key), a)
            left = np.where(left >= a, left - a, left)
        else:
            right = right + _below(mix(left + key), b)
            right = np.where(right >= b, right - b, right)
    return left + right * a


def _tables(*, a: int, b: int, keys: Values) -> list[Values]:
    """Of each round of `_encrypt` what it adds: shape (b,) in even rounds, by right; (a,) in odd ones, by left."""
    numbers = np.arange(max(a, b), dtype=np.uint64)
    return [
        _below(mix(numbers[:b] + key), np.uint64(a))
        if number % 2 == 0
        else _below(mix(numbers[:a] + key), np.uint64(b))
        for number, key in enumerate(keys)
    ]


@functools.lru_cache(maxsize=2)
def _kept_tables(num_values: int, key: int) -> list[Values]:
    a, b = _sides(num_values)
    keys = _round_keys(np.array([key], dtype=np.uint64), rounds=_rounds(num_values))
    return _tables(a=a, b=b, keys=keys)


def _encrypt_by_tables(values: Values, *, a: Any, b: Any, tables: list[Values]) -> Values:
    """As `_encrypt`, with each round looked up: a third of its time where tables are small."""
    left, right = values % a, values // a
    for number, table in enumerate(tables):
        if number % 2 == 0:
            left += table[right]
            left -= a * (left >= a)
        else:
            right += table[left]
            right -= b * (right >= b)
    return left + right * a


def _sides(num_values: int) -> tuple[int, int]:
    """a and b of a permutation of [0, num_values)."""
    a = math.isqrt(num_values - 1) + 1
    return a, -(-num_values // a)


def _rounds(num_values: int) -> int:
    return _ROUNDS_SMALL if num_values < _SMALL else _ROUNDS_LARGE


def _decrypt(values: Values, *, a: Any, b: Any, keys: Values) -> Values:
    """The inverse of `_encrypt`."""
    left, right = values % a, values // a
    for number in reversed(range(len(keys))):
        if number % 2 == 0:
            back = _below(mix(right + keys[number]), a)
            left = np.where(left < back, left + a - back, left - back)
        else:
            back = _below(mix(left + keys[number]), b)
            right = np.where(right < back, right + b - back, right - back)
    return left + right * a


def permute(
    values: NDArray[Any], *, num_values: int, key: Values, direction: Direction = Direction.FORWARD
) -> NDArray[np.int64]:
    """Where one permutation of [0, num_values) sends `values`, which are inside. key: of `epoch_key`."""
    a, b = map(np.uint64, _sides(num_values))
    network: Callable[[Values], Values]
    if direction is Direction.FORWARD and num_values <= _TABLE_VALUES:
        network = functools.partial(
            _encrypt_by_tables, a=a, b=b, tables=_kept_tables(num_values, int(key[0]))
        )
    else:
        keys = _round_keys(key, rounds=_rounds(num_values))
        network = functools.partial(
            _encrypt if direction is Direction.FORWARD else _decrypt, a=a, b=b, keys=keys
        )
    found = network(values.astype(np.uint64))
    # Walk along the cycle until back inside: about 2 / sqrt(num_values) of the values need it at most.
    outside = np.flatnonzero(found >= num_values)
    while outside.size:
        found[outside] = network(found[outside])
        outside = outside[found[outside] >= num_values]
    return found.astype(np.int64)


def permute_groups(
    values: NDArray[Any], *, groups: NDArray[Any], num_values: NDArray[Any], key: Values
) -> NDArray[np.int64]:
    """Many permutations at once: value i moves within [0, num_values[i]) by the permutation of groups[i].

    values, groups, num_values: shape (n,); num_values at most MAX_GROUP_VALUES, the same for equal groups.
    """
    sizes = num_values.astype(np.uint64)
    # The smallest a with a * a >= size; the float's square root may be one off either way.
    a = np.sqrt(sizes.astype(np.float64)).astype(np.uint64)
    one = np.uint64(1)
    a = np.where(a * a < sizes, a + one, a)
    a = np.where((a - one) * (a - one) >= sizes, a - one, a)
    b = (sizes + a - one) // a
    distinct, which = np.unique(groups, return_inverse=True)
    # One key alone would be taken for a key of all values: two at least.
    group_keys = hashes(key, np.append(distinct, distinct[-1:]))
    keys = _round_keys(group_keys, rounds=_ROUNDS_SMALL)  # (rounds, groups)
    which = which.reshape(-1)
    found = _encrypt(values.astype(np.uint64), a=a, b=b, keys=keys, which=which)
    outside = np.flatnonzero(found >= sizes)
    while outside.size:
        found[outside] = _encrypt(found[outside], a=a[outside], b=b[outside], keys=keys, which=which[outside])
        outside = outside[found[outside] >= sizes[outside]]
    return found.astype(np.int64)
