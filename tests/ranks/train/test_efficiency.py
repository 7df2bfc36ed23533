"""One run on four ranks of two nodes, made slower by known times one after another: each appears under its own name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.scaling import (
    StepTimes,
    against,
    attribute,
    efficiency_of,
    read_efficiency,
    read_step_times,
)
from hpctrain.telemetry import PART_NAMES, read_records
from tests.efficiency_tasks import (
    ALTERNATING,
    ALTERNATING_S,
    BASE,
    COMPUTE_S,
    EVALUATION_S,
    INPUT,
    INPUT_S,
    RANK,
    RANK_S,
    SLOW_RANK,
    STEPS,
)
from tests.ranks_launcher import is_open_mpi, run_command, skip_without_horovod
from tests.run_files import records_of

pytestmark = pytest.mark.launches

RANKS = 4
EVALUATED = 30
TRACED = "20-22,30"
CLOCK_APART_S = 5000
# What a part may differ by, in units of the added time, whether or not it was added to it: four ranks share two cores
# here, and what else runs on them adds milliseconds to any part of a step.
WITHIN = 0.3
HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))

RECIPE = f"""
[run]
name = "efficiency"
directory = "DIRECTORY"
steps = {STEPS}
[task]
target = "tests.efficiency_tasks:Phases"
[data]
train = "data"
held_out = "held-out"
global_batch = 8
io = "collective"
transform = "tests.efficiency_tasks:reads_slowly"
[optimizer]
name = "sgd"
lr = 1e-9
[telemetry]
evaluate_every_steps = {EVALUATED}
trace_steps = "{TRACED}"
[stragglers]
window_s = 1.0
"""


HOROVOD = """
[run]
name = "horovod"
directory = "horovod"
backend = "horovod"
steps = 20
[task]
target = "tests.straggler_tasks:Steps"
options = { sleep_s = 0.02 }
[data]
train = "data"
global_batch = 2
[reduction]
algorithm = "flat"
[telemetry]
trace_steps = "10-14"
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended. apart: the clocks of its second node were CLOCK_APART_S ahead."""

    directory: Path
    apart: bool


def can_move_clocks() -> bool:
    tried = ["unshare", "--time", "--fork", "--monotonic", str(CLOCK_APART_S), "true"]
    try:
        return subprocess.run(tried, capture_output=True, timeout=300, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("efficiency")
    pack_arrays(folder / "data", {"x": np.ones((8 * STEPS, 4), np.float32)})
    pack_arrays(folder / "held-out", {"x": np.ones((8, 4), np.float32)})
    for name in ("run", "alone"):
        (folder / f"{name}.toml").write_text(RECIPE.replace("DIRECTORY", name))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Two emulated nodes; the second one's monotonic clock is far ahead where this machine allows it."""
    apart = can_move_clocks() and is_open_mpi()
    train = f"{HPCTRAIN} train run.toml"
    ahead = f"exec unshare --time --fork --monotonic {CLOCK_APART_S} {train}"
    script = f"if ((OMPI_COMM_WORLD_RANK >= 2)); then {ahead}; fi; exec {train}" if apart else f"exec {train}"
    words = [HPCTRAIN, "launch", "-n", str(RANKS), "--ranks-per-node", "2", "--", "bash", "-c", script]
    run_command(None, words, cwd=folder, timeout_s=300, expect=0)
    return Run(directory=folder / "run", apart=apart)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    run_command(None, [HPCTRAIN, "train", "alone.toml"], cwd=folder, timeout_s=300, expect=0)
    return Run(directory=folder / "alone", apart=False)


def of(run: Run, steps: range) -> StepTimes:
    return read_step_times(run.directory, first=steps.start, last=steps.stop - 1)


def median_parts(run: Run, steps: range) -> dict[str, np.ndarray]:
    """Returns for each part the median over the steps, shape (ranks,). Steps with an evaluation are left out."""
    times = of(run, steps)
    found = np.median(attribute(times)[:, times.steps % EVALUATED != 0], axis=1)
    return {name: found[:, number] for number, name in enumerate(PART_NAMES)}


def test_the_parts_add_up_to_the_step_and_the_steps_to_the_time_that_passed(run: Run) -> None:
    for rank in range(RANKS):
        steps = records_of(run.directory, "step", rank=rank)
        passed_s = steps[-1]["time"] - steps[0]["time"]
        assert sum(record["seconds"]["step"] for record in steps[1:]) == pytest.approx(passed_s, rel=0.01)
    times = of(run, range(2, STEPS + 1))
    found = attribute(times)
    np.testing.assert_allclose(found.sum(axis=-1), times.seconds["step"], rtol=0.01)
    assert (found >= 0).all()
    # What has no name of its own: votes, records, the trace. Of the median step, as a loaded machine may stop a rank.
    assert (np.median(found[..., PART_NAMES.index("other")], axis=1) < 0.05 * COMPUTE_S).all()


