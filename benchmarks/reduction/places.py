"""Starts ranks with `hpctrain launch` on this machine as one node, or on a cluster of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.starting import (
    LAUNCH,
    REPOSITORY,
    Ended,
    Start,
    run_to_end,
    start_of,
    user_environment,
    without_places,
)
from tests.cluster import Cluster
from tests.cluster.requirements import search_path

MODULE = "benchmarks.reduction.ranks"


class RanksFailed(RuntimeError):
    """The ranks of a measurement ended with an error."""


class Place(Protocol):
    """A place where ranks run. starts: how each launch so far was started."""

    starts: list[Start]

    def run(self, case: str, settings: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Starts ranks and returns what `case` returned on rank 0. Raises RanksFailed with the ranks' last lines."""


class OneNode:
    """Ranks on this machine. variables: environment variables of every launch, for all ranks and methods. module: of
    the ranks' program."""

    def __init__(
        self, *, num_ranks: int = 2, variables: Mapping[str, str] | None = None, module: str = MODULE
    ) -> None:
        self._num_ranks = num_ranks
        self._variables = dict(variables or {})
        self._module = module
        self.starts: list[Start] = []

    def run(
        self,
        case: str,
        settings: Mapping[str, Any],
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """variables: of this launch, in addition."""
        # Read by Gloo only, which otherwise uses the address that the host's name resolves to.
        mine = {"GLOO_SOCKET_IFNAME": "lo", **self._variables, **(variables or {})}
        with tempfile.TemporaryDirectory() as name:
            argv = [*LAUNCH, "-n", str(self._num_ranks), "--"]
            argv += _command(case, settings, Path(name), timeout_s=timeout_s, module=self._module)
            try:
                done = run_to_end(argv, environ={**user_environment(), **mine}, timeout_s=timeout_s)
            except subprocess.TimeoutExpired:
                raise RanksFailed(f"still running after {timeout_s:g} s, killed: {case}") from None
            value, start = _result(argv, done, variables=mine, directory=Path(name))
            self.starts.append(start)
            return value


class OnCluster:
    """Ranks on a cluster: `ranks_per_node` on each node, in a job that has one core of each node.

    The nodes share the cores of this machine, so ranks share cores. With one core per node in the job `hpctrain launch`
    detects this and starts the ranks with its settings for more ranks than cores.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        ranks_per_node: int = 2,
        num_nodes: int | None = None,
        module: str = MODULE,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """num_nodes: of the cluster, that take part; None: all. module: the program of the ranks, like `ranks.py`."""
        self.cluster = cluster
        self.ranks_per_node = ranks_per_node
        self.num_nodes = num_nodes or cluster.plan.num_nodes
        self._module = module
        self._variables = dict(variables or {})
        self.starts: list[Start] = []

    def run(
        self,
        case: str,
        settings: Mapping[str, Any],
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """variables: of this launch, in addition."""
        num_nodes = self.num_nodes
        with tempfile.TemporaryDirectory(dir=self.cluster.plan.directory) as name:
            argv = ["salloc", f"--nodes={num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", *LAUNCH]
            argv += [
                "-n",
                str(self.ranks_per_node * num_nodes),
                "--ranks-per-node",
                str(self.ranks_per_node),
                "--",
            ]
            argv += _command(case, settings, Path(name), timeout_s=timeout_s, module=self._module)
            at_head = self.cluster.argv(argv, cwd=REPOSITORY)
            mine = {"GLOO_SOCKET_IFNAME": "eth0", **self._variables, **(variables or {})}
            try:
                done = run_to_end(at_head, environ={**self.environment(), **mine}, timeout_s=timeout_s)
            except subprocess.TimeoutExpired:
                self.cluster.run(["scancel", "--me", "--signal=KILL"], timeout_s=30)
                raise RanksFailed(f"still running after {timeout_s:g} s, killed: {case}") from None
            value, start = _result(argv, done, variables=mine, directory=Path(name))
            self.starts.append(start)
            return value

    def environment(self) -> dict[str, str]:
        """Returns the environment of a user on the cluster's head node: its Slurm, this Python, a /tmp of its own."""
        own_tmp = ("TMPDIR", "TEMP", "TMP")
        return {
            **{name: value for name, value in user_environment().items() if name not in own_tmp},
            "SLURM_CONF": str(self.cluster.plan.slurm_conf_path),
            "PATH": f"{Path(sys.executable).parent}:{search_path()}",
        }


def _command(
    case: str, settings: Mapping[str, Any], directory: Path, *, timeout_s: float, module: str = MODULE
) -> list[str]:
    path = directory / "settings.json"
    path.write_text(json.dumps({**settings, "timeout_s": timeout_s, "directory": str(directory)}))
    return [sys.executable, "-m", module, case, str(path), str(directory / "result.json")]


def _result(
    argv: Sequence[str], done: Ended, *, variables: Mapping[str, str], directory: Path
) -> tuple[Any, Start]:
    path = directory / "result.json"
    if done.returncode != 0 or not path.exists():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise RanksFailed(f"exit code {done.returncode}: {without_places(tail, directory=directory)}")
    result = json.loads(path.read_text())
    start = start_of(argv, done, variables=variables, ranks=result["ranks"], directory=directory)
    return result["value"], start
