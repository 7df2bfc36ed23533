"""Slow ranks and links on a real cluster: a busy loop on a rank's core, a slow disk, a link at a tenth; and none.

One run serves many trials: each begins when the one before has ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.telemetry import read_records
from tests.cluster import Cluster
from tests.runbook import is_shown
from tests.straggler_tasks import WIDTH

pytestmark = pytest.mark.launches

# `make trials-slurm` asks for 100: ten trials of each cause, and a quarter of an hour in which nothing is slow.
TRIALS = int(os.environ.get("HPCTRAIN_TRIALS", "1"))
TRIALS_OF_EACH = min(TRIALS, 10)
HEALTHY_S = min(15.0 * TRIALS, 900.0)
FILESYSTEM = Path(__file__).parents[1] / "faults" / "checkpoint" / "faulty_filesystem.py"
WINDOW_S = 1.0
# Three windows that agree, of five steps at least; for a link also two probes.
NAMED_WITHIN_S, ENDED_WITHIN_S = 300.0, 300.0

RECIPE = f"""
[run]
name = "stragglers"
directory = "run"
steps = 1000000
[task]
target = "tests.straggler_tasks:Steps"
[data]
train = "disk/data"
global_batch = 16
io = "read"
prefetch_mb = 1.0
[optimizer]
name = "sgd"
lr = 1e-9
[stragglers]
window_s = {WINDOW_S}
[stop]
margin_s = 1
[telemetry]
progress_every_s = 5
"""


class Run:
    """A training on the cluster that goes on while things are made slow."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._output = folder / "output"
        self._folder = folder
        self._num_read = 0

    def lines(self) -> list[str]:
        """Lines about slow ranks that were printed since the last call."""
        found = [line for line in self.output().splitlines() if " slow (" in line]
        new, self._num_read = found[self._num_read :], len(found)
        return new

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def next_line(self, *, timeout_s: float) -> str:
        """Waits for the next line about a slow rank."""
        deadline_s = time.monotonic() + timeout_s
        while not (new := self.lines()):
            self.check(deadline_s, timeout_s)
            time.sleep(0.1)
        assert len(new) == 1, new
        return new[0]

    def wait_for_windows(self, count: int) -> None:
        """Waits until the ranks have been compared so often."""
        path = self._folder / "run" / "metrics" / "rank-00000.jsonl"
        deadline_s = time.monotonic() + 300
        while not path.exists() or sum(r["kind"] == "ranks" for r in read_records(path)) < count:
            self.check(deadline_s, 300)
            time.sleep(0.3)

    def check(self, deadline_s: float, timeout_s: float) -> None:
        assert self._process.poll() is None, self.output()
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s:\n{self.output()[-3000:]}"


@contextmanager
def training(cluster: Cluster, folder: Path, *, nodes: int, options: str) -> Iterator[Run]:
    """One rank on each of the first nodes, each on a core of its own as far as there are cores."""
    (folder / "recipe.toml").write_text(RECIPE)
    train = f"hpctrain train recipe.toml --set 'task.options={options}'"
    pin = f"exec taskset -c $((SLURM_PROCID % {os.cpu_count()})) {train}"
    names = ",".join(cluster.node_names[:nodes])
    srun = [
        "srun",
        f"--nodelist={names}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--wait=30",
        "bash",
        "-c",
        pin,
    ]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            cluster.argv(srun, cwd=folder), env=cluster.environment(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        run = Run(process, folder)
        run.wait_for_windows(4)
        yield run
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Disk:
    """A node's own mount of the data, through a filesystem that can be made slow."""

    def __init__(self, cluster: Cluster, folder: Path, *, node: str) -> None:
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(FILESYSTEM),
            str(folder / "stored"),
            str(folder / "disk"),
        ]
        self._process = subprocess.Popen(
            cluster.argv([*command, "direct-io"], cwd=folder, place=node), env=cluster.environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    @contextmanager
    def slow(self) -> Iterator[None]:
        self._ask({"kind": "slow", "at": 0, "delay_s": 0.015, "reads": "data"})
        yield
        self._ask(None)

    def close(self) -> None:
        with self._process:  # closes its pipes
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(20)

    def _ask(self, fault: dict[str, object] | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"fault": fault}) + "\n")
        self._process.stdout.readline()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = np.random.default_rng(1).random((256, WIDTH), dtype=np.float32)
    pack_arrays(tmp_path / "stored" / "data", {"x": samples})
    (tmp_path / "disk").mkdir()
    return tmp_path


@pytest.fixture
def disks(cluster: Cluster, folder: Path) -> Iterator[dict[str, Disk]]:
    found = {node: Disk(cluster, folder, node=node) for node in cluster.node_names}
    yield found
    for disk in found.values():
        disk.close()