def test_known_delays_appear_under_their_names(run: Run) -> None:
    base = median_parts(run, BASE)
    assert base["compute"] + base["hidden_reduction"] == pytest.approx([COMPUTE_S] * RANKS, rel=WITHIN)
    added: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for phase, steps in (("input", INPUT), ("rank", RANK)):
        found = median_parts(run, steps)
        for name, seconds in found.items():
            added[phase][name] = seconds - base[name]
            print(phase, name, (1e3 * added[phase][name]).round(2))
    assert added["input"]["input"] == pytest.approx([INPUT_S] * RANKS, rel=WITHIN)
    others = [rank for rank in range(RANKS) if rank != SLOW_RANK]
    assert added["rank"]["compute"][SLOW_RANK] == pytest.approx(RANK_S, rel=WITHIN)
    assert added["rank"]["waiting"][others] == pytest.approx([RANK_S] * len(others), rel=WITHIN)
    for phase, names in (("input", ["input"]), ("rank", ["compute", "waiting"])):
        for name in PART_NAMES:
            if name not in names:
                assert (np.abs(added[phase][name]) < WITHIN * INPUT_S).all(), (phase, name)


def test_an_evaluation_is_a_part_of_its_step(run: Run) -> None:
    times = of(run, range(2, STEPS))
    evaluated = times.steps % EVALUATED == 0
    found = attribute(times)[..., PART_NAMES.index("evaluation")]
    assert np.median(found[:, evaluated], axis=1) == pytest.approx([EVALUATION_S] * RANKS, rel=WITHIN)
    assert not found[:, ~evaluated].any()


def test_the_alternating_rank_is_serialisation_and_the_steady_one_load_balance(run: Run) -> None:
    unequal = (COMPUTE_S + RANK_S / RANKS) / (COMPUTE_S + RANK_S)
    steady, alternating, even = (efficiency_of(of(run, steps)).factors for steps in (RANK, ALTERNATING, BASE))
    for name, factors in (("base", even), ("steady", steady), ("alternating", alternating)):
        print(name, factors)
    # Other work on the machine makes single steps longer, also those to which nothing was added.
    assert 0.9 * unequal < steady.load_balance / even.load_balance < 1.2 * unequal
    assert steady.serialisation > 0.9
    assert alternating.load_balance > 0.9
    assert 0.9 * unequal < alternating.serialisation / even.serialisation < 1.2 * unequal
    times = of(run, ALTERNATING)
    waiting_s = attribute(times)[..., PART_NAMES.index("waiting")].mean()
    base_s = attribute(of(run, BASE))[..., PART_NAMES.index("waiting")].mean()
    assert waiting_s - base_s == pytest.approx(ALTERNATING_S * (RANKS - 1) / RANKS, rel=WITHIN)


def test_the_factors_multiply_to_the_global_efficiency_by_the_wall_clock(run: Run, alone: Run) -> None:
    def rate(run: Run) -> float:
        """Samples/s from the second step on, by the time of day."""
        steps = records_of(run.directory, "step")
        return (steps[-1]["global_samples"] - steps[0]["global_samples"]) / (
            steps[-1]["time"] - steps[0]["time"]
        )

    found, reference = read_efficiency(run.directory), read_efficiency(alone.directory)
    factors = found.factors
    product = factors.load_balance * factors.serialisation * factors.transfer * factors.computing
    scaling = against(found, reference=reference)
    needed_s = reference.computed_s * reference.steps / reference.samples  # to compute a sample
    by_clock = rate(run) / RANKS * needed_s
    print(f"global efficiency {scaling.global_efficiency:.4f}, by the wall clock {by_clock:.4f}")
    assert product * scaling.computation == pytest.approx(by_clock, rel=0.01)
    assert scaling.global_efficiency == pytest.approx(product * scaling.computation)
    assert scaling.relative_speed == pytest.approx(rate(run) / RANKS / rate(alone), rel=0.01)


