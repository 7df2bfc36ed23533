"""What `benchmarks.growth` makes of its counts."""

from __future__ import annotations

import pytest

from benchmarks.growth.counting_filesystem import FOLDERS, REFRESH, Refreshes, area_of
from benchmarks.growth.measure import Seen
from benchmarks.growth.planning import measure, plans
from benchmarks.growth.suite import MOST_PLANNING_MB, exponent, growth_records, slope
from benchmarks.results_file import figure_of


def seen(num_ranks: int, *, per_node: int, steady: dict[tuple[int, str, str], int] | None = None) -> Seen:
    nodes = num_ranks // 4
    return Seen(
        num_ranks=num_ranks, whole={(0, "data", "open"): per_node * nodes, (0, "data", "read"): 10**6},
        steady=steady or {}, start_s=float(num_ranks), received=1000 + 60 * num_ranks, calls=1,
        resident=2e8 + 500.0 * num_ranks, bare=2e7 + 400.0 * num_ranks,
    )  # fmt: skip


def test_fits_give_back_what_made_the_points() -> None:
    assert exponent([(n, 3 * n**0.5) for n in (8, 16, 48)]) == pytest.approx(0.5)
    assert exponent([(8, 0.0), (16, 0.0)]) == 0
    assert slope([(n, 7 + 60 * n) for n in (8, 16, 48)]) == pytest.approx(60)


def test_records_hold_where_nothing_grows_and_not_where_it_does() -> None:
    same = {r.id: r for r in growth_records("mpi", [seen(n, per_node=100) for n in (8, 16, 32)])}
    assert same["growth.mpi.metadata"].value == pytest.approx(0)
    assert same["growth.mpi.received"].value == pytest.approx(60)
    assert same["growth.mpi.memory"].value == pytest.approx(0.5)
    assert "(0.4 in ranks that only use MPI in the same way)" in same["growth.mpi.memory"].what
    assert same["growth.mpi.memory.own"].value == pytest.approx(0.1)
    assert all(record.holds for record in same.values())
    grows = {r.id: r for r in growth_records("mpi", [seen(n, per_node=n) for n in (8, 16, 32)])}
    assert grows["growth.mpi.metadata"].value == pytest.approx(1)
    assert not grows["growth.mpi.metadata"].holds


@pytest.mark.parametrize("name", plans(8))
def test_planning_for_65536_ranks_takes_a_rank_few_megabytes(name: str) -> None:
    """As figure `planning` has it; how long it takes depends on the machine."""
    assert measure(plans()[name], repeats=1).num_bytes < 1e6 * MOST_PLANNING_MB


def test_steady_operations_count_but_those_of_checkpoints_metrics_and_reads_do_not() -> None:
    own = {(0, area, "getattr"): 9 for area in ("run/checkpoints", "run/metrics", "run/save-now", FOLDERS)}
    content = {(1, "data", "read"): 50, (1, "data", REFRESH): 50}
    for extra, expected in (({}, 0), ({(3, "run/watch", "rename"): 20}, 0.5)):
        found = growth_records("mpi", [seen(8, per_node=1, steady={**own, **content, **extra})])
        (steady,) = (record for record in found if record.id == "growth.mpi.steady")
        assert steady.value == pytest.approx(expected)


def test_a_request_for_the_attributes_of_a_file_that_was_read_is_not_a_look_up() -> None:
    shard, refreshes = "/data/train/shard-00001.h5", Refreshes()

    def look_up(thread: int) -> list[str]:
        return [refreshes.kind("getattr", path, thread=thread) for path in ("/data", "/data/train", shard)]

    assert look_up(1) == ["getattr"] * 3
    assert refreshes.kind("open", shard, thread=1) == "open"
    assert refreshes.kind("getattr", shard, thread=1) == "getattr"  # nothing was read
    assert refreshes.kind("read", shard, thread=2) == "read"
    assert refreshes.kind("getattr", shard, thread=3) == REFRESH
    assert refreshes.kind("getattr", shard, thread=3) == "getattr"  # one for a read
    refreshes.kind("read", shard, thread=2)
    assert look_up(3) == ["getattr"] * 3
    assert refreshes.kind("getattr", "/data/train", thread=4) == "getattr"


@pytest.mark.parametrize(
    ("path", "area"),
    [
        ("/data/train/shard-00001.h5", "data"), ("/run", FOLDERS), ("/run/recipe.toml", "run"),
        ("/run/watch/rank-3.json", "run/watch"), ("/run/save-now", "run/save-now"),
        ("/run/checkpoints/step-00000060.h5", "run/checkpoints"),
    ],
)  # fmt: skip
def test_a_path_belongs_to_a_part_of_the_run(path: str, area: str) -> None:
    assert area_of(path) == area


def test_a_page_has_a_table_for_each_figure_also_where_its_name_ends_with_letters() -> None:
    names = {
        "growth.mpi.memory": "growth.mpi",
        "data.1a": "data.1",
        "step.digits-4x2.flat": "step.digits-4x2",
    }
    assert {name: figure_of(name) for name in names} == names
