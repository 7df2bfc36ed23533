"""The reduction benchmark's machinery, with sizes at which a time says nothing."""

from __future__ import annotations

import pytest

from benchmarks.places import OnCluster, OneNode
from benchmarks.reduction.suite import FAMILIES, MODULE, PEERS, STEP_METHODS, bytes_out_of_a_node
from tests.cluster import Cluster

pytestmark = pytest.mark.launches

NUMEL = 30_000
# Of the bound: headers, acknowledgements, barriers and Slurm's own traffic are counted too.
MOST = 1.25


@pytest.mark.thorough
def test_every_peer_and_ours_sum_on_the_cluster_in_one_run(cluster: Cluster) -> None:
    settings = {
        "numel": NUMEL, "choices": [("hierarchical", "fp16"), ("hierarchical", "int8")],
        "stream_bytes": 24_000, "num_rounds": 1, "seed": 1, "families": FAMILIES,
    }  # fmt: skip
    place = OnCluster(MODULE, cluster)
    found = place.run("buffers", settings, timeout_s=300)
    assert set(found) == {"hierarchical/fp16", "hierarchical/int8", "stream", *PEERS}
    assert {len(of["seconds"]) for name, of in found.items() if name != "stream"} == {1}
    assert len(found["stream"]["seconds"]) == 2  # twice per round: everything is compared with it
    (start,) = place.starts
    assert "salloc --nodes=4 --ntasks-per-node=1 --cpus-per-task=1 hpctrain launch -n 8 " in start.command
    assert " --ntasks-per-node=2 " in start.launched
    assert " --overcommit " in start.launched  # launch has seen that they outnumber the cores
    (ranks,) = start.ranks
    assert ranks["ranks"] == list(range(8))
    assert ranks["variables"]["OMPI_MCA_mpi_yield_when_idle"] == "1"


@pytest.mark.thorough
def test_bytes_are_counted_on_every_nodes_interface(cluster: Cluster) -> None:
    choices = [("hierarchical", "fp16"), ("ring", "fp16"), ("direct", "fp16")]
    numel = 10 * NUMEL  # beside which what else is sent is little
    settings = {"numel": numel, "choices": choices, "pause_s": 0.1}
    before = cluster.bytes_sent()
    found = OnCluster(MODULE, cluster).run("counted_bytes", settings, timeout_s=300)
    sent = [now - then for now, then in zip(cluster.bytes_sent().values(), before.values(), strict=True)]
    for algorithm, wire in choices:
        bound = bytes_out_of_a_node(algorithm, numel=numel, elem_bytes=2, num_nodes=4, ranks_per_node=2)
        counted = found[f"{algorithm}/{wire}"]["node_bytes"]
        assert len(counted) == 4
        assert min(counted) >= bound
        assert max(counted) <= MOST * bound
        # The counters are the ones that the cluster reads from outside.
        assert all(part < whole for part, whole in zip(counted, sent, strict=True))


def test_steps_of_every_method_end_in_the_same_parameters() -> None:
    settings = {"workloads": ["mlp"], "num_rounds": 1, "block": 2, "seed": 1, "methods": STEP_METHODS}
    found = OneNode(MODULE).run("training_steps", settings, timeout_s=300)["mlp"]
    assert set(found) == set(STEP_METHODS)
    assert all(set(blocks) == {"steps", "without"} for blocks in found.values())
    counts = {tuple(map(len, rounds)) for blocks in found.values() for rounds in blocks.values()}
    assert counts == {(2,)}
