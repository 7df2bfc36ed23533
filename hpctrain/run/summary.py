"""Summary of a run: `summary.json`, and the last line that is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import Collective, all_gather_distinct, all_gather_json, describe_ranks
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session
from hpctrain.telemetry import tell, total_j, write_json
from hpctrain.topology import Topology
from hpctrain.train import Totals

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
    """Merges the ranks' totals; rank 0 writes and prints the summary. Collective; the same value on all ranks, but for
    `slow`, which rank 0 knows.

    status: `finished`, `stopped` or `diverged`. Seconds are means over the ranks. `samples_per_s` is relative to the
    time of the steps, including input, communication and saving, without start-up and evaluation.
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
    """Returns all names, sorted, and every rank's seconds, shape (ranks, names); 0 where a rank lacks a name.

    Collective: each rank receives 8 bytes for each name and rank.
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
    """Returns for each node its energy, and the mean and the largest of its ranks' seconds, with the rank. Pure.

    by_rank: shape (ranks, names), float64. energy_by_rank: joules of the rank's node by source, where it has read them.
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
    """Returns the energy of nodes, J: `total_j`, and `joules` by source; None if no rank has read its node's. Pure.

    by_rank: joules by source; None of a rank that has not read them.
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
    """Returns the summary in `directory` if it is that of a run finished at `step`, else None. Call it on rank 0."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    done = isinstance(summary, dict) and summary.get("status") == "finished" and summary.get("step") == step
    return summary if done else None
