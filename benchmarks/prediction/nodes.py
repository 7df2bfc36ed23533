"""What runs on 1, 2 and 4 nodes predict for each other, and what they measure: the advice on the number of nodes.

    python -m benchmarks.prediction.nodes FOLDER

As root; makes the cluster of the tests (network namespaces with limited links, which share the cores of this machine).
The task sleeps instead of computing, so that ranks which share cores compute as if each had a node of its own. FOLDER
gets the data and the run directories.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from hpctrain.data import pack_arrays
from hpctrain.report import RunData, read_run
from tests.cluster import Cluster, ClusterPlan
from tests.cluster.cluster import CLUSTERS

NODES = (1, 2, 4)
# Parameters of each of the four layers, by the rate of the links.
SIZES = {"1gbit": 500_000, "100mbit": 250_000}
RECIPE = """
[run]
directory = "{directory}"
steps = 121
[task]
target = "tests.scaling_tasks:Proportional"
options = {{ sample_s = 0.004, fixed_s = 0.01, size = {size} }}
[data]
train = "data"
global_batch = 32
[optimizer]
name = "sgd"
[scaling]
link = "{rate}"
"""


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    # 328 samples: the last batch of each epoch has 8.
    pack_arrays(folder / "data", {"x": np.ones((328, 4), np.float32)})
    plan = ClusterPlan(
        directory=CLUSTERS / f"nodes-{os.getpid()}", num_nodes=4, rate="1gbit", cores_per_node=4
    )
    with Cluster.up(plan, shared=[folder]) as cluster:
        for rate, size in SIZES.items():
            cluster.set_rate(rate)
            for nodes in NODES:
                directory = f"run-{rate}-{nodes}"
                recipe = folder / f"{directory}.toml"
                recipe.write_text(RECIPE.format(directory=directory, size=size, rate=rate))
                words = [
                    "srun",
                    "-N",
                    str(nodes),
                    "--ntasks-per-node=1",
                    "--mpi=pmix",
                    "hpctrain",
                    "train",
                    recipe.name,
                ]
                done = cluster.run(words, timeout_s=600, cwd=folder)
                if done.returncode != 0:
                    print(done.stderr, file=sys.stderr)
                    return done.returncode
    for rate in SIZES:
        print(table({nodes: read_run(folder / f"run-{rate}-{nodes}") for nodes in NODES}, rate=rate))
    return 0


def table(runs: dict[int, RunData], *, rate: str) -> str:
    """Returns rows of a table: what each run predicts for the others, and the advice of each run."""
    measured = {nodes: run.efficiency.step_s for nodes, run in runs.items() if run.efficiency is not None}
    lines = []
    for nodes, run in runs.items():
        if run.advice is None:
            continue
        for to, step_s in measured.items():
            if (one := run.advice.on(to)) is not None and to != nodes:
                inside = "yes" if one.low_s <= step_s <= one.high_s else "no"
                numbers = [1e3 * value for value in (one.step_s, one.low_s, one.high_s, step_s)]
                cells = [rate, f"{nodes} to {to}", *(f"{ms:.0f}" for ms in numbers), inside]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append(f"{nodes}: {run.advice.text}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
