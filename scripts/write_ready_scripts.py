"""Writes slurm/*.sbatch from the template of `hpctrain slurm`: `make docs`. scaling.sbatch is written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpctrain.run import SlurmSection
from hpctrain.slurm import JobScript, render_script

FOLDER = Path(__file__).resolve().parent.parent / "slurm"
# What is swept by sweep.sbatch, to be adapted.
SWEEP = {"optimizer.lr": [0.001, 0.004], "optimizer.weight_decay": [0.0, 0.01]}
RUN_DIRECTORY = 'runs/"$(basename "$recipe" .toml)"'

# File name -> what it is for, further lines, settings.
SCRIPTS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "train.sbatch": ("Trains a recipe on CPUs", [], {}),
    "gpu.sbatch": (
        "Trains a recipe on GPUs, one for each rank",
        [],
        {"tasks_per_node": 4, "cpus_per_task": 8, "gpus_per_task": 1},
    ),
    "supervise.sbatch": (
        "Trains a recipe on after a rank or node is lost, on the nodes that are left",
        ["HPCTRAIN_SPARES of the nodes are kept free, to take the place of a lost one."],
        {"launcher": "supervise"},
    ),
    "preemptible.sbatch": (
        "Trains a recipe where jobs of others may preempt this one",
        [
            "Slurm then sends SIGTERM to the ranks, which save and stop. GraceTime of the partition or QOS must leave",
            "time for one step and one save: `scontrol show partition`.",
        ],
        {"partition": "preemptible", "time_min": "00:10:00"},
    ),
    "seeds.sbatch": (
        "Trains a recipe with several seeds, two at a time",
        ["Each task of the array is a run of its own: runs/NAME OF THE RECIPE/task-SEED."],
        {"array": "0-3%2"},
    ),
    "sweep.sbatch": (
        "Trains a recipe with several hyper-parameters",
        [
            "Each task of the array is a run of its own: runs/NAME OF THE RECIPE/task-INDEX. Adapt the list below, and",
            "--array to its length; or let `hpctrain slurm submit` write both from the recipe's slurm.sweep.",
        ],
        {"sweep": SWEEP},
    ),
    "chain.sbatch": (
        "Trains a recipe where jobs may not be requeued",
        [
            "Options that sbatch is given are not passed on to the successor: change the lines below.",
        ],
        {"on_stop": "successor"},
    ),
    "mpirun.sbatch": (
        "Trains a recipe with mpirun, for an MPI that srun cannot start",
        ["mpirun needs no ssh: it starts its daemons on the job's nodes with srun."],
        {"launcher": "mpirun"},
    ),
    "apptainer.sbatch": (
        "Trains a recipe in a container of Apptainer",
        ["The image has hpctrain and an MPI that understands the site's PMIx. This script runs outside of it."],
        {"container": "hpctrain.sif"},
    ),
    "pyxis.sbatch": (
        "Trains a recipe in a container of enroot, started by srun's plugin pyxis",
        ["The image has hpctrain and an MPI that understands the site's PMIx. This script runs outside of it."],
        {"container": "hpctrain.sqsh", "container_runtime": "pyxis"},
    ),
}  # fmt: skip


def script(name: str) -> str:
    """Returns the text of slurm/NAME."""
    purpose, more, settings = SCRIPTS[name]
    continues = "queues itself again" if settings.get("on_stop") != "successor" else "submits a successor"
    about = [
        f"{purpose}.",
        f"It stops before the time limit with its state saved, {continues}, and resumes.",
        "",
        f"  sbatch slurm/{name} RECIPE [OPTION OF hpctrain train ...]",
        f"  sbatch slurm/{name} examples/digits.toml --set run.epochs=3",
        *(["", *more] if more else []),
        "",
        "What is given to sbatch wins over the lines below. Adapt these to your cluster:",
    ]
    defaults = {} if "tasks_per_node" in settings else {"tasks_per_node": 2}
    job = JobScript(
        name=name.removesuffix(".sbatch") if name not in ("train.sbatch", "supervise.sbatch") else "hpctrain",
        about=about,
        settings=SlurmSection(nodes=2, **defaults, **settings),
        recipe=None,
        run_directory=RUN_DIRECTORY,
        ready=name,
    )
    return render_script(job)


def main() -> int:
    stale = []
    for name in SCRIPTS:
        path, text = FOLDER / name, script(name)
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
