"""Sums of arrays in one pass, compiled and in numpy: the same bits, and the squares of what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpctrain.reduce.shared_memory import summation as add_module
from hpctrain.reduce.shared_memory.summation import COMPILED, PIECE_ELEMS, add, add_in_numpy

compiled = pytest.mark.skipif(COMPILED is None, reason="hpctrain was installed without a compiler")
# On both sides of what the compiled sum takes at a time, and of what numpy does.
SIZES = [0, 1, 2, 15, 16, 17, 1023, 1024, 1025, 5000, PIECE_ELEMS, PIECE_ELEMS + 1, 2 * PIECE_ELEMS + 33]


@pytest.fixture(params=[pytest.param("compiled", marks=compiled), "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(add_module, "_add", add_in_numpy)


def arrays(count: int, numel: int, *, dtype: Any, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return [(generator.standard_normal(numel) * 10.0**rank).astype(dtype) for rank in range(count)]


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(1, 5),
    numel=st.sampled_from(SIZES),
    dtype=st.sampled_from([np.float32, np.float64]),
    squared=st.one_of(st.just(0), st.sampled_from(SIZES)),
    factor=st.sampled_from([1.0, 2.0**-10, 1 / 3]),
    seed=st.integers(0, 99),
)
def test_all_parts_become_their_sum_in_their_order(
    count: int, numel: int, dtype: Any, squared: int, factor: float, seed: int
) -> None:
    parts = arrays(count, numel, dtype=dtype, seed=seed)
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part
    expected *= dtype(factor)
    square = add(parts, into=parts, num_squared=squared, factor=factor)
    for part in parts:
        np.testing.assert_array_equal(part, expected)
    exact = float(np.sum(expected[:squared].astype(np.longdouble) ** 2))
    assert square == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_not_written_to_stays_as_it_was(count: int) -> None:
    parts = arrays(count, 3000, dtype=np.float32)
    before = [part.copy() for part in parts]
    into = np.zeros(3000, dtype=np.float32)
    add(parts, into=[into])
    np.testing.assert_array_equal(into, sum(before[1:], before[0]))
    assert all(map(np.array_equal, parts, before))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 17, 2999])
def test_squares_that_are_not_finite_say_so(value: float, place: int) -> None:
    parts = arrays(2, 3000, dtype=np.float32)
    parts[1][place] = value
    assert not np.isfinite(add(parts, into=(), num_squared=3000))
    assert np.isfinite(add(parts, into=(), num_squared=place))


def test_sums_that_overflow_and_infinities_that_meet_are_no_warning() -> None:
    parts = [np.array([3e38, np.inf], dtype=np.float32), np.array([3e38, -np.inf], dtype=np.float32)]
    into = np.zeros(2, dtype=np.float32)
    assert not np.isfinite(add(parts, into=[into], num_squared=2))
    assert np.isinf(into[0])
    assert np.isnan(into[1])


def test_squares_beyond_float32_are_numbers() -> None:
    parts = [np.full(100, 1e30, dtype=np.float32), np.zeros(100, dtype=np.float32)]
    assert add(parts, into=(), num_squared=100) == pytest.approx(1e62, rel=1e-6)


@compiled
@pytest.mark.parametrize(
    ("parts", "into"),
    [
        ([np.zeros(3, dtype=np.float32), np.zeros(4, dtype=np.float32)], []),
        ([np.zeros(3, dtype=np.float32), np.zeros(3)], []),
        ([np.zeros(3, dtype=np.float32)], [np.zeros(2, dtype=np.float32)]),
        ([np.zeros((3, 1), dtype=np.float32)], []),
        ([np.zeros(3, dtype=np.int32)], []),
        ([np.zeros(6, dtype=np.float32)[::2]], []),
        ([], [np.zeros(3, dtype=np.float32)]),
    ],
)
def test_arrays_that_are_not_alike_are_refused(parts: list[Any], into: list[Any]) -> None:
    from hpctrain.reduce.shared_memory._add import add as compiled_add

    with pytest.raises(ValueError):
        compiled_add(tuple(parts), tuple(into), 0, 1.0)


@compiled
def test_memory_that_is_only_to_be_read_is_not_written_to() -> None:
    from hpctrain.reduce.shared_memory._add import add as compiled_add

    closed = np.zeros(3, dtype=np.float32)
    closed.flags.writeable = False
    other = np.ones(3, dtype=np.float32)
    assert compiled_add((closed, other), (), 3, 1.0) == 3.0
    with pytest.raises(ValueError):
        compiled_add((closed, other), (closed,), 0, 1.0)
    with pytest.raises(TypeError):
        compiled_add([other], (), 0, 1.0)  # type: ignore[arg-type]
