"""Starts ranks as a user does, without settings that `hpctrain launch` would not make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.step.variants import RANKS_PER_NODE, Variant
from tests.cluster import Cluster
from tests.cluster.requirements import search_path
from tests.ranks_launcher import OUTER_LAUNCHER, REPOSITORY

# Variables that the tests set for their ranks, or that a shell may have set for all programs.
NOT_A_USERS = ("LD_PRELOAD", "OMP_NUM_THREADS")
NODE_CORES = 1


class Place(Protocol):
    """A place where ranks are started."""

    def start(
        self, variant: Variant, command: Sequence[str], *, directory: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        """Starts the ranks in `directory` and returns at once; their output goes to `log`."""

    def set_rate(self, rate: str | None) -> None:
        """Limits the rate of the links between nodes; None: no limit."""


def user_environment() -> dict[str, str]:
    """Returns the environment of a user's shell, with this tree's hpctrain."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OUTER_LAUNCHER) and name not in NOT_A_USERS
    }
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), search_path()])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environ.get("PYTHONPATH")]))
    if os.geteuid() == 0:  # as `hpctrain launch` does
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return environ


def launch_words(variant: Variant, command: Sequence[str], *, ranks_per_node: int | None = None) -> list[str]:
    """Returns the command line that a user types."""
    ranks = str(variant.num_ranks)
    if variant.by_mpirun:  # the options that Horovod's documentation names
        return [
            "mpirun",
            "-np",
            ranks,
            "-H",
            f"localhost:{ranks}",
            "-bind-to",
            "none",
            "-map-by",
            "slot",
            *command,
        ]
    placed = ["--ranks-per-node", str(ranks_per_node)] if ranks_per_node is not None else []
    return ["hpctrain", "launch", "-n", ranks, *placed, "--", *command]


def _start(
    argv: Sequence[str], *, environ: dict[str, str], directory: Path, log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            argv, cwd=directory, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


class OneNode:
    """Ranks on this machine."""

    def start(
        self, variant: Variant, command: Sequence[str], *, directory: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        environ = {**user_environment(), **dict(variant.environment)}
        return _start(launch_words(variant, command), environ=environ, directory=directory, log=log)

    def set_rate(self, rate: str | None) -> None:
        assert rate is None


class OnCluster:
    """Ranks on the cluster of namespaces: two on each node, which has one core for Slurm."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def start(
        self, variant: Variant, command: Sequence[str], *, directory: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        num_nodes = variant.num_ranks // RANKS_PER_NODE
        salloc = ["salloc", f"--nodes={num_nodes}", "--ntasks-per-node=1", f"--cpus-per-task={NODE_CORES}"]
        words = [*salloc, *launch_words(variant, command, ranks_per_node=RANKS_PER_NODE)]
        environ = {k: v for k, v in user_environment().items() if k not in ("TMPDIR", "TEMP", "TMP")}
        environ["SLURM_CONF"] = str(self._cluster.plan.slurm_conf_path)
        return _start(
            self._cluster.argv(words, cwd=directory, env=dict(variant.environment)),
            environ=environ, directory=directory, log=log,
        )  # fmt: skip

    def set_rate(self, rate: str | None) -> None:
        self._cluster.set_rate(rate)
