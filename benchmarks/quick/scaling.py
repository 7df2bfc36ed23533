"""`hpctrain bench scaling` on the cluster: one, two and four nodes of one rank, which share this machine's cores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results_file import Record
from benchmarks.starting import run_to_end, without_places
from benchmarks.step.runs import pack
from tests.cluster import Cluster

NODES = (1, 2, 4)
RATE = "1gbit"
RECIPE = "characters"
BAR = 0.9  # of what the cores allow; set by no issue
TIMEOUT_S = 300.0


class SweepFailed(RuntimeError):
    """The sweep ended with an error."""


def sweep(directory: Path, *, cluster: Cluster, say: Callable[[str], None]) -> list[Record]:
    """Measures strong scaling in one allocation of four nodes, and returns its records. directory: a working directory
    of `benchmarks.step`, which the nodes see. Raises SweepFailed."""
    pack(RECIPE, directory=directory)
    cluster.set_rate(RATE)
    document = directory / "scaling.json"
    words = [
        "hpctrain", "bench", "scaling", f"examples/{RECIPE}.toml", "--nodes", ",".join(map(str, NODES)),
        "--ranks-per-node", "1", "--steps", "12", "--warmup-steps", "3", "--json", str(document),
    ]  # fmt: skip
    salloc = ["salloc", f"--nodes={max(NODES)}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    argv = cluster.argv([*salloc, *words], cwd=directory)
    done = run_to_end(argv, environ=cluster.environment(), timeout_s=TIMEOUT_S)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SweepFailed(f"exit code {done.returncode}: {without_places(tail, directory=directory)}")
    say(f"{NODES[0]} to {NODES[-1]} nodes")
    return scaling_records(json.loads(document.read_text()), cores=os.cpu_count() or 1)


def scaling_records(document: Mapping[str, Any], *, cores: int) -> list[Record]:
    """Returns for each number of nodes but the first the speed-up / the one that the machine allows, on which the nodes
    share `cores` cores. document: `hpctrain.bench.scaling/1`."""
    records = []
    for size in document["sizes"][1:]:
        nodes, speedup = size["nodes"], size["speedup"]
        allowed = min(size["ranks"], cores) / document["baseline_ranks"]
        records.append(
            Record(
                id=f"scaling.nodes-{nodes}",
                what=f"{RECIPE}, {nodes} nodes of one rank, {RATE}: speed-up {speedup['value']:.2f} (95% interval "
                f"{speedup['low']:.2f} to {speedup['high']:.2f}) / {allowed:g}, what {cores} cores allow",
                value=speedup["value"] / allowed,
                bar=BAR,
                sense="at least",
                unit="samples/samples",
                samples={
                    "samples/s": {
                        str(run["ranks"]): [
                            other["samples_per_s"]
                            for other in document["runs"]
                            if other["ranks"] == run["ranks"]
                        ]
                        for run in document["runs"]
                    },
                    "speedup": speedup,
                },
                rounds=size["repeats"],
                range=(speedup["least"] / allowed, speedup["greatest"] / allowed),
            )
        )
    return records
