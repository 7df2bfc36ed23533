"""The pure parts of communication: counts, windows, rows, names of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hpctrain.comm import describe_ranks
from hpctrain.comm.backends.open_world import open_world, yield_while_idle
from hpctrain.comm.backends.running_horovod import apply_settings, can_start_again, has_groups
from hpctrain.comm.interface.buffer_checks import (
    as_rows,
    pack,
    reordered,
    sum_in_order,
    windows_of,
)
from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import RankIdentity, identify
from hpctrain.launch.yielding import YIELD_VARIABLE
from hpctrain.storage import split_evenly

counts_lists = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@given(num_elems=st.integers(0, 1000), num_parts=st.integers(1, 50))
def test_split_evenly_add_up_and_differ_by_one(num_elems: int, num_parts: int) -> None:
    counts = split_evenly(num_elems, num_parts=num_parts)
    assert sum(counts) == num_elems
    assert len(counts) == num_parts
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(counts=counts_lists, max_elems=st.integers(1, 40))
def test_windows_cover_each_part_once_and_stay_below_the_limit(counts: list[int], max_elems: int) -> None:
    buffer = torch.arange(sum(counts))
    covered: list[list[int]] = [[] for _ in counts]
    for begins, widths in windows_of(counts, max_elems=max_elems):
        assert 0 < sum(widths) <= max(max_elems, len(counts))
        packed = pack(buffer, counts=counts, begins=begins, widths=widths)
        for place, piece in enumerate(packed.split(widths)):
            covered[place] += piece.tolist()
    assert covered == [part.tolist() for part in buffer.split(counts)]


@given(counts=counts_lists, data=st.data())
def test_rows_hold_the_slices_in_the_order_asked(counts: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(counts))))
    buffer = torch.arange(1, sum(counts) + 1)
    rows = as_rows(buffer, counts=counts, order=order)
    assert rows.shape == (len(counts), max(counts))
    for row, place in enumerate(order):
        assert rows[row, : counts[place]].tolist() == buffer.split(counts)[place].tolist()
        assert not rows[row, counts[place] :].any()
    shuffled = torch.cat([buffer.split(counts)[place] for place in order])
    assert torch.equal(reordered(shuffled, counts=counts, order=order), buffer)


def test_half_precision_sums_through_values_that_half_precision_cannot_hold() -> None:
    parts = [torch.tensor([v], dtype=torch.float16) for v in (60000.0, 60000.0, -60000.0)]
    assert float(sum_in_order(parts)) == 60000.0
    assert float(parts[0]) == 60000.0
    small = [torch.tensor([1.0], dtype=torch.float16)] + [torch.tensor([2.0**-12], dtype=torch.float16)] * 8
    assert float(sum_in_order(small)) > 1.0  # added one by one in float16, each of them would be lost


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 7], "ranks 0, 2-3, 7")],
)
def test_ranks_are_named_in_spans(ranks: list[int], text: str) -> None:
    assert describe_ranks(ranks) == text


def test_what_the_user_set_for_horovod_stays() -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "1024", "HOROVOD_DYNAMIC_PROCESS_SETS": "0"}
    apply_settings(environ)
    assert environ["HOROVOD_FUSION_THRESHOLD"] == "1024"
    assert environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"  # groups cannot be made without it


@pytest.mark.parametrize(("variables", "groups"), [({}, False), ({"HOROVOD_CYCLE_TIME": "1"}, True)])
def test_horovod_starts_without_groups_where_it_can_start_again(
    variables: dict[str, str], groups: bool
) -> None:
    environ = dict(variables)
    apply_settings(environ, groups=False)
    assert has_groups(environ) is groups


@pytest.mark.parametrize(("variables", "can"), [
    ({}, True), ({"HOROVOD_CYCLE_TIME": "1"}, False), ({"HOROVOD_FUSION_THRESHOLD": "4"}, True),
])  # fmt: skip
def test_horovod_with_what_hpctrain_sets_can_be_started_again(variables: dict[str, str], can: bool) -> None:
    environ = dict(variables)
    apply_settings(environ)
    assert can_start_again(environ) is can


@pytest.mark.parametrize(
    ("host_size", "variables", "yields"),
    [(2, {}, "1"), (2, {YIELD_VARIABLE: "0"}, "0"), (5, {}, None), (None, {}, "1")],
)
def test_open_mpi_yields_to_the_computation_where_each_rank_has_a_core(
    host_size: int | None, variables: dict[str, str], yields: str | None
) -> None:
    identity = RankIdentity(
        launcher="test", rank=0, num_ranks=8, local_rank=None, local_size=None, node_rank=None, node_name="a",
        host_size=host_size,
    )  # fmt: skip
    environ = dict(variables)
    yield_while_idle(environ, identity=identity, num_cores=4)
    assert environ.get(YIELD_VARIABLE) == yields


def test_unknown_backends_and_serial_with_many_ranks_are_refused() -> None:
    four = identify({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "node")
    with pytest.raises(UsageError, match="'gloo': choose auto, horovod, mpi, serial"):
        open_world("gloo", identity=four)
    with pytest.raises(UsageError, match="run_threads"):
        open_world("threads", identity=four)
    with pytest.raises(LaunchError, match=r"serial is for one rank, .* started 4"):
        open_world("serial", identity=four)


def test_one_rank_alone_is_serial() -> None:
    opened = open_world(identity=identify({}, "node"))
    assert opened.world.backend == "serial"
    assert opened.notes == ()
