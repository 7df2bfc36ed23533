"""Scripts of all kinds, for the tests that look at each: of the templates, shellcheck and Slurm itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.run import SlurmSection
from hpctrain.slurm import JobScript

# One section for each part of the template.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpus": {"gpus_per_task": 1},
    "successor": {"on_stop": "successor"},
    "end": {"on_stop": "end"},
    "seeds": {"array": "0-3%2"},
    "sweep": {"sweep": {"optimizer.lr": [0.1, 0.01], "task.options": [{"a b": "c'd\"$x"}], "run.name": ["wide", "é"]}},
    "chained sweep": {"on_stop": "successor", "sweep": {"run.seed": [1, 2]}},
    "mpirun": {"launcher": "mpirun"},
    "supervise": {"launcher": "supervise", "nodes": 3, "spares": 1},
    "elastic": {"launcher": "supervise", "elastic": "2:4"},
    "shrinkable": {"shrinkable": True},
    "apptainer": {"container": "my image.sif", "container_mounts": ["/tmp", "/var:/data"], "gpus_per_task": 1},
    "pyxis": {"container": "nvcr.io#a/b:1", "container_runtime": "pyxis", "container_mounts": ["/tmp"]},
    "mpich": {"mpi": "pmi2"},
    "archive": {"python_archive": "/shared/my environment.tar"},
    "everything": {
        "time": "00:30:00", "time_min": "00:10:00", "mail_user": "me@example.org", "mail_type": ["END", "FAIL"],
        "options": ["--comment=it's \"a\" b\\c #1", "--mem=100"], "modules": ["gcc/12", "openmpi"],
        "setup": ["ulimit -c 0"], "environment": {"A": "b c", "B": "$HOME"}, "output": "out put-%j.txt",
    },
}  # fmt: skip


def job(kind: str, *, python: Path = Path("/opt/my env")) -> JobScript:
    """A job of 2 nodes x 2 ranks of this kind."""
    settings = SlurmSection(**{"nodes": 2, "tasks_per_node": 2, **KINDS[kind]})
    uses_python = settings.container is None and settings.python_archive is None
    return JobScript(
        name="a run",
        about=[f"Of kind {kind}."],
        settings=settings,
        recipe=Path("my recipe.toml"),
        run_directory="runs/it's here",
        overrides=["run.epochs=3", "run.name=a b"],
        python=python if uses_python else None,
        record=Path("runs/it's here/slurm/jobs.jsonl"),
    )