def test_the_records_of_the_windows_hold_what_the_records_of_all_ranks_say(run: Run) -> None:
    windows = records_of(run.directory, "efficiency")
    assert len(windows) >= 5
    assert sum(window["steps"] for window in windows) == STEPS - 1
    for window in windows:
        last = window["step"]
        expected = efficiency_of(read_step_times(run.directory, first=last - window["steps"] + 1, last=last))
        assert window["step_s"] == pytest.approx(expected.step_s, rel=1e-6)
        assert window["own_s"] == pytest.approx(expected.own_s, rel=1e-6)
        assert window["factors"]["parallel"] == pytest.approx(expected.factors.parallel, rel=1e-6)
    whole = efficiency_of(of(run, range(2, STEPS + 1)))
    assert read_efficiency(run.directory).factors.parallel == pytest.approx(whole.factors.parallel, rel=1e-6)


def test_a_trace_has_all_ranks_on_one_clock(run: Run, folder: Path) -> None:
    done = run_command(None, [HPCTRAIN, "trace", "run", "-o", "trace.json"], cwd=folder, expect=0)
    assert f"{RANKS} ranks, 4 steps from 20 to 30" in done.stdout
    found = json.loads((folder / "trace.json").read_text())
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {(e["pid"], e["args"]["step"]) for e in spans} == {
        (r, s) for r in range(RANKS) for s in (20, 21, 22, 30)
    }
    ends: dict[int, list[float]] = defaultdict(list)
    for event in spans:
        if event["name"] == "wait for reduction":
            ends[event["args"]["step"]].append(event["ts"] + event["dur"])
    print(
        {step: round(max(times) - min(times)) for step, times in ends.items()},
        "us apart;",
        found["otherData"],
    )
    # A reduction ends on all ranks together: within what a loaded machine delays a thread.
    assert all(len(times) == RANKS and max(times) - min(times) < 20_000 for times in ends.values())
    assert found["otherData"]["clock_error_us"] < 20_000
    names = {event["name"] for event in spans if event["args"]["step"] == 21}
    assert {"input", "forward and backward", "wait for reduction", "optimizer", "bucket 0"} <= names
    clocks = [
        r
        for r in read_records(run.directory / "trace/step-00000020/rank-00003.jsonl")
        if r["kind"] == "clock"
    ]
    assert len(clocks) == 2
    for clock in clocks:
        apart_s = CLOCK_APART_S if run.apart else 0
        assert (
            abs(clock["offset_s"] + apart_s) < clock["error_s"] + 0.1
        )  # what mpirun starts has its clocks at once


def test_horovods_timeline_lies_within_our_spans_of_the_same_reductions(folder: Path) -> None:
    skip_without_horovod()
    (folder / "horovod.toml").write_text(HOROVOD)
    words = [HPCTRAIN, "launch", "-n", "2", "--", HPCTRAIN, "train", "horovod.toml"]
    timeline = folder / "timeline.json"
    run_command(None, words, cwd=folder, timeout_s=300, expect=0, env={"HOROVOD_TIMELINE": str(timeline)})
    words = [HPCTRAIN, "trace", "horovod", "-o", "both.json", "--horovod", str(timeline)]
    run_command(None, words, cwd=folder, expect=0)
    events = json.loads((folder / "both.json").read_text())["traceEvents"]
    ours = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["cat"] == "reduction"]
    begun = [e["ts"] for e in events if e["pid"] > 2 and e["ph"] == "B" and e["name"] == "ALLREDUCE"]
    within = [any(e["ts"] - 1000 <= at <= e["ts"] + e["dur"] + 1000 for e in ours) for at in begun]
    print(f"{sum(within)} of {len(begun)} reductions of Horovod are within {len(ours)} of our spans")
    assert len(ours) == 5
    # Other steps are within the margin of the trace, as the steps are short; of the traced ones none is missing.
    assert sum(within) >= len(ours)


def test_the_command_shows_what_was_measured(run: Run, alone: Run, folder: Path) -> None:
    words = [HPCTRAIN, "efficiency", "run", "--reference", "alone"]
    done = run_command(None, words, cwd=folder, expect=0)
    for name in (
        "waiting",
        "exposed reduction",
        "parallel efficiency",
        "serialisation",
        "computation scaling",
    ):
        assert name in done.stdout
    steps = f"{RANK.start}-{RANK.stop - 1}"
    done = run_command(
        None, [HPCTRAIN, "efficiency", "run", "--steps", steps, "--json"], cwd=folder, expect=0
    )
    document = json.loads(done.stdout)
    assert document["first_step"] == RANK.start
    assert min(document["by_rank"], key=lambda rank: rank["waiting"]) == document["by_rank"][SLOW_RANK]
    print(run_command(None, [HPCTRAIN, "efficiency", "run", "--steps", steps], cwd=folder, expect=0).stdout)
