"""Permutations of integers that are computed and never stored, in constant memory for any number of integers.

A permutation is a generalised Feistel cipher on Z_a x Z_b, where a * b is at least the number of integers, and little
larger. Cycle walking handles the few values beyond that number. All arithmetic is on unsigned 64-bit integers, so the
result is the same on every machine. Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002, the generalised-Feistel cipher and the cycle-walking cipher. The round function is the finaliser of splitmix64
(Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).

The permutations of numpy are not used, since they may differ between versions of numpy, but a resumed run must not
change.
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
"""Maximum of `num_values` in `permute`."""
MAX_GROUP_VALUES = 1 << 48
"""Maximum of each element of `num_values` in `permute_groups`."""

# A round mixes few values less well: small sets need more rounds, or some permutations would be more likely.
_ROUNDS_LARGE = 10
_ROUNDS_SMALL = 24
_SMALL = 1 << 16
# Up to this number of values the round functions are tabulated: 8 bytes x rounds x its square root, at most 320 KB.
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
    """Applies the finaliser of splitmix64 to each value: a bijection of uint64. Arithmetic is modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def epoch_key(seed: int, epoch: int, *, purpose: int = 0) -> Values:
    """Returns the 64-bit key of a permutation for an epoch: uint64, shape (1,).

    A caller that needs several different permutations per epoch passes another number `purpose` for each of them.
    """
    seed_key = mix(np.array([seed & _MASK], dtype=np.uint64) + np.uint64(_GOLDEN))
    key = mix(seed_key ^ np.array([epoch & _MASK], dtype=np.uint64))
    return mix(key + np.uint64(purpose)) if purpose else key


def hashes(key: Values, numbers: NDArray[Any]) -> Values:
    """Returns one pseudorandom uint64 value per element of `numbers`, uniform and independent.

    Each value is a pure function of the key and the number.
    """
    return mix(mix(key + numbers.astype(np.uint64) * np.uint64(_GOLDEN)) ^ key)


def _round_keys(key: Values, *, rounds: int) -> Values:
    """Derives one pseudorandom key per round of the cipher from each key in `key`.

    The result has shape (rounds,) for one key, and (rounds, n) for n keys.
    """
    steps = np.arange(1, rounds + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(key + steps) if len(key) == 1 else mix(key + steps[:, None])


def _below(hashed: Values, bound: Any) -> Values:
    """Maps 64-bit hashes to [0, bound) with a multiplication instead of a division. `bound` is at most 2**32."""
    return ((hashed >> np.uint64(32)) * bound) >> np.uint64(32)


def _encrypt(
    values: Values, *, a: Any, b: Any, keys: Values, which: NDArray[np.intp] | None = None
) -> Values:
    """Applies a Feistel network, which is a bijection of [0, a * b), once to each value.

    a and b are the sizes of the two halves of a value, uint64: scalars, or arrays with one element per value. `keys`
    are the keys of the rounds. They have shape (rounds,). If `which` is given, they have shape (rounds, groups), and
    the keys of value i are those of group which[i].
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
    """Returns the tables for `_encrypt_by_tables`, one per round of the Feistel network.

    A table contains the number that the round adds to one half of a value, for each possible other half. a and b are
    the sizes of the left and the right half. The table of an even round has shape (b,), and is indexed by the right
    half of the value. The table of an odd round has shape (a,), and is indexed by the left half.
    """
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
    """Returns the same as `_encrypt`, but looks up the result of each round function in the tables of `_tables`.

    This takes a third of the time of `_encrypt` if the tables are small.
    """
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
    """Returns the sizes a and b of the two halves of the Feistel network for a permutation of [0, num_values)."""
    a = math.isqrt(num_values - 1) + 1
    return a, -(-num_values // a)


def _rounds(num_values: int) -> int:
    return _ROUNDS_SMALL if num_values < _SMALL else _ROUNDS_LARGE


def _decrypt(values: Values, *, a: Any, b: Any, keys: Values) -> Values:
    """Computes the inverse of `_encrypt`, the Feistel network, for one key per round."""
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
    """Applies a permutation of [0, num_values) to each of `values`: integers in that range, shape (n,).

    `key` is a result of `epoch_key`. Returns int64, shape (n,).
    """
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
    # Cycle walking: apply the network until the value is in range. At most about 2 / sqrt(num_values) need it.
    outside = np.flatnonzero(found >= num_values)
    while outside.size:
        found[outside] = network(found[outside])
        outside = outside[found[outside] >= num_values]
    return found.astype(np.int64)


def permute_groups(
    values: NDArray[Any], *, groups: NDArray[Any], num_values: NDArray[Any], key: Values
) -> NDArray[np.int64]:
    """Permutes the values of each group; each group has a permutation of its own. Value i belongs to group groups[i].

    Value i is mapped by a permutation of [0, num_values[i]). `values`, `groups` and `num_values` are integers of shape
    (n,). Elements of `num_values` are at most MAX_GROUP_VALUES, and equal within a group. Returns int64, shape (n,).
    """
    sizes = num_values.astype(np.uint64)
    # The smallest a with a * a >= size; the square root in float64 may be off by one.
    a = np.sqrt(sizes.astype(np.float64)).astype(np.uint64)
    one = np.uint64(1)
    a = np.where(a * a < sizes, a + one, a)
    a = np.where((a - one) * (a - one) >= sizes, a - one, a)
    b = (sizes + a - one) // a
    distinct, which = np.unique(groups, return_inverse=True)
    # At least two: `_round_keys` treats a single key as that of all values.
    group_keys = hashes(key, np.append(distinct, distinct[-1:]))
    keys = _round_keys(group_keys, rounds=_ROUNDS_SMALL)  # (rounds, groups)
    which = which.reshape(-1)
    found = _encrypt(values.astype(np.uint64), a=a, b=b, keys=keys, which=which)
    outside = np.flatnonzero(found >= sizes)
    while outside.size:
        found[outside] = _encrypt(found[outside], a=a[outside], b=b[outside], keys=keys, which=which[outside])
        outside = outside[found[outside] >= sizes[outside]]
    return found.astype(np.int64)
