"""How long the loss of a rank interrupts an elastic run: `python -m benchmarks.elastic_standstill --losses 20`.

The standstill is the time from the last step that is recorded before the loss to the first step that is recorded after
it. The run trains the digits on this machine; each rank is killed by SIGKILL at a random moment, and is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpctrain.supervise import read_attempts
from hpctrain.telemetry import read_records

_HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
_RECIPE = """
[run]
name = "standstill"
directory = "run"
steps = 1000000
[task]
target = "hpctrain.tasks.digits:Digits"
[data]
train = "data/train"
global_batch = 64
[optimizer]
lr = 1e-3
[telemetry]
write_every_s = 0
[checkpoint]
every_steps = 1000
"""
_WAITS_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine; or in all on --nodes")
    parser.add_argument("--nodes", type=int, help="network namespaces with a Slurm of their own (needs root)")
    parser.add_argument("--lose", choices=["rank", "link"], default="rank", help="--nodes: what is lost")
    parser.add_argument("--output", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if words.nodes is None:
            found = measure(Path(folder), losses=words.losses, ranks=words.ranks)
        else:
            found = measure_nodes(
                Path(folder), losses=words.losses, ranks=words.ranks, nodes=words.nodes, lose=words.lose
            )
    text = json.dumps(found, indent=2)
    print(text)
    if words.output is not None:
        words.output.write_text(text + "\n")


def measure_nodes(folder: Path, *, losses: int, ranks: int, nodes: int, lose: str) -> dict[str, Any]:
    """Kills a rank, or cuts the link of a node, which is mended when the others train again."""
    from tests.cluster import Cluster, ClusterPlan
    from tests.cluster.cluster import CLUSTERS
    from tests.cluster.supervised_jobs import submit

    _prepare(folder)
    draw = random.Random(1)
    plan = ClusterPlan(
        directory=CLUSTERS / f"standstill-{os.getpid()}", num_nodes=nodes, rate="1gbit",
        cores_per_node=4,
    )  # fmt: skip
    with Cluster.up(plan, shared=[folder]) as cluster:
        limits = "--max-restarts 99999 --node-budget 99999"
        options = [f"--nodes={nodes}", f"--ntasks-per-node={ranks // nodes}", "--time=120"]
        job = submit(cluster, folder, *options, supervise=f"--elastic 1:{ranks} {limits}")
        lost_after: list[int] = []  # numbers of the attempts that a loss has ended
        attempt = 0
        try:
            for _ in range(losses):
                attempt = _wait_until_it_trains(folder, after=attempt, ranks=ranks)
                time.sleep(draw.uniform(0.2, 1.0))
                lost_after.append(attempt)
                node = draw.choice(cluster.node_names[1:])  # the first one has the supervisor
                if lose == "rank":
                    os.kill(draw.choice([*cluster.ranks(job, node).values()]), signal.SIGKILL)
                    continue
                cluster.cut_link(node)
                try:
                    _wait_until_it_trains(folder, after=attempt)
                finally:
                    cluster.mend_link(node)
            _wait_until_it_trains(folder, after=attempt, ranks=ranks)
        except BaseException:
            for path in folder.glob("slurm-*.out"):
                print(path.read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            cluster.run(["scancel", str(job)], timeout_s=300)
    return {"nodes": nodes, "lose": lose, **_summary(folder, ranks=ranks, lost_after=lost_after)}


def _prepare(folder: Path) -> None:
    subprocess.run(
        [_HPCTRAIN, "data", "pack", "digits", "data"], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    (folder / "recipe.toml").write_text(_RECIPE)


def _summary(folder: Path, *, ranks: int, lost_after: list[int]) -> dict[str, Any]:
    attempts = read_attempts(folder / "run")
    seconds = standstills(folder)
    of_losses = [seconds[number] for number in lost_after if number in seconds]
    resized = [each for number, each in seconds.items() if number not in lost_after]
    return {
        "ranks": ranks,
        "losses": len(of_losses),
        "median_s": statistics.median(of_losses),
        "longest_s": max(of_losses),
        "seconds": [round(each, 3) for each in of_losses],
        "parts_median_s": _parts(folder, lost_after=lost_after),
        "steps_lost": [attempt.steps_lost for attempt in attempts if attempt.number in lost_after],
        **({"growths": len(resized), "growth_median_s": statistics.median(resized)} if resized else {}),
    }


def measure(folder: Path, *, losses: int, ranks: int) -> dict[str, Any]:
    _prepare(folder)
    options = ["--elastic", f"1:{ranks}", "--max-restarts", "99999"]
    command = [_HPCTRAIN, "supervise", *options, "--", "hpctrain", "train", "recipe.toml"]
    draw = random.Random(1)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        for number in range(1, losses + 1):
            _wait_until_it_trains(folder, after=number - 1)
            time.sleep(draw.uniform(0.2, 1.0))
            environment = json.loads((folder / "run" / "environment.json").read_text())
            os.kill(draw.choice(environment["ranks"])["pid"], signal.SIGKILL)
        _wait_until_it_trains(folder, after=losses)
    except BaseException:
        print((folder / "output").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return _summary(folder, ranks=ranks, lost_after=list(range(1, losses + 1)))


def standstills(folder: Path) -> dict[int, float]:
    """Returns the seconds from the last step before the end of an attempt to the first step after it, by its number."""
    attempts = read_attempts(folder / "run")
    times = [at for at, _ in _steps(folder)]
    found = {}
    for ended, attempt in pairwise(attempts):
        before = [at for at in times if at < attempt.began]
        after = [at for at in times if at > attempt.began]
        if before and after:
            found[ended.number] = min(after) - max(before)
    return found


def _parts(folder: Path, *, lost_after: list[int]) -> dict[str, float]:
    """Returns the medians of the parts of a standstill, in seconds."""
    parts: dict[str, list[float]] = {}
    times = [at for at, _ in _steps(folder)]
    for ended, attempt in pairwise(read_attempts(folder / "run")):
        if ended.number in lost_after and ended.ended is not None and attempt.training_began is not None:
            last = max(at for at in times if at < attempt.began)
            first = min(at for at in times if at > attempt.began)
            parts.setdefault("until the ranks have ended", []).append(ended.ended - last)
            parts.setdefault("check of the nodes", []).append(attempt.began - ended.ended)
            parts.setdefault("start of the ranks and first step", []).append(first - attempt.began)
    return {name: round(statistics.median(seconds), 2) for name, seconds in parts.items()}


def _steps(folder: Path) -> list[tuple[float, int]]:
    path = folder / "run" / "metrics" / "rank-00000.jsonl"
    records = read_records(path) if path.exists() else []
    return [(record["time"], record["step"]) for record in records if record["kind"] == "step"]


def _wait_until_it_trains(folder: Path, *, after: int = 0, ranks: int | None = None) -> int:
    """Waits until an attempt after number `after`, with so many ranks, has made five steps. Returns its number."""
    until_s = time.monotonic() + _WAITS_S
    while time.monotonic() < until_s:
        found = read_attempts(folder / "run")
        is_that = bool(found) and found[-1].number > after and ranks in (None, found[-1].ranks)
        if is_that and sum(at > found[-1].began for at, _ in _steps(folder)) >= 5:
            return found[-1].number
        time.sleep(0.05)
    raise RuntimeError(f"no attempt after number {after} trains, {ranks or 'any number of'} ranks")


if __name__ == "__main__":
    main()
