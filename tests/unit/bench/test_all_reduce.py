"""Measuring all-reduces, on ranks that are threads: every cell, what cannot run, the table, the plot."""

from __future__ import annotations

import importlib.util
import io
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hpctrain.bench.all_reduce.measure import (
    AllReduceAsked,
    AllReduceMeasured,
    bucket_of,
    buckets_of,
    groups_that_fit,
    measure_all_reduce,
    notes_of,
)
from hpctrain.bench.all_reduce.run import (
    all_reduce_table,
    check_plot,
    check_runs,
    measure_link,
    nccl_to_start,
    plot_all_reduce,
)
from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import UsageError
from hpctrain.reduce.algorithms import Algorithm, Capabilities
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.topology import Topology

TWO_NODES = Topology.from_node_names(["a", "a", "b", "b"])
ASKED = AllReduceAsked(
    sizes_bytes=(4, 4000, 100_000),
    algorithms=("flat", "ring", "hierarchical"),
    wires=("fp32", "fp16"),
    repeats=3,
)
LINK = 1e6


def maker(world: World, topology: Topology) -> Callable[[str, str], BucketReducer]:
    made = ReducerMaker(world, topology=topology)
    return lambda algorithm, wire: made.make(Algorithm(algorithm), wire=wire)


@pytest.fixture(scope="module")
def found() -> AllReduceMeasured:
    """What 4 ranks on 2 nodes measure; with a wire that fails for one algorithm."""

    def case(world: ThreadsWorld) -> AllReduceMeasured:
        make = maker(world, TWO_NODES)

        def make_most(algorithm: str, wire: str) -> BucketReducer:
            if (algorithm, wire) == ("ring", "fp16"):
                raise UsageError("the ring is round")
            return make(algorithm, wire)

        return measure_all_reduce(
            ASKED,
            make_most,
            comm=world,
            topology=TWO_NODES,
            device=torch.device("cpu"),
            link_bytes_per_s=LINK,
        )

    by_rank = run_threads(4, case)
    assert all(other.rows == by_rank[0].rows for other in by_rank)  # the same on every rank
    return by_rank[0]


def test_every_cell_that_can_run_is_measured_and_the_others_are_named(found: AllReduceMeasured) -> None:
    cells = Counter((row.num_bytes, row.algorithm, row.wire) for row in found.rows)
    wanted = [(a, w) for w in ASKED.wires for a in ASKED.algorithms if (a, w) != ("ring", "fp16")]
    assert cells == Counter((size, *pair) for size in ASKED.sizes_bytes for pair in wanted)
    assert found.notes == ["not measured: ring (fp16): the ring is round"]
    for row in found.rows:
        assert len(row.samples_s) == ASKED.repeats == row.seconds.count
        assert row.seconds.min == min(row.samples_s) > 0


def test_sums_are_checked_and_what_leaves_a_node_is_counted(found: AllReduceMeasured) -> None:
    for row in found.rows:
        assert row.relative_error <= (2e-3 if row.wire == "fp16" else 1e-6), row
        two_level = row.algorithm == "hierarchical"
        if row.num_bytes == 100_000:
            per_element = 2 if row.wire == "fp16" else 4
            assert row.bound_bytes_per_node == 25_000 * per_element  # 2 (C-1)/C with C = 2
            assert row.bound_s == pytest.approx(row.bound_bytes_per_node / LINK)
            over = row.sent_bytes_per_node / row.bound_bytes_per_node
            flat = 2.0 if row.wire == "fp16" else 1.5  # by slices, as MPI; else as a ring
            assert over == pytest.approx(1.0 if two_level else flat, rel=0.02), row
            assert row.busbw == pytest.approx(1.5 * row.algbw)
            assert row.algbw == pytest.approx(100_000 / row.seconds.median)


def test_a_wrong_sum_shows_as_an_error() -> None:
    class Doubles:
        """A reducer that counts every gradient twice."""

        def __init__(self, inner: BucketReducer) -> None:
            self._inner = inner

        def plan(self, buckets, *, device):  # type: ignore[no-untyped-def]
            self._memory = self._inner.plan(buckets, device=device)
            return self._memory

        def reduce(self, number):  # type: ignore[no-untyped-def]
            yield from self._inner.reduce(number)
            self._memory[number].mul_(2)

        def __getattr__(self, name):  # type: ignore[no-untyped-def]
            return getattr(self._inner, name)

    def case(world: ThreadsWorld) -> float:
        make = maker(world, TWO_NODES)
        asked = AllReduceAsked(sizes_bytes=(4000,), algorithms=("flat",), wires=("fp32",), repeats=1)
        measured = measure_all_reduce(
            asked, lambda algorithm, wire: Doubles(make(algorithm, wire)), comm=world, topology=TWO_NODES,
            device=torch.device("cpu"),
        )  # fmt: skip
        return measured.rows[0].relative_error

    assert run_threads(4, case)[0] == pytest.approx(1.0)


def test_what_does_not_fit_into_memory_is_measured_in_groups() -> None:
    def case(world: ThreadsWorld) -> AllReduceMeasured:
        return measure_all_reduce(
            ASKED, maker(world, TWO_NODES), comm=world, topology=TWO_NODES, device=torch.device("cpu"),
            memory_bytes=600_000,
        )  # fmt: skip

    measured = run_threads(4, case)[0]
    assert len(measured.rows) == 18
    assert "measured in 3 groups" in measured.notes[0]


