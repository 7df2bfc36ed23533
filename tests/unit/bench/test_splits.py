"""The splits of a node's cores into ranks and threads: which are measured, what a user gets, and the verdict."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hpctrain.bench import cores_to_split, extrap_lines, ranks_of_splits
from hpctrain.bench.scaling import measure
from hpctrain.bench.scaling.measure import SweepPlace, measure_sweep
from hpctrain.bench.scaling.splits import busy_notes, without_threads
from hpctrain.bench.scaling.sweep import (
    FailedSplit,
    PlannedRun,
    ScalingDocument,
    ScalingRun,
    SplitVerdict,
    check_same_sweep,
    check_settings,
    read_scaling_document,
    scaling_lines,
    scaling_table,
)
from hpctrain.bench.step.plan import StepCell
from hpctrain.cli.bench.group import bench_app
from hpctrain.errors import ExitCode, OutOfMemory, UsageError
from hpctrain.launch import Launcher, LocalMachine, plan_launch
from tests.unit.bench.sweeps import document_of, recipe, run_of, settings, written
from tests.unit.bench.test_scaling import RECIPE
from tests.unit.launch.test_command import CLUSTER, HYDRA, JOB, MACHINE

TWO = (1, 2)
FOUR = (1, 2, 4)


def split(cores: int, ranks: tuple[int, ...], **changes: Any) -> Any:
    return settings(ranks, cores=cores, ranks_per_node=cores, **changes)


def verdict_of(document: ScalingDocument) -> SplitVerdict:
    assert document.splits is not None
    return document.splits


def noisy(rates: dict[int, float], *, noise: float) -> Any:
    """Rates of which every second round is higher by `noise` for an even number of ranks."""
    return lambda run: rates[run.cell.num_ranks] * (1 + noise * ((run.round + run.cell.num_ranks // 2) % 2))


# ---- which splits there are


@pytest.mark.parametrize(
    ("cores", "ranks"),
    [
        (2, [1, 2]),
        (7, [1, 7]),
        (12, [1, 2, 3, 4, 6, 12]),
        (48, [1, 3, 6, 12, 24, 48]),  # 1 x 48, 3 x 16, 6 x 8, ...
        (64, [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_cores_are_split_into_all_divisors_or_powers_of_two(cores: int, ranks: list[int]) -> None:
    assert ranks_of_splits(cores, asked=None) == ranks


def test_some_splits_can_be_chosen() -> None:
    assert ranks_of_splits(64, asked=[4, 16]) == [4, 16]


@pytest.mark.parametrize(
    ("cores", "asked", "words"),
    [
        (1, None, "only one core"),
        (8, [2, 3], "3 ranks cannot divide 8 cores evenly: choose two or more of 1,2,4,8"),
        (8, [16, 32], "16 ranks cannot divide 8 cores"),
        (8, [4], "one split has no other"),
    ],
)
def test_what_cannot_be_split_is_refused(cores: int, asked: list[int] | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ranks_of_splits(cores, asked=asked)


@pytest.mark.parametrize(
    ("machine", "environ"),
    [
        (MACHINE, {}),
        (MACHINE, {"OMP_NUM_THREADS": "3"}),
        (dataclasses.replace(MACHINE, mpirun=HYDRA), {}),
        (dataclasses.replace(CLUSTER, num_cores=2), JOB),
        (dataclasses.replace(CLUSTER, num_cores=2), {**JOB, "SLURM_CPUS_PER_TASK": "4"}),
    ],
)
def test_each_split_is_what_launch_gives_a_user(machine: LocalMachine, environ: dict[str, str]) -> None:
    """Eight cores of this machine, or of each of the two nodes of a job whose login node has two."""
    cores = cores_to_split(machine=machine, launcher=Launcher.AUTO, environ=environ)
    assert cores == 8
    for ranks in (1, 2, 4, 8):
        planned = plan_launch(
            ["hpctrain", "train"], num_ranks=ranks, ranks_per_node=ranks, environ=without_threads(environ),
            machine=machine,
        )  # fmt: skip
        assert planned.env_updates["OMP_NUM_THREADS"] == str(split(8, (1, 2, 4, 8)).threads_of(ranks))
        assert not planned.emulated
        if "SLURM_JOB_ID" in environ:
            assert {"--nodes=1", f"--ntasks={ranks}", f"--cpus-per-task={8 // ranks}"} <= set(planned.argv)


def test_more_ranks_than_samples_are_refused_with_the_option_that_helps() -> None:
    with pytest.raises(UsageError, match="use --ranks with some of the splits, or a larger batch"):
        check_settings(split(128, (1, 128)), batch=64)


def test_options_that_contradict_splits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    words = ["scaling", str(path), "--split-cores", "--json", str(tmp_path / "out.json")]
    for option in (["--weak"], ["--jobs"], ["--threads", "2"], ["--ranks-per-node", "1"]):
        refused = CliRunner().invoke(bench_app, [*words, *option])
        assert isinstance(refused.exception, UsageError)
        assert f"leave out {option[0]}" in str(refused.exception)
    refused = CliRunner().invoke(bench_app, [*words, "--set", "run.threads_per_rank=2"])
    assert "run.threads_per_rank = 2 would give every rank as many threads" in str(refused.exception)


# ---- the verdict


def test_a_clear_winner_is_named_with_its_interval() -> None:
    verdict = verdict_of(document_of(split(2, TWO), noisy({1: 1000, 2: 1210}, noise=0.01)))
    assert (verdict.fastest, verdict.undecided, verdict.use) == (2, [], 2)
    assert verdict.text == (
        "On this node, 2 ranks x 1 thread train this model fastest: 1.21 times as many samples/s as "
        "1 rank x 2 threads (95% interval 1.20 to 1.23)."
    )
    assert verdict.start == (
        "For 2 ranks x 1 thread on a node: `hpctrain launch -n 2 -- hpctrain train recipe.toml` with OMP_NUM_THREADS "
        "unset; in a batch script, before it, `#SBATCH --nodes=1 --ntasks-per-node=2 --cpus-per-task=1`; for "
        "`hpctrain slurm submit`, tasks_per_node = 2 and cpus_per_task = 1 in the recipe's section [slurm]."
    )


def test_the_next_and_the_slowest_of_several_splits_are_named() -> None:
    verdict = verdict_of(document_of(split(4, FOUR), noisy({1: 1000, 2: 800, 4: 500}, noise=0.001)))
    assert verdict.text == (
        "On this node, 1 rank x 4 threads trains this model fastest: 1.25 times as many samples/s as "
        "2 ranks x 2 threads (95% simultaneous interval 1.25 to 1.25), and 2.00 times as many as 4 ranks x 1 thread."
    )
    assert {ratio["level"] for ratio in verdict.ratios.values()} == {0.975}


def test_a_difference_within_the_spread_is_no_verdict_and_fewer_ranks_are_advised() -> None:
    verdict = verdict_of(document_of(split(2, TWO), noisy({1: 1000, 2: 1010}, noise=0.1)))
    assert (verdict.fastest, verdict.undecided, verdict.use) == (2, [1], 1)
    assert verdict.text == (
        "On this node, 5 rounds cannot tell whether 1 rank x 2 threads or 2 ranks x 1 thread trains this model faster: "
        "2 ranks x 1 thread had 1.03 times as many samples/s as 1 rank x 2 threads (95% interval 0.90 to 1.17), which "
        "is within the spread of the repetitions. Of these, 1 rank x 2 threads needs the least memory."
    )
    assert "-n 1" in verdict.start


def test_only_splits_as_fast_as_the_fastest_are_undecided() -> None:
    verdict = verdict_of(document_of(split(4, FOUR), noisy({1: 500, 2: 1000, 4: 1050}, noise=0.1)))
    assert (verdict.fastest, verdict.undecided, verdict.use) == (4, [2], 2)
    assert "whether 2 ranks x 2 threads or 4 ranks x 1 thread trains this model faster" in verdict.text


def test_one_round_shows_no_spread() -> None:
    document = document_of(split(2, TWO), noisy({1: 1000, 2: 2000}, noise=0.0), num_runs=2)
    verdict = verdict_of(document)
    assert verdict.text.endswith("and a single round does not show the spread of the repetitions.")
    assert verdict.use == 2


def test_there_is_no_verdict_before_every_split_was_measured() -> None:
    document = document_of(split(4, FOUR), noisy(dict.fromkeys(FOUR, 1000.0), noise=0.0), num_runs=2)
    assert document.splits is None
    assert scaling_lines(document)[-1].startswith("not complete")


def test_a_split_that_failed_is_named_and_not_compared() -> None:
    rates = noisy({2: 1200, 4: 1000}, noise=0.01)
    document = document_of(split(4, FOUR), rates, failed=FailedSplit(ranks=1, exit_code=8))
    verdict = verdict_of(document)
    assert (verdict.fastest, list(verdict.ratios)) == (2, [4])
    assert verdict.text.endswith("1 rank x 4 threads failed with exit code 8 and was not compared.")
    both = document_of(split(2, TWO), noisy({2: 1000}, noise=0), failed=FailedSplit(ranks=1, exit_code=8))
    assert verdict_of(both).text == (
        "On this node, 2 ranks x 1 thread is the only split that could be measured. "
        "1 rank x 2 threads failed with exit code 8 and was not compared."
    )


# ---- the document and its table


def test_the_table_has_a_row_for_each_split() -> None:
    rates = noisy({2: 1200, 4: 1000}, noise=0.01)
    document = document_of(split(4, FOUR), rates, failed=FailedSplit(ranks=1, exit_code=8))
    out = io.StringIO()
    Console(file=out, width=200).print(scaling_table(document))
    text = out.getvalue()
    assert (
        "mine: 4 cores split, 5 interleaved rounds of 4 steps after 2; relative to 2 ranks x 2 threads"
        in text
    )
    rows = [
        [cell.strip() for cell in line.split("│")[1:4]] for line in text.splitlines() if line.startswith("│")
    ]
    assert rows == [["2", "2", "64"], ["4", "1", "64"], ["1", "4", ""]]
    assert "failed" in text
    assert "efficiency" not in text
    assert scaling_lines(document)[:2] == [verdict_of(document).text, verdict_of(document).start]


def test_a_document_with_splits_is_read_back_and_resumed_only_on_as_many_cores(tmp_path: Path) -> None:
    document = document_of(split(2, TWO), noisy({1: 1000, 2: 1210}, noise=0.01))
    path = written(tmp_path / "splits.json", document)
    assert read_scaling_document(path).as_json() == document.as_json()
    same: dict[str, Any] = {
        "recipe": recipe().model_dump(mode="json"), "commit": "abc", "machine": document.machine,
    }  # fmt: skip
    check_same_sweep(document, settings=split(2, TWO), **same)
    with pytest.raises(UsageError, match=r"settings\.cores"):
        check_same_sweep(document, settings=settings(TWO), **same)
    with pytest.raises(UsageError, match="Extra-P cannot model"):
        extrap_lines(document)


def test_without_splits_the_document_has_no_field_of_theirs() -> None:
    found = document_of(settings(), lambda run: 1000.0).as_json()
    assert "splits" not in found
    assert "cores" not in found["settings"]


# ---- a run that fails


def sweep(place: Path, monkeypatch: pytest.MonkeyPatch, *, failing: tuple[int, ...]) -> ScalingDocument:
    """Measures splits of two cores with runs that are made up; those on `failing` ranks run out of memory."""
    made: list[int] = []

    def run_size(_: Any, planned: PlannedRun, **how: Any) -> ScalingRun:
        made.append(planned.cell.num_ranks)
        assert how["threads"] == 2 // planned.cell.num_ranks
        if planned.cell.num_ranks in failing:
            raise OutOfMemory("the run ended with exit code 8")
        return run_of(planned, rate=1000.0)

    monkeypatch.setattr(measure, "run_size", run_size)
    monkeypatch.setattr(measure, "BUSY_OVER_S", 0.01)
    document = place / "splits.json"
    found = measure_sweep(
        recipe(), split(2, TWO), place=SweepPlace(recipe_path=place / "recipe.toml", document=document)
    )
    assert all(made.count(ranks) == (1 if ranks in failing else 5) for ranks in TWO)
    return found


def test_the_other_splits_are_measured_when_one_fails_and_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sweep(tmp_path, monkeypatch, failing=(2,))
    assert not found.complete
    assert [run.ranks for run in found.runs] == [1] * 5
    assert verdict_of(found).failed == [FailedSplit(ranks=2, exit_code=ExitCode.OUT_OF_MEMORY)]
    assert "2 ranks x 1 thread is not measured further: the run ended" in capsys.readouterr().err


def test_if_every_split_fails_the_sweep_ends_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutOfMemory):
        sweep(tmp_path, monkeypatch, failing=TWO)


def test_a_note_says_that_other_programs_used_the_cores() -> None:
    assert busy_notes([]) == []
    assert busy_notes([0.02, 0.1, 0.03]) == []
    (note,) = busy_notes([0.9, 0.7])
    assert note.startswith("other programs used 80% of this machine's CPU time between the runs")


def test_ranks_on_gpus_are_not_split() -> None:
    planned = PlannedRun(round=0, place=0, cell=StepCell(num_ranks=1, global_batch=64))
    on_gpu = run_of(planned, rate=1.0).model_copy(update={"environment": {"ranks": [{"device": "cuda:0"}]}})
    with pytest.raises(UsageError, match="the ranks computed on cuda:0"):
        measure._check_cpus(on_gpu)
