"""Numbers are right: N ranks equal one, resumed equals never stopped, every sample exactly once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from hpctrain.checkpoint import open_checkpoint
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.data import pack_arrays
from hpctrain.telemetry import read_records
from hpctrain.topology import Topology
from tests.ranks.train import training_cases
from tests.ranks_launcher import RanksResult, run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.cold]

BACKENDS = ["mpi", "horovod"]
RANK_COUNTS = [1, 2, 3, 4]
# Four ranks of Horovod sum as three do.
THOROUGH = ("horovod", 4)
INTERRUPTED_ON_MANY = [launch for launch in training_cases.STOPS if launch[1] > 1]
NUM_SAMPLES = 1438
# Each launch finishes what the one before it began, on another number of ranks.
RESUMES_FROM = {1: 0, 2: 1, 3: 2, 4: 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("training")
    images, labels = load_digits(return_X_y=True)
    pack_arrays(
        where / "data",
        {
            "image": images[:NUM_SAMPLES].reshape(-1, 1, 8, 8).astype(np.float32),
            "label": labels[:NUM_SAMPLES].astype(np.int64),
            "id": np.arange(NUM_SAMPLES),
        },
    )
    return where


def case_of(backend: str, num_ranks: int, *more: Any) -> Any:
    """A test's parameters."""
    marks = [pytest.mark.thorough] if (backend, num_ranks) == THOROUGH else []
    return pytest.param(backend, num_ranks, *more, marks=marks)


class Launches:
    """Every backend at every number of ranks, one launch each, when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[str, int], RanksResult] = {}

    def __getitem__(self, key: tuple[str, int]) -> RanksResult:
        return self.make(*key)

    def make(self, backend: str, n: int) -> RanksResult:
        key = (backend, n)
        if key not in self._made:
            begun_by = RESUMES_FROM[n]
            if begun_by:
                self.make(backend, begun_by)
            self._made[key] = run_ranks(
                n, training_cases.everything, str(self._directory), begun_by, backend=backend, timeout_s=800
            )
        return self._made[key]


@pytest.fixture(scope="module")
def launches(directory: Path) -> Launches:
    return Launches(directory)


def furthest(a: list[float], b: list[float]) -> float:
    """Largest relative difference between two loss curves of the whole length."""
    assert len(a) == len(b) == training_cases.STEPS
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def curve(launch: RanksResult, which: str, rank: int = 0) -> list[float]:
    return launch.outputs[rank]["numbers"][which]["losses"]


@pytest.mark.parametrize(
    ("backend", "num_ranks", "precision", "algorithm"),
    [
        case_of(backend, n, *case)
        for backend in BACKENDS
        for n in RANK_COUNTS
        for case in training_cases.NUMBERS[backend]
    ],
)  # 1 and 2 ranks have no second level
def test_the_loss_curve_is_that_of_one_rank(
    launches: Launches, backend: str, num_ranks: int, precision: str, algorithm: str
) -> None:
    alone = curve(launches["mpi", 1], f"{precision} flat")
    found = curve(launches[backend, num_ranks], f"{precision} {algorithm}")
    assert furthest(found, alone) < {"fp64": 1e-10, "fp32": 1e-4}[precision]
    assert alone[-1] < 0.6 * alone[0]  # it did learn


@pytest.mark.parametrize(
    ("backend", "num_ranks"), [case_of(backend, n) for backend in BACKENDS for n in RANK_COUNTS]
)
def test_all_ranks_hold_the_same_bits(launches: Launches, backend: str, num_ranks: int) -> None:
    for precision, algorithm in training_cases.NUMBERS[backend]:
        which = f"{precision} {algorithm}"
        outputs = [output["numbers"][which] for output in launches[backend, num_ranks].outputs]
        assert len({output["fingerprint"] for output in outputs}) == 1
        assert len({tuple(output["losses"]) for output in outputs}) == 1


@pytest.mark.parametrize(
    ("backend", "num_ranks"), [case_of(backend, n) for backend in BACKENDS for n in (3, 4)]
)
def test_two_levels_were_used_where_asked_for(launches: Launches, backend: str, num_ranks: int) -> None:
    found = launches[backend, num_ranks].outputs[0]["numbers"]
    assert found["fp64 hierarchical"]["summary"]["algorithm"] == "hierarchical"
    assert found["fp64 flat"]["summary"]["algorithm"] == "flat"
    assert found["fp64 flat"]["summary"]["backend"] == backend


@pytest.mark.parametrize(
    ("backend", "num_ranks", "step"),
    [(*launch, step) for launch, steps in training_cases.STOPS.items() for step in steps],
)
def test_resumed_is_bit_identical_to_never_stopped(
    launches: Launches, backend: str, num_ranks: int, step: int
) -> None:
    for output in launches[backend, num_ranks].outputs:
        whole, resumed = output["interruptions"]["whole"], output["interruptions"][f"{step}"]
        assert resumed["stopped"]
        # One per epoch: the loss scale has moved, and came back. One rank sends nothing, so nothing overflows.
        assert whole["summary"]["skipped_steps"] == (2 if num_ranks > 1 else 0)
        assert resumed["losses"] == whole["losses"]  # the records of both byte_ranges, to the last bit
        assert resumed["fingerprint"] == whole["fingerprint"]


@pytest.mark.parametrize(("backend", "num_ranks"), INTERRUPTED_ON_MANY)
def test_what_auto_chose_and_its_numbers_are_in_the_runs_record(
    launches: Launches, directory: Path, backend: str, num_ranks: int
) -> None:
    launches.make(backend, num_ranks)
    run = directory / f"{backend}-{num_ranks}-stop-never"
    environment = json.loads((run / "environment.json").read_text())
    found = environment["reduction"]
    assert environment["algorithm"].startswith("auto: ")
    assert found["source"] == f"measured in {found['calibration_s']:.1f} s"
    assert found["calibration_s"] > 0
    topology = Topology.from_node_names(training_cases.nodes_for(num_ranks))
    axes = [axis for axis in ("local", "node") if max(map(len, topology.groups(axis))) > 1]
    assert [level["axis"] for level in found["levels"]] == axes
    assert all(level["latency_s"] > 0 and level["bytes_per_s"] > 0 for level in found["levels"])
    assert found["wire"] == environment["wire"] == "fp16"
    measured = {each["algorithm"]: each["measured"] for each in found["candidates"]}
    assert len(measured) > 1
    assert found["algorithm"] in measured
    assert all(
        point["bytes"] > 0 and point["seconds"] > 0 for points in measured.values() for point in points
    )
    assert {"latency_s", "seconds_per_byte"} <= found["candidates"][0].keys()
    assert found["bucket_bytes"] > 0
    assert isinstance(found["overlap"], bool)


@pytest.mark.parametrize(("backend", "num_ranks"), INTERRUPTED_ON_MANY)
def test_other_runs_and_later_starts_take_the_measurements_from_files(
    launches: Launches, directory: Path, backend: str, num_ranks: int
) -> None:
    launches.make(backend, num_ranks)
    first = directory / f"{backend}-{num_ranks}-stop-never"
    numbers = json.loads((first / "environment.json").read_text())["reduction"]
    (entry,) = json.loads((first / "reduction.json").read_text())["entries"]
    topology = Topology.from_node_names(training_cases.nodes_for(num_ranks))
    assert entry["key"]["backend"] == backend
    assert entry["key"]["ranks_by_node"] == [list(ranks) for ranks in topology.ranks_by_node]
    assert {"hpctrain", "torch", "mpi"} <= entry["key"]["versions"].keys()
    assert entry["found"]["seconds"] == numbers["calibration_s"]
    assert entry["found"]["levels"] == numbers["levels"]
    # Another run, stopped and resumed: it began with the file that runs share, and went on with its own.
    second = directory / f"{backend}-{num_ranks}-stop-29"
    starts = [start["environment"]["reduction"] for start in read_records(second / "starts.jsonl")]
    files = [directory / "calibration.json", second / "reduction.json"]
    assert [start["source"] for start in starts] == [f"from {file}" for file in files]
    assert starts == [{**numbers, "source": f"from {file}"} for file in files]


@pytest.mark.parametrize(("backend", "num_ranks"), training_cases.STOPS)
def test_what_int8_has_lost_is_resumed_to_the_bit(launches: Launches, backend: str, num_ranks: int) -> None:
    for output in launches[backend, num_ranks].outputs:
        found = output["interruptions"]["int8"]
        assert found["resumed"] == found["whole"]
        assert found["same"]


@pytest.mark.parametrize(
    ("backend", "after", "before"),
    [case_of(backend, after, RESUMES_FROM[after]) for backend in BACKENDS for after in (2, 3, 4)],
)
def test_resumed_on_another_number_of_ranks_sees_exactly_the_remaining_samples(
    launches: Launches, backend: str, before: int, after: int
) -> None:
    begun: list[list[int]] = launches[backend, before].outputs[0]["begun"]
    ended: list[list[int]] = launches[backend, after].outputs[0]["ended"]
    assert len(begun) == before
    assert len(ended) == after
    counts = Counter(sample for seen in (*begun, *ended) for sample in seen)
    assert counts == dict.fromkeys(range(NUM_SAMPLES), 2)  # two epochs


def newest(run: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step of a run's newest checkpoint, and its tensors."""
    found = open_checkpoint(run / "checkpoints", comm=SerialWorld())
    return found.step, found.read_all()


