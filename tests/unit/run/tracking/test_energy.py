"""The energy of a run's nodes, from counters to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.report import make_report, read_run
from hpctrain.telemetry import open_counters
from tests.run_files import newest, records_of, summary_of
from tests.unit.run.training_cases import Task, run
from tests.unit.slurm.busy_slurm import FakeSlurm
from tests.unit.telemetry.counter_trees import set_cray, set_rapl, xeon

STEPS = 12


class Burning(Task):
    """Each step of rank 0 takes so much energy."""

    def __init__(self, root: Path, *, before: int = 0) -> None:
        super().__init__()
        self.root = root
        self.before = before  # steps of earlier starts

    def loss(self, model: Any, fields: Any) -> Any:
        found = super().loss(model, fields)
        steps = self.before + self.steps
        set_cray(self.root, 1000 + 250 * steps)
        set_rapl(self.root, "intel-rapl:1", 7_000_000 + 90_000_000 * steps)
        return found


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "root"
    xeon(root)
    set_cray(root, 1000)
    monkeypatch.setattr("hpctrain.run.build.open_counters", lambda: open_counters(root))
    return root


def test_records_summary_nodes_and_report_have_the_energy_of_all_starts(where: Path, root: Path) -> None:
    run(where, Burning(root), telemetry={"energy_every_s": 0.01})
    summary = summary_of(where / "run")
    expected = {"Cray pm_counters": 2500.0, "RAPL": pytest.approx(900.0)}
    assert summary["energy"] == {"total_j": 2500.0, "joules": expected, "nodes": 1}
    (node,) = json.loads((where / "run/nodes.json").read_text())
    assert node["energy"] == summary["energy"]
    # Another start goes on from the last step.
    run(where, Burning(root, before=10), run={"steps": STEPS}, telemetry={"energy_every_s": 0.01})
    records = records_of(where / "run", "energy")
    assert {record["step"] for record in records} <= set(range(STEPS + 1))
    found = read_run(where / "run").energy
    assert found is not None
    assert found.total_j == sum(record["total_j"] for record in records) == 250.0 * STEPS
    table = next(table for table in make_report([where / "run"]).tables if table.name == "resources")
    (row,) = [row for row in table.rows if row.name == "energy"]
    assert (row.values, row.unit) == ([pytest.approx(found.total_j / 3.6e6)], "kWh")
    assert "Cray pm_counters, RAPL" in table.note


@pytest.mark.parametrize("ranks", ["all", "rank0"])
def test_the_first_rank_of_a_host_reads_for_all(where: Path, root: Path, ranks: str) -> None:
    def rank_main(world: World) -> object:
        telemetry = {"energy_every_s": 60.0, "ranks": ranks}
        return run(where, Task(), world=world, nodes=["n0", "n1"], telemetry=telemetry)

    summary, other = run_threads(2, rank_main, timeout_s=300)
    assert summary["energy"] == other["energy"] == {
        "total_j": 0.0, "joules": {"Cray pm_counters": 0.0, "RAPL": 0.0}, "nodes": 1,
    }  # fmt: skip
    first, second = json.loads((where / "run/nodes.json").read_text())
    assert (first["energy"], second["energy"]) == (summary["energy"], None)
    assert newest(where / "run", "energy")
    other_file = where / "run/metrics/rank-00001.jsonl"
    assert not other_file.exists() or not newest(where / "run", "energy", rank=1)


@pytest.mark.parametrize("readable", [True, False])
def test_without_readings_nothing_is_said(
    where: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    readable: bool,
) -> None:
    if not readable:
        monkeypatch.setattr("hpctrain.run.build.open_counters", lambda: open_counters(root / "nowhere"))
    summary = run(where, Task(), telemetry={"energy_every_s": 0.0 if readable else 10.0})
    assert summary["energy"] is None
    assert not newest(where / "run", "energy")
    assert "energy" not in "".join(capfd.readouterr())
    table = next(table for table in make_report([where / "run"]).tables if table.name == "resources")
    assert "energy" not in [row.name for row in table.rows]
    assert "No energy counter could be read" in table.note


def test_the_report_asks_slurm_for_the_energy_of_all_the_runs_jobs(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job, steps in (("12", 10), ("13", STEPS)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        run(where, Task(), run={"steps": steps})
    slurm = FakeSlurm(where)
    for answer, kwh in ((r"12|3600000\n12.0|3500000\n13|1800000", 1.5), (r"12|0\n13|0", None)):
        slurm.answers("sacct", f"0 out {answer}")
        report = make_report([where / "run"], slurm=slurm.controller)
        table = next(table for table in report.tables if table.name == "resources")
        (row,) = [row for row in table.rows if row.name == "energy of the jobs, by Slurm's accounting"]
        assert (row.values, row.unit) == ([kwh], "kWh")
    assert "--jobs=12,13" in slurm.calls("sacct")[0]
