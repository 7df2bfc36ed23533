"""Starts ranks with `hpctrain launch`, as a user does: on this machine as one node, or on a cluster of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


class RanksFailed(RuntimeError):
    """The ranks of a measurement ended with an error."""


def run_checked(argv: Sequence[str], *, what: str, environ: Mapping[str, str], timeout_s: float) -> Ended:
    """Runs a command to its end. Raises RanksFailed with its last lines if it fails or takes longer."""
    try:
        done = run_to_end(argv, environ=environ, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise RanksFailed(f"{what}: still running after {timeout_s:g} s, ended") from None
    if done.returncode != 0:
        raise RanksFailed(f"{what}: exit code {done.returncode}\n{done.tail}")
    return done


def salloc(num_nodes: int) -> list[str]:
    """Returns the command that allocates nodes, with one core of each."""
    return ["salloc", f"--nodes={num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]


def at_head_node(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a user on the cluster's head node: its Slurm, this Python, a /tmp of its own."""
    own_tmp = ("TMPDIR", "TEMP", "TMP")
    return {
        **{name: value for name, value in environ.items() if name not in own_tmp},
        "SLURM_CONF": str(cluster.plan.slurm_conf_path),
        "PATH": f"{Path(sys.executable).parent}:{search_path()}",
    }


class Place:
    """A place where ranks run the cases of a module, see `benchmarks.ranks`.

    module: name of that module. variables: environment variables of every launch, for all ranks and methods. starts:
    how each launch so far was started.
    """

    _interface = "lo"

    def __init__(
        self, module: str, *, variables: Mapping[str, str] | None = None, starts: list[Start] | None = None
    ) -> None:
        self._module = module
        # Read by Gloo only, which otherwise uses the address that the host's name resolves to.
        self._variables = {"GLOO_SOCKET_IFNAME": self._interface, **(variables or {})}
        self.starts: list[Start] = starts if starts is not None else []

    def run(
        self, case: str, settings: Mapping[str, Any], *, timeout_s: float,
        variables: Mapping[str, str] | None = None, scratch: Path | None = None,
    ) -> Any:  # fmt: skip
        """Starts ranks and returns what `case` returned on rank 0. Raises RanksFailed with the ranks' last lines.

        The case finds in its settings also `timeout_s`, and `directory`, an empty folder in `scratch` for its files,
        which is removed at the end. variables: of this launch, in addition.
        """
        mine = {**self._variables, **(variables or {})}
        with (
            tempfile.TemporaryDirectory(dir=self._folder()) as name,
            tempfile.TemporaryDirectory(dir=scratch or name) as files,
        ):
            asked, result = Path(name) / "settings.json", Path(name) / "result.json"
            given = {**settings, "timeout_s": timeout_s, "directory": files}
            asked.write_text(json.dumps(given))
            program = [sys.executable, "-m", "benchmarks.ranks", self._module, case, str(asked), str(result)]
            argv = [*self._launch(), "--", *program]
            try:
                done = self._wait_for(argv, mine, timeout_s=timeout_s)
            except subprocess.TimeoutExpired:
                raise RanksFailed(f"still running after {timeout_s:g} s, killed: {case}") from None
            if done.returncode != 0 or not result.exists():
                said = without_places(done.tail, directory=Path(name))
                raise RanksFailed(f"exit code {done.returncode}: {said}")
            found = json.loads(result.read_text())
            start = start_of(argv, done, variables=mine, ranks=found["ranks"], directory=Path(name))
            self.starts.append(start)
            return found["value"]

    def _folder(self) -> Path | None:
        """Returns the folder for settings and results, which all ranks see; None for the system's."""
        return None

    def _launch(self) -> list[str]:
        raise NotImplementedError

    def _wait_for(self, argv: Sequence[str], variables: Mapping[str, str], *, timeout_s: float) -> Ended:
        raise NotImplementedError


class OneNode(Place):
    """`num_ranks` ranks on this machine."""

    def __init__(self, module: str, *, num_ranks: int = 2, **more: Any) -> None:
        super().__init__(module, **more)
        self._num_ranks = num_ranks

    def _launch(self) -> list[str]:
        return [*LAUNCH, "-n", str(self._num_ranks)]

    def _wait_for(self, argv: Sequence[str], variables: Mapping[str, str], *, timeout_s: float) -> Ended:
        return run_to_end(argv, environ={**user_environment(), **variables}, timeout_s=timeout_s)


class OnCluster(Place):
    """`ranks_per_node` ranks on each of the cluster's first `num_nodes` nodes, of all by default, in a job that has one
    core of each node.

    The nodes share the cores of this machine, so ranks share cores. With one core per node in the job `hpctrain launch`
    detects this and starts the ranks with its settings for more ranks than cores.
    """

    _interface = "eth0"

    def __init__(
        self, module: str, cluster: Cluster, *, ranks_per_node: int = 2, num_nodes: int | None = None, **more: Any
    ) -> None:  # fmt: skip
        super().__init__(module, **more)
        self.cluster = cluster
        self.ranks_per_node = ranks_per_node
        self.num_nodes = num_nodes or cluster.plan.num_nodes

    def _folder(self) -> Path:
        return self.cluster.plan.directory

    def _launch(self) -> list[str]:
        num_ranks = self.ranks_per_node * self.num_nodes
        return [*self.job(), *LAUNCH, "-n", str(num_ranks), "--ranks-per-node", str(self.ranks_per_node)]

    def job(self) -> list[str]:
        return salloc(self.num_nodes)

    def _wait_for(self, argv: Sequence[str], variables: Mapping[str, str], *, timeout_s: float) -> Ended:
        at_head = self.cluster.argv(argv, cwd=REPOSITORY)
        try:
            return run_to_end(at_head, environ={**self.environment(), **variables}, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            self.cluster.run(["scancel", "--me", "--signal=KILL"], timeout_s=30)
            raise

    def environment(self) -> dict[str, str]:
        return at_head_node(self.cluster, user_environment())
