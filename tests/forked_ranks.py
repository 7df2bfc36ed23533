"""Compares descriptions of ranks by `tests/ranks/launch/forked_rank.py`: of forked ranks and of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "ranks" / "launch" / "forked_rank.py"
# Variables of a step or a launch, of a server, or of a process.
_DIFFER = (
    "SLURM_STEP",
    "OMPI_MCA_orte_precondition_transports=",
    "SLURM_SRUN_COMM",
    "SLURM_PMIXP_",
    "SLURM_TASK_PID",
    "PMIX_",
    "HPCTRAIN_FORKED_FOR",
    "HPCTRAIN_FORK_SERVER",
)


def differences(cold: Path, warm: Path, *, differ: tuple[str, ...] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns what differs between two descriptions of a rank: name -> (of the started one, of the forked one).

    differ: beginnings of further `NAME=` that differ between two launches.
    """
    started, forked = (_kept(json.loads(path.read_text()), (*_DIFFER, *differ)) for path in (cold, warm))
    names = sorted(started.keys() | forked.keys())
    return {
        name: (started.get(name), forked.get(name)) for name in names if started.get(name) != forked.get(name)
    }


def _kept(rank: dict[str, Any], differ: tuple[str, ...]) -> dict[str, Any]:
    variables = rank.pop("variables")
    shown = [item for item in rank.pop("shown variables") if not item.startswith(differ)]
    return {
        **rank,
        **{f"variable {name}": text for name, text in variables.items() if not f"{name}=".startswith(differ)},
        **{f"shown {item.partition('=')[0]}": item for item in shown},
        "pid": None,
        "drawn": None,
        # Slurm's tasks of a node are one process group; a forked rank has one of its own.
        "leads its group": None,
    }
