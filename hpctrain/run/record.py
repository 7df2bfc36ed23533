"""Records what explains a run's speed and what is needed to repeat the run. The records contain no secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from hpctrain.comm import Collective, all_gather_distinct, all_gather_json, describe_ranks
from hpctrain.data import Dataset
from hpctrain.launch import seconds_since_start, was_forked
from hpctrain.reduce import Reduction
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session
from hpctrain.telemetry import tell, total_j, write_json
from hpctrain.topology import Topology
from hpctrain.train import Totals
from hpctrain.version import __version__

PACKAGES = ("torch", "numpy", "h5py", "mpi4py", "horovod")

# Listed one by one: a prefix such as HOROVOD_ would also match secret keys, which must not be recorded.
VARIABLES = (
    "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", "LD_PRELOAD", "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD",
    "HPCTRAIN_RANKS_PER_NODE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def environment_record(session: Session, *, commit: str | None) -> dict[str, Any]:
    """Returns the environment of all ranks. Collective.

    Lists with one entry per rank or per node are in the result of rank 0 only.
    """
    # What every rank knows already is not gathered.
    nodes, hosts = session.topology.node_of_rank, [cores.host for cores in session.gather_cores()]
    mine = {
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": str(session.device),
    }
    pid = torch.tensor([os.getpid()], dtype=torch.int32)
    pids = session.world.all_gather(pid, counts=[1] * session.world_size).tolist()
    found = all_gather_json(session.world, mine)
    lists: dict[str, Any] = {}
    if session.rank == 0:
        lists["ranks_by_node"] = [list(ranks) for ranks in session.topology.ranks_by_node]
        lists["node_names"] = list(session.topology.node_names)
        places = session.axes.places()
        lists["ranks"] = [
            {
                "rank": rank,
                "host": host,
                "node": session.topology.node_names[node],
                **places.get(rank, {}),
                **about,
                "pid": pid,
            }
            for rank, (host, node, about, pid) in enumerate(zip(hosts, nodes, found, pids, strict=True))
        ]
    return {
        **versions_record(),
        "commit": commit,
        "launcher": session.identity.launcher,
        "start": {"forked": was_forked(os.environ), "seconds": _rounded(seconds_since_start(os.environ))},
        "backend": session.world.reduction_backend,
        "backend_reason": session.backend_reason,
        "topology": session.topology.describe(),
        "notes": session.notes,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        **lists,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def reduction_record(recipe: Recipe, reduction: Reduction | None) -> dict[str, Any]:
    """Returns how gradients are reduced.

    reduction: hpctrain's reduction. None if FSDP2 (by itself or through hooks), torch.distributed or a pipeline's
    updater reduces the gradients.
    """
    if reduction is None and recipe.parallel.pipeline > 1:
        return {"algorithm": "pipeline", "wire": "fp32", "reduction": {"source": "parallel.pipeline"}}
    if reduction is None and recipe.parallel.shard == "none":
        return {"algorithm": "torch.distributed", "wire": "fp32", "reduction": {"source": "parallel.tensor"}}
    if reduction is None:
        asked, source = recipe.reduction, {"source": "parallel.shard"}
        algorithm = "fsdp2" if asked.algorithm == "auto" else f"fsdp2-{asked.algorithm}"
        return {"algorithm": algorithm, "wire": asked.wire, "reduction": source}
    return {"algorithm": reduction.algorithm, "wire": reduction.wire, "reduction": reduction.record}


def versions_record() -> dict[str, Any]:
    """Returns the versions of Python, packages and libraries in this process. Not collective."""
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hdf5": h5py.version.hdf5_version,
        "hdf5_parallel": bool(h5py.get_config().mpi),
        "cuda": torch.version.cuda,
    }


def machine_record() -> dict[str, Any]:
    """Returns the properties of this machine on which measurements depend. Not collective."""
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _cpu_model() -> str:
    """Returns the CPU's model name from the kernel; the CPU's architecture if the kernel knows no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def working_commit() -> str | None:
    """Returns the commit of the working directory, with `+changes` if files differ from that commit.

    Returns None outside git.
    """
    try:
        asked = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
        done = subprocess.run(asked, cwd=Path.cwd(), capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _describe_backend(session: Session, reduction: Reduction | None) -> str:
    """Describes the communication backends and why they were chosen, for the line that is printed at the start."""
    world = session.world
    if reduction is None:
        return world.backend
    if world.backend == world.reduction_backend:
        why = session.backend_reason
        return f"{world.backend} ({why})" if why else world.backend
    if reduction.by_library:
        return f"{world.reduction_backend} for the reduction and {world.backend} for the rest"
    return f"{world.backend} ({world.reduction_backend} is not started: the reduction is hpctrain's own)"


def _describe_reduction(recipe: Recipe, reduction: Reduction | None) -> str:
    if reduction is None:
        section, wire = recipe.parallel, recipe.reduction.wire
        split = [f"layers split over {section.tensor} ranks"] if section.tensor > 1 else []
        if section.pipeline > 1:
            split.insert(0, f"a pipeline of {section.pipeline} ranks, {section.schedule}")
        within = "each stage" if section.pipeline > 1 else f"the {section.shard_within}"
        sharded = [f"{section.shard} sharded within {within}"] if section.shard != "none" else []
        on_wire = [f"gradients {wire} on the wire"] if wire != "fp32" else []
        return ", ".join(split + sharded + on_wire)
    shard = recipe.parallel.shard
    sharded = [f"{shard} sharded"] if shard != "none" else []
    schedule = recipe.reduction.schedule
    every = getattr(schedule, "every", None)  # Adasum is the reduction itself
    rounds = [f"{schedule.method} every {every} steps"] if schedule is not None and every is not None else []
    return ", ".join([f"{reduction.algorithm} reduction, {reduction.wire} on the wire", *rounds, *sharded])


def print_start(recipe: Recipe, session: Session, *, reduction: Reduction | None, dataset: Dataset) -> None:
    if session.rank == 0:
        tell(
            f"{recipe.run.name}: {session.world_size} rank{'s' if session.world_size > 1 else ''}, "
            f"{session.topology.describe()}, {_describe_backend(session, reduction)}, "
            f"{_describe_reduction(recipe, reduction)}, {session.device.type}; {dataset.num_samples:,} samples, "
            f"global batch {recipe.data.global_batch}"
        )


# Summary of a run: `summary.json`, and the last line that is printed.


SUMMARY = "summary.json"
NODES = "nodes.json"


def summarize(
    totals: Totals,
    *,
    recipe: Recipe,
    session: Session,
    environment: dict[str, Any],
    wall_s: float,
    status: str,
) -> dict[str, Any]:
    """Merges the ranks' totals into the run's summary, which rank 0 writes and prints. Collective.

    totals: what this rank's training loop has done.
    wall_s: duration of the run in seconds.
    status: `finished`, `stopped` or `diverged`.

    The result is the same on all ranks, except `slow`, which only rank 0 knows. Seconds are means over the ranks.
    `samples_per_s` is the number of samples divided by the time of the steps, which includes input, communication and
    saves, but neither start-up nor evaluation.
    """
    names, by_rank = seconds_of_all(totals.seconds, comm=session.world)
    seconds = dict(zip(names, by_rank.mean(axis=0).tolist(), strict=True))
    energy_by_rank = all_gather_json(session.world, totals.energy_j)
    step_s = seconds.get("step", 0.0)
    training_s = step_s - seconds.get("evaluation", 0.0)
    summary = {
        "name": recipe.run.name,
        "status": status,
        "ranks": session.world_size,
        "topology": environment["topology"],
        "backend": environment["backend"],
        "algorithm": environment["algorithm"],
        "wire": environment["wire"],
        "step": totals.position.step,
        "samples_seen": totals.position.samples,
        "steps_here": totals.steps,
        "samples_here": totals.samples,
        "samples_per_s": totals.samples / training_s if training_s > 0 else 0.0,
        "wall_s": wall_s,
        "seconds": seconds,
        "exposed_sync_share": seconds.get("exposed_sync", 0.0) / step_s if step_s else 0.0,
        "efficiency": totals.efficiency,
        "energy": energy_of(energy_by_rank),
        "loss": totals.last_loss,
        "quality": totals.quality,
        "skipped_steps": totals.skipped_steps,
        "skipped_samples": totals.skipped_samples,
        "micro_batches": totals.micro_batches,
        "out_of_memory": totals.out_of_memory,
        "roll_backs": totals.roll_backs,
        "lr_factor": totals.lr_factor,
        "checkpoints_written": totals.checkpoints,
        "resumed_from": totals.resumed_from,
        "stopped_by": totals.stopped_by,
        "time_left_s": totals.time_left_s,
        "slow": list(totals.slow),
    }
    if session.rank == 0:
        write_json(Path(recipe.run.directory) / SUMMARY, summary)
        nodes = by_node(names, by_rank, energy_by_rank, topology=session.topology)
        write_json(Path(recipe.run.directory) / NODES, nodes)
        skipped = (
            f", {totals.skipped_steps:,} of {totals.steps:,} steps skipped" if totals.skipped_steps else ""
        )
        skipped += f", {totals.skipped_samples:,} damaged samples left out" if totals.skipped_samples else ""
        quality = "".join(f", {name} {value:.4f}" for name, value in totals.quality.items())
        tell(
            f"{recipe.run.name}: {status} at step {totals.position.step}, {summary['samples_per_s']:,.0f} samples/s, "
            f"{summary['exposed_sync_share']:.0%} of the step time exposed to communication{quality}{skipped}; "
            f"records in {recipe.run.directory}"
        )
    return summary


def seconds_of_all(
    seconds: Mapping[str, float], *, comm: Collective
) -> tuple[list[str], NDArray[np.float64]]:
    """Returns the names that occur on any rank, sorted, and the seconds of all ranks. Collective.

    The seconds are float64, shape (ranks, names). If a rank lacks a name, its seconds for this name are 0. Each rank
    receives 8 bytes per name and rank.
    """
    different, _ = all_gather_distinct(comm, sorted(seconds))
    names = sorted({name for found in different for name in found})
    mine = torch.tensor([seconds.get(name, 0.0) for name in names], dtype=torch.float64)
    every = comm.all_gather(mine, counts=[len(names)] * comm.num_ranks)
    return names, every.numpy().reshape(comm.num_ranks, len(names))


def by_node(
    names: Sequence[str],
    by_rank: NDArray[np.float64],
    energy_by_rank: Sequence[Mapping[str, float] | None],
    *,
    topology: Topology,
) -> list[dict[str, Any]]:
    """Returns for each node its energy and, by name, the mean and largest seconds of its ranks. Pure.

    For each name, the result also gives the rank with the largest seconds.

    by_rank: float64, shape (ranks, names).
    energy_by_rank: for each rank, the joules of the rank's node by source; None for a rank that has not read the
    energy.
    """
    found = []
    for name, ranks in zip(topology.node_names, topology.ranks_by_node, strict=True):
        here = by_rank[list(ranks)]
        found.append(
            {
                "node": name,
                "ranks": describe_ranks(ranks).removeprefix("ranks ").removeprefix("rank "),
                "mean": dict(zip(names, here.mean(axis=0).tolist(), strict=True)),
                "largest": {
                    what: {"seconds": float(column.max()), "rank": ranks[int(column.argmax())]}
                    for what, column in zip(names, here.T, strict=True)
                },
                "energy": energy_of([energy_by_rank[rank] for rank in ranks]),
            }
        )
    return found


def energy_of(by_rank: Sequence[Mapping[str, float] | None]) -> dict[str, Any] | None:
    """Returns the energy of all nodes: `total_j`, and `joules` by source; None if no rank has read energy. Pure.

    by_rank: for each rank, the joules of the rank's node by source; None for a rank that has not read the energy.
    """
    nodes = [joules for joules in by_rank if joules is not None]
    if not nodes:
        return None
    sources = {source for joules in nodes for source in joules}
    return {
        "total_j": sum(total_j(joules) for joules in nodes),
        "joules": {source: sum(joules.get(source, 0.0) for joules in nodes) for source in sorted(sources)},
        "nodes": len(nodes),
    }


def finished_summary(directory: Path, *, step: int) -> dict[str, Any] | None:
    """Returns the summary in `directory` if its run finished at the step `step`, else None. For rank 0."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    done = isinstance(summary, dict) and summary.get("status") == "finished" and summary.get("step") == step
    return summary if done else None