def test_groups_are_as_few_as_memory_allows_and_hold_every_pair_once() -> None:
    pairs = [(str(n), "fp32") for n in range(7)]
    for budget, sizes in ((1000, [7]), (60, [3, 4]), (35, [2, 2, 3]), (1, [1] * 7)):
        groups = list(groups_that_fit(pairs, bytes_each=10, budget_bytes=budget))
        assert [pair for group in groups for pair in group] == pairs
        assert [len(group) for group in groups] == sizes


def test_nothing_that_can_run_is_an_error_with_the_reasons() -> None:
    def refuse(algorithm: str, wire: str) -> BucketReducer:
        raise UsageError(f"no {algorithm} today")

    def case(world: ThreadsWorld) -> None:
        measure_all_reduce(ASKED, refuse, comm=world, topology=TWO_NODES, device=torch.device("cpu"))

    with pytest.raises(UsageError, match=r"nothing that was asked for can run here: .*no flat today"):
        run_threads(4, case)


def test_of_horovods_own_sums_one_is_named_to_horovod_and_two_are_refused() -> None:
    assert nccl_to_start(("auto", "flat", "hierarchical")) is None
    assert nccl_to_start(("flat", "nccl-torus")) == "nccl-torus"
    with pytest.raises(
        UsageError, match="nccl-torus and nccl-hierarchical cannot be measured in one process"
    ):
        nccl_to_start(("nccl-torus", "nccl-hierarchical"))


def test_what_horovod_was_started_for_is_measured_under_its_name_alone() -> None:
    capabilities = Capabilities(
        backend="horovod", topology=TWO_NODES, messages=True, nccl=Algorithm.NCCL_TORUS
    )
    check_runs(Algorithm.NCCL_TORUS, wire="fp32", capabilities=capabilities)
    with pytest.raises(UsageError, match="nccl-torus would run instead"):
        check_runs(Algorithm.FLAT, wire="fp32", capabilities=capabilities)
    with pytest.raises(UsageError, match="hierarchical would run instead"):
        check_runs(Algorithm.NCCL_TORUS, wire="fp32", capabilities=replace(capabilities, nccl=None))


def test_reasons_that_are_the_same_are_reported_once() -> None:
    pairs = [("ring", "fp32"), ("ring", "fp16"), ("direct", "fp32"), ("direct", "fp16"), ("flat", "int8")]
    assert notes_of({"too big": pairs}) == ["not measured: ring, direct (fp32, fp16); flat (int8): too big"]


@pytest.mark.parametrize("num_elements", [1, 2, 17, 18, 1000, 123_457])
def test_a_bucket_has_exactly_the_elements_asked_for(num_elements: int) -> None:
    bucket = bucket_of(num_elements)
    assert bucket.numel == num_elements
    assert bucket.num_gradients + len(bucket.slots) == num_elements
    assert [slot.used_flag for slot in bucket.slots] == list(range(bucket.first_flag, num_elements))
    assert all(math.prod(slot.shape) == slot.numel for slot in bucket.slots)


def test_parameters_of_all_buckets_are_numbered_through() -> None:
    slots = [slot for bucket in buckets_of([4, 4000, 8000], in_flight=2) for slot in bucket.slots]
    assert [slot.parameter for slot in slots] == list(range(len(slots)))
    ends = [slot.position + slot.numel for slot in slots]
    assert [slot.position for slot in slots] == [0, *ends[:-1]]


def test_the_link_is_measured_between_nodes_and_not_within_one() -> None:
    def case(world: ThreadsWorld) -> tuple[float | None, float | None]:
        rates = []
        for topology in (TWO_NODES, Topology.from_node_names(["a"] * 4)):
            transport = world.transport(topology)
            assert transport is not None
            rates.append(measure_link(transport, comm=world))
            transport.close()
        return rates[0], rates[1]

    by_rank = run_threads(4, case)
    assert len(set(by_rank)) == 1
    between, within = by_rank[0]
    assert between is not None
    assert between > 0
    assert within is None


def test_the_table_has_a_line_for_each_cell(found: AllReduceMeasured) -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(all_reduce_table(found.rows, title="two nodes"))
    text = out.getvalue()
    assert sum("hierarchical" in line for line in text.splitlines()) == 6
    for words in ("two nodes", "busbw, MB/s", "out of a node", "time x bound", "100 KB", "fp16"):
        assert words in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="plots need matplotlib")
@pytest.mark.parametrize(
    ("name", "begin"), [("a.svg", b"<?xml"), ("sub/a.png", b"\x89PNG"), ("a.pdf", b"%PDF")]
)
def test_the_plot_is_a_picture_of_the_rows(
    found: AllReduceMeasured, tmp_path: Path, name: str, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")  # text stays text
    path = tmp_path / name
    check_plot(path)
    plot_all_reduce(found.rows, path, topology=TWO_NODES, title="two nodes", link_bytes_per_s=LINK)
    content = path.read_bytes()
    assert content.startswith(begin)
    assert len(content) > 5000
    if path.suffix == ".svg":
        for words in (
            "hierarchical, fp16",
            "ring, fp32",
            "bound, fp16: the link at 8 Mbit/s",
            "two nodes",
            "4 KB",
        ):
            assert words in content.decode()


def test_a_plot_that_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        check_plot(tmp_path / "a.jpg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[plot\]'"):
        check_plot(tmp_path / "a.png")


def test_what_cannot_be_measured_is_refused() -> None:
    for change in ({"sizes_bytes": (4, 6)}, {"repeats": 0}, {"in_flight": 0}, {"warmup": -1}):
        with pytest.raises(UsageError):
            AllReduceAsked(**{"sizes_bytes": (4,), "algorithms": ("flat",), "wires": ("fp32",), **change})  # type: ignore[arg-type]
