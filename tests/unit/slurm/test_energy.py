"""Energy of jobs, as sacct prints it."""

from __future__ import annotations

from pathlib import Path

from hpctrain.slurm import consumed_energy, parse_energy
from tests.unit.slurm.busy_slurm import FakeSlurm

# 12: the job's own number. 13: only its steps have one. 14: gathered by no plugin; Slurm's numbers for "unknown".
TEXT = """12|531200
12.batch|265000
12.extern|531100
12.0|530000
13|0
13.batch|90000
13.extern|180000
13.0|100000
13.1|70000
14|0
14.batch|
14.extern|18446744073709551614
14.0|18446744073709551615
"""


def test_a_jobs_own_number_counts_otherwise_the_sum_of_its_steps() -> None:
    assert parse_energy(TEXT) == {"12": 531_200.0, "13": 170_000.0}


def test_the_attempts_of_a_requeued_job_are_added_up() -> None:
    assert parse_energy("12|500\n12.0|500\n12|700\n12.0|700\n") == {"12": 1200.0}


def test_other_tasks_of_an_array_are_not_counted(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.answers("sacct", r"0 out 12|500\n13|700")
    assert consumed_energy(slurm.controller, ["12", "12"]) == {"12": 500.0}
    assert "--jobs=12 --format=JobIDRaw,ConsumedEnergyRaw" in slurm.calls("sacct")[0]
    assert consumed_energy(slurm.controller, []) == {}


def test_without_an_accounting_database_nothing_is_known(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.answers("sacct", "1 err Slurm accounting storage is disabled")
    assert consumed_energy(slurm.controller, ["12"]) == {}