def owed(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What no step has delivered yet, in gradient space: no rows where one rank sends nothing."""
    rows = [t for name, t in tensors.items() if name in ("updater/lost", "updater/residual")]
    return torch.cat(rows or [torch.zeros(1, 650, dtype=torch.float64)]).sum(0)


def delivered_to(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in (tensors["model/1.weight"], tensors["model/1.bias"])])


@pytest.mark.parametrize(
    ("backend", "after", "before"),
    [case_of(backend, after, RESUMES_FROM[after]) for backend in BACKENDS for after in (2, 3, 4)],
)
def test_what_a_wire_has_not_delivered_is_delivered_on_another_number_of_ranks(
    launches: Launches, directory: Path, backend: str, after: int, before: int
) -> None:
    """Of int8 and of top-k, in float64: nothing is lost, and nothing comes twice."""
    launches.make("mpi", 1)
    launches.make(backend, after)
    step, ended = newest(directory / training_cases.elastic_name(backend, before))
    _, whole = newest(directory / training_cases.elastic_name("fp32", 1))
    assert step == 58
    late = training_cases.ELASTIC_LR * owed(ended)
    assert late.abs().max() > 1e-6
    assert (delivered_to(ended) - late - delivered_to(whole)).abs().max() < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ranks_shares_of_an_epoch_are_balanced(launches: Launches, backend: str) -> None:
    samples: list[Any] = [o["numbers"]["fp64 flat"]["samples"] for o in launches[backend, 3].outputs]
    assert max(samples) - min(samples) <= training_cases.STEPS
