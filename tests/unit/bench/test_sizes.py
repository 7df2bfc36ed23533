"""What a measurement is asked for and computed with: sizes, medians, bandwidths, bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpctrain.bench.all_reduce.measure import algorithm_bandwidth, bound_bytes, bound_seconds, bus_bandwidth
from hpctrain.bench.all_reduce.run import ALGORITHMS, parse_link, parse_names
from hpctrain.bench.figures import (
    describe_bytes,
    describe_spread,
    parse_size,
    parse_sizes,
    show_number,
    spread_of,
)
from hpctrain.errors import UsageError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4KB,64KB,1MB", [4000, 64_000, 1_000_000]),
        ("4KiB, 4K,1M", [4096, 2**20]),
        ("1MB,4000", [4000, 1_000_000]),
        ("1.5MB", [1_500_000]),
        ("4KB:64KB", [4000, 16_000, 64_000]),
        ("4KB:64MB", [4000 * 4**n for n in range(7)] + [64_000_000]),
        ("1K:8K:2", [1024, 2048, 4096, 8192]),
        ("4KB:4KB", [4000]),
        ("8,4KB:8KB:2", [8, 4000, 8000]),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, sizes: list[int]) -> None:
    assert list(parse_sizes(text)) == sizes


@pytest.mark.parametrize(
    "text",
    ["", "KB", "4XB", "-4", "0", "0.3B", "4KB,", "8KB:4KB", "1:2:3:4", "1K:8K:1", "1K:8K:x", "1K:8K:nan"],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"4KB|factor|whole number|FIRST:LAST"):
        parse_sizes(text)


@given(st.integers(1, 10**12))
def test_a_plain_number_of_bytes_stays_what_it_is(num_bytes: int) -> None:
    assert parse_size(str(num_bytes)) == num_bytes


def test_a_size_that_is_no_whole_number_of_bytes_is_rounded_down_where_that_is_asked() -> None:
    assert parse_size("79.2GiB", rounds_down=True) == 85040352460
    assert parse_size("1.5MB", rounds_down=True) == 1_500_000
    for text, rounds_down in (("79.2GiB", False), ("0.9B", True)):
        with pytest.raises(UsageError, match="whole number"):
            parse_size(text, rounds_down=rounds_down)


def test_sizes_are_shown_in_the_unit_that_is_round() -> None:
    shown = [describe_bytes(n) for n in (12, 4000, 4096, 1_500_000, 16 * 2**20, 64_000_000, 1_024_000)]
    assert shown == ["12 B", "4 KB", "4 KiB", "1.5 MB", "16 MiB", "64 MB", "1.02 MB"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_spread_is_numpys(samples: list[float]) -> None:
    spread = spread_of(samples)
    expected = np.percentile(samples, [0, 25, 50, 75, 100])
    found = [spread.min, spread.q1, spread.median, spread.q3, spread.max]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert spread.count == len(samples)


def test_a_spread_is_shown_with_its_quartiles_and_one_sample_without() -> None:
    assert describe_spread(spread_of([1.0, 2.0, 3.0, 4.0, 5.0]), show_number) == "3.00 (2.00-4.00)"
    assert describe_spread(spread_of([7.0]), show_number) == "7.00"
    assert [show_number(v) for v in (0, 0.01234, 12.34, 1234.5)] == ["0", "0.0123", "12.3", "1,234"]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # 8 ranks, 128 MB in 4 ms: 32 GB/s, and 2 * 7/8 of that on the bus.
    assert algorithm_bandwidth(128_000_000, seconds=4e-3) == pytest.approx(32e9)
    assert bus_bandwidth(128_000_000, seconds=4e-3, num_ranks=8) == pytest.approx(56e9)
    assert bus_bandwidth(128_000_000, seconds=4e-3, num_ranks=1) == 0


def test_the_bound_of_25_million_gradients_in_fp16_on_4_nodes_is_75_mb() -> None:
    assert bound_bytes(25_000_000, wire="fp16", num_nodes=4) == 75e6
    assert bound_bytes(25_000_000, wire="fp32", num_nodes=4) == 150e6
    # A byte each, and a scale of 4 bytes for 256 of them.
    assert bound_bytes(25_600_000, wire="int8", num_nodes=4) == pytest.approx(
        38.4e6 * (1 + 4 / 256), rel=1e-3
    )
    assert bound_bytes(25_000_000, wire="top-k", num_nodes=4) is None
    assert bound_bytes(25_000_000, wire="fp16", num_nodes=1) == 0
    assert bound_seconds(25_000_000, wire="fp16", num_nodes=4, link_bytes_per_s=25e6) == pytest.approx(3.0)
    assert bound_seconds(25_000_000, wire="fp16", num_nodes=1, link_bytes_per_s=25e6) is None


def test_an_unknown_name_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(
        UsageError, match="no 'hierarchicle'; choose among auto, flat, ring, direct, hierarchical"
    ):
        parse_names("flat,hierarchicle", option="--algorithms", valid=ALGORITHMS, usual=ALGORITHMS)
    assert parse_names("ring,flat,ring", option="-a", valid=ALGORITHMS, usual=("flat",)) == ("ring", "flat")
    assert parse_names("all", option="-a", valid=ALGORITHMS, usual=("flat",)) == ("flat",)


def test_a_link_is_given_in_mbit_or_measured() -> None:
    assert parse_link("200") == 25e6
    assert parse_link("measure") is None
    assert parse_link(None) is None
    for text in ("fast", "-1", "0", "nan"):
        with pytest.raises(UsageError, match="Mbit/s"):
            parse_link(text)
