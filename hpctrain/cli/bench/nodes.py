"""The table of `hpctrain bench nodes`."""

from __future__ import annotations

from rich.table import Table

from hpctrain.bench import empty_table
from hpctrain.comm import describe_ranks
from hpctrain.run import Probe
from hpctrain.topology import Topology


def nodes_table(probe: Probe, topology: Topology) -> Table:
    """Returns a table with one row per node. On one node it has no columns about links."""
    columns = ["node", "ranks", "memory, GB/s", "arithmetic, GFLOP/s"]
    if probe.links is not None:
        columns += ["to other nodes, MB/s", "latency, us", "slowest partner", "with it, MB/s"]
    title = f"nodes: {topology.describe()}, {probe.seconds:.1f} s"
    table = empty_table(title, columns, texts=("node", "ranks", "slowest partner"))
    for number, (name, ranks) in enumerate(zip(topology.node_names, topology.ranks_by_node, strict=True)):
        here = list(ranks)
        cells = [
            name,
            describe_ranks(ranks).partition(" ")[2],
            f"{probe.ranks.memory_bytes_per_s[here].sum() / 1e9:.3g}",
            f"{probe.ranks.flop_per_s[here].sum() / 1e9:.3g}",
        ]
        if probe.links is not None:
            link = probe.links.nodes[number]
            cells += [
                f"{link.bytes_per_s / 1e6:.3g}",
                f"{link.latency_s * 1e6:.3g}",
                topology.node_names[link.slowest_partner],
                f"{link.slowest_bytes_per_s / 1e6:.3g}",
            ]
        table.add_row(*cells)
    return table
