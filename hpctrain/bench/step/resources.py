"""What the runs of a measurement have in common: threads of a rank, a folder for their files, cores for every rank."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hpctrain.launch import Machine, place_ranks
from hpctrain.run import Recipe


def threads_of_a_rank(most_ranks: int, *, machine: Machine, ranks_per_node: int | None) -> int:
    """Cores per rank at the largest number of ranks, used for all numbers: one rank on all cores is no fair baseline.

    OMP_NUM_THREADS or SLURM_CPUS_PER_TASK instead, if set.
    """
    given = os.environ.get("OMP_NUM_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK") or ""
    if given.isdigit() and int(given) > 0:
        return int(given)
    most = place_ranks(most_ranks, ranks_per_node, environ=os.environ, hosts=(), notes=[])
    return max(1, machine.num_cores // most.ranks_on_a_node)


def scratch_folder(recipe: Recipe, *, shared: bool) -> Path:
    """Returns a folder for the runs' files: the temporary one, or if all nodes must see it (`shared`) that of the run
    directory or its nearest existing parent."""
    if not shared:
        return Path(tempfile.gettempdir())
    place = Path(recipe.run.directory).absolute()
    while not place.is_dir():
        place = place.parent
    return place


def shares_cores(num_ranks: int, *, machine: Machine, ranks_per_node: int | None) -> bool:
    """Whether more ranks than cores are on this machine. In a Slurm job False: Slurm has given each rank its cores."""
    if os.environ.get("SLURM_JOB_ID"):
        return False
    placed = place_ranks(num_ranks, ranks_per_node, environ=os.environ, hosts=(), notes=[])
    return placed.ranks_on_a_node > machine.num_cores