@contextmanager
def busy_loop(cluster: Cluster, *, node: str, core: int) -> Iterator[None]:
    """A program on a node that uses all it gets of one core."""
    loop = ["taskset", "-c", str(core), sys.executable, "-S", "-c", "while True: pass"]
    process = subprocess.Popen(cluster.argv(loop, cwd=Path("/"), place=node), start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def slow_link(cluster: Cluster, *, node: str) -> Iterator[None]:
    cluster.set_link_rate(node, "100mbit")
    try:
        yield
    finally:
        cluster.set_rate("1gbit")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A rank that is made slow, by what, and the cause that must be named."""

    rank: int
    cause: str
    slow: AbstractContextManager[None]


def try_all(cluster: Cluster, run: Run, trials: Iterable[Trial]) -> None:
    """Makes ranks slow one after another. Each must be named, and its end reported."""
    named_s, ended_s = [], []
    for trial in trials:
        who = f"rank {trial.rank} ({cluster.node_names[trial.rank]}) is"
        assert run.lines() == []
        began_s = time.monotonic()
        with trial.slow:
            line = run.next_line(timeout_s=NAMED_WITHIN_S)
            named_s.append(time.monotonic() - began_s)
        assert line.startswith(f"{who} slow ({trial.cause}): "), line
        assert is_shown(line, page="f2-slow-rank.md"), line
        began_s = time.monotonic()
        line = run.next_line(timeout_s=ENDED_WITHIN_S)
        ended_s.append(time.monotonic() - began_s)
        assert line == f"{who} no longer slow ({trial.cause})"
        assert is_shown(line, page="f2-slow-rank.md"), line
    print(
        f"{len(named_s)} of {len(named_s)} named, after {np.median(named_s):.1f} s (median), at most "
        f"{max(named_s):.1f} s; their ends after {np.median(ended_s):.1f} s, at most {max(ended_s):.1f} s; windows "
        f"of {WINDOW_S:g} s"
    )


@pytest.mark.trials
@pytest.mark.thorough
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a core of its own")
@pytest.mark.timeout(120 + 150 * TRIALS_OF_EACH)
def test_a_busy_loop_on_a_ranks_core_is_named_compute_and_a_slow_disk_input(
    cluster: Cluster, folder: Path, disks: dict[str, Disk]
) -> None:
    trials = []
    for rank in random.Random(3).choices([0, 1], k=TRIALS_OF_EACH):
        node = cluster.node_names[rank]
        trials += [
            Trial(rank=rank, cause="compute", slow=busy_loop(cluster, node=node, core=rank)),
            Trial(rank=rank, cause="input", slow=disks[node].slow()),
        ]
    with training(cluster, folder, nodes=2, options="{products=40}") as run:
        try_all(cluster, run, trials)


@pytest.mark.trials
@pytest.mark.timeout(120 + 120 * TRIALS_OF_EACH)
def test_a_link_at_a_tenth_is_named_network(cluster: Cluster, folder: Path, disks: dict[str, Disk]) -> None:
    trials = [
        Trial(rank=rank, cause="network", slow=slow_link(cluster, node=cluster.node_names[rank]))
        for rank in random.Random(5).choices(range(4), k=TRIALS_OF_EACH)
    ]
    # Steps that mostly sleep: four ranks share this machine's cores.
    with training(cluster, folder, nodes=4, options="{sleep_s=0.05,parameters=500000}") as run:
        try_all(cluster, run, trials)


_OTHER_LOAD = """
import os, random, time
draw = random.Random(int(os.environ["LOAD"]))
while True:
    os.sched_setaffinity(0, {draw.randrange(os.cpu_count())})
    until = time.monotonic() + draw.uniform(0.02, 0.4)
    while time.monotonic() < until: pass
    with open(f"/tmp/load-{os.getpid()}", "wb") as file:
        file.write(bytes(draw.randrange(1 << 22))); os.fsync(file.fileno())
    time.sleep(draw.uniform(0.1, 1.0))
"""


@contextmanager
def other_load(cluster: Cluster) -> Iterator[None]:
    """On every node a program that computes for a moment on some core, writes a file, and pauses."""
    processes = [
        subprocess.Popen(
            cluster.argv([sys.executable, "-S", "-c", _OTHER_LOAD], cwd=Path("/"), place=node, env={"LOAD": str(n)}),
            start_new_session=True,
        )
        for n, node in enumerate(cluster.node_names)
    ]  # fmt: skip
    try:
        yield
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.trials
@pytest.mark.thorough
@pytest.mark.timeout(120 + HEALTHY_S)
def test_nobody_is_named_while_all_is_healthy_beside_other_load(
    cluster: Cluster, folder: Path, disks: dict[str, Disk]
) -> None:
    with (
        other_load(cluster),
        training(cluster, folder, nodes=4, options="{products=10,sleep_s=0.02,parameters=100000}") as run,
    ):
        end_s = time.monotonic() + HEALTHY_S
        while time.monotonic() < end_s:
            run.check(end_s + 1, HEALTHY_S)
            time.sleep(0.5)
        assert run.lines() == []
    records = list(read_records(folder / "run" / "metrics" / "rank-00000.jsonl"))
    windows = [record for record in records if record["kind"] == "ranks"]
    assert len(windows) > 0.3 * HEALTHY_S / WINDOW_S
    probes = [record for record in records if record["kind"] == "probe"]
    print(
        f"{len(windows)} windows in {HEALTHY_S:.0f} s, nobody named; {len(probes)} probes of the links, "
        f"{sum(probe['seconds'] for probe in probes):.2f} s together"
    )
