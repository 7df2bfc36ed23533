"""The traffic of split models on the nodes' interfaces, and steps of the peers under srun."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness import Bench
from benchmarks.parallel.layouts import of_figure
from benchmarks.parallel.suite import QUICK, times, traffic
from benchmarks.parallel.timed import methods_at
from tests.cluster import Cluster

pytestmark = pytest.mark.launches
# Of the formula: with a small model headers, barriers and Slurm's own traffic weigh more.
MOST = 1.1


def test_each_layout_sends_what_its_formula_says(cluster: Cluster) -> None:
    bench = Bench(say=lambda what: None, scale=QUICK, nodes=cluster)
    records = {record.id: record.value for record in traffic(bench)}
    assert list(records) == [
        f"parallel.3.{layout.name}.{wire}"
        for ranks_per_node in (1, 2)
        for layout in of_figure("3")
        if layout.ranks_per_node == ranks_per_node
        for wire in layout.wires
    ]
    assert all(0.95 < value < MOST for value in records.values()), records
    assert [start.command.partition(" -- ")[0].rpartition("-n ")[2] for start in bench.starts] == [
        "2 --ranks-per-node 1", "4 --ranks-per-node 2",
    ]  # fmt: skip


@pytest.mark.thorough
def test_ranks_of_every_method_take_turns_on_two_nodes(cluster: Cluster) -> None:
    bench = Bench(say=lambda what: None, scale=replace(QUICK, times={(2, 1): ("1gbit",)}), nodes=cluster)
    made = times(2, 1)(bench)
    assert made[0].id == "parallel.4.2x1.1gbit.best"
    methods = methods_at(num_nodes=2, ranks_per_node=1)
    assert made[0].samples.keys() == methods.keys()
    assert len(bench.starts) == len(methods)
