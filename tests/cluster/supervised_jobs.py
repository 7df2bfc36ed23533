"""Jobs of the cluster under `hpctrain supervise`: what the tests submit, and what the runs have recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.ranks_launcher import REPOSITORY
from tests.run_files import records_of
from tests.supervised_runs import attempts, write_recipe

SCRIPT = REPOSITORY / "slurm" / "supervise.sbatch"
# Below /tmp, which each node has to itself.
NODE_STORAGE = "hpct-local"


def prepare(
    folder: Path, *, plan: str = "", timeout_s: float = 600, data: str = "", on_nodes: bool = False
) -> None:
    """Writes `recipe.toml`, a run without an end. on_nodes: it keeps its checkpoints on the nodes first."""
    checkpoint = 'mode = "async"\n' + (f'local = "/tmp/{NODE_STORAGE}"' if on_nodes else "")
    write_recipe(
        folder, plan=plan, steps=100000, step_s=0.05, run=f"timeout_s = {timeout_s}", data=data, checkpoint=checkpoint
    )  # fmt: skip


def submit(
    cluster: Cluster,
    folder: Path,
    *options: str,
    supervise: str = "",
    env: Mapping[str, str] | None = None,
) -> int:
    """supervise: more options of `hpctrain supervise`."""
    script = folder / "job.sh"
    script.write_text(SCRIPT.read_text().replace("hpctrain supervise ", f"hpctrain supervise {supervise} "))
    return cluster.submit([*options, str(script), "recipe.toml"], cwd=folder, env=env)


def records(folder: Path, kind: str) -> list[tuple[float, int]]:
    """Time and step of each record of this kind that rank 0 has made."""
    return [(record["time"], record["step"]) for record in records_of(folder / "run", kind)]


def trains(folder: Path, *, attempt: int, steps: int = 12) -> Callable[[], bool]:
    """Whether so many steps of this attempt are done."""

    def done() -> bool:
        found = attempts(folder)
        if len(found) < attempt or found[-1].first_step is None:
            return False
        return any(step >= found[-1].first_step + steps for _, step in records(folder, "step")[-3:])

    return done


def revive(cluster: Cluster, node: str) -> None:
    """Starts the node's slurmd if it does not run."""
    if not any(b"slurmd\0" in command_of(pid) for pid in cluster.processes(node)):
        cluster.start_slurmd(node)


def command_of(pid: int) -> bytes:
    """Returns the process's command line, words ended by NUL; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
