"""Where the ranks run: on this machine as one node, or on the cluster of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.cluster import Cluster
from tests.ranks_launcher import REPOSITORY, CommandResult, start_command


class RanksFailed(RuntimeError):
    """The ranks of a measurement ended with an error."""


class Place(Protocol):
    """Somewhere to run ranks."""

    def run(self, case: str, settings: Mapping[str, Any], *, timeout_s: float) -> Any:
        """What rank 0's case returned. RanksFailed, with the ranks' last lines, when they end otherwise."""


class OneNode:
    """Two ranks of this machine, started by mpirun."""

    def __init__(self, *, num_ranks: int = 2) -> None:
        self._num_ranks = num_ranks

    def run(self, case: str, settings: Mapping[str, Any], *, timeout_s: float) -> Any:
        with tempfile.TemporaryDirectory() as name:
            command = _command(case, settings, Path(name), timeout_s=timeout_s)
            with start_command(self._num_ranks, command, env={"GLOO_SOCKET_IFNAME": "lo"}) as launched:
                try:
                    done = launched.wait(timeout_s=timeout_s)
                except AssertionError as error:  # with the last lines, among them each rank's stacks
                    raise RanksFailed(str(error)) from None
            return _result(done, Path(name))


class OnCluster:
    """Ranks of a cluster, started by srun: `ranks_per_node` on each node."""

    def __init__(self, cluster: Cluster, *, ranks_per_node: int = 2) -> None:
        self.cluster = cluster
        self._ranks_per_node = ranks_per_node

    def run(self, case: str, settings: Mapping[str, Any], *, timeout_s: float) -> Any:
        with tempfile.TemporaryDirectory(dir=self.cluster.plan.directory) as name:
            srun = ["srun", f"--nodes={self.cluster.plan.num_nodes}"]
            srun += [f"--ntasks-per-node={self._ranks_per_node}", "--kill-on-bad-exit"]
            command = _command(case, settings, Path(name), timeout_s=timeout_s)
            try:
                done = self.cluster.run(
                    [*srun, *command], timeout_s=timeout_s, cwd=REPOSITORY, env={"GLOO_SOCKET_IFNAME": "eth0"}
                )
            except subprocess.TimeoutExpired as error:
                raise RanksFailed(f"still running after {timeout_s:g} s, killed: {case}") from error
            return _result(done, Path(name))


def _command(case: str, settings: Mapping[str, Any], directory: Path, *, timeout_s: float) -> list[str]:
    path = directory / "settings.json"
    path.write_text(json.dumps({**settings, "timeout_s": timeout_s, "directory": str(directory)}))
    module = [sys.executable, "-m", "benchmarks.reduction.ranks"]
    return [*module, case, str(path), str(directory / "result.json")]


def _result(done: subprocess.CompletedProcess[str] | CommandResult, directory: Path) -> Any:
    path = directory / "result.json"
    if done.returncode != 0 or not path.exists():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise RanksFailed(f"exit code {done.returncode}: {tail}")
    return json.loads(path.read_text())
