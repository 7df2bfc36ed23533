"""The figure that holds `hpctrain.hvd` against Horovod: how its programs are started and stopped, and its records."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.parallel import figures
from benchmarks.parallel.timed import (
    METHODS,
    OPTIMIZERS,
    OPTIMIZERS_IN_TURNS,
    Command,
    Method,
    Program,
    on_node,
)

# A rank that trains nothing.
RANK = """
import sys
from pathlib import Path
from benchmarks.parallel.timed_ranks import Stepped, Turns
turns = Turns(directory=Path(sys.argv[1]), warmup=1, steps=1, idle_s=120)
turns.take(lambda number: Stepped(loss=2.0), rank=0, facts={"cores": [0]})
"""


def test_each_wire_has_one_of_ours_and_all_starts_of_horovod() -> None:
    assert [[method.name for method in methods] for methods in OPTIMIZERS_IN_TURNS] == [
        [
            f"{name}{suffix}"
            for name in ("hvd", "horovod", "horovod-ring", "horovod-yielding", "horovod-ring-yielding")
        ]
        for suffix in ("", "-fp16")
    ]
    assert {method.wire for method in OPTIMIZERS_IN_TURNS[1]} == {"fp16"}
    assert [name for name, method in OPTIMIZERS.items() if method.is_ours] == ["hvd", "hvd-fp16"]
    assert not OPTIMIZERS.keys() & METHODS.keys()


def test_horovod_is_started_by_mpirun_and_ours_by_hpctrain_launch(tmp_path: Path) -> None:
    ours = on_node(OPTIMIZERS["hvd"], tmp_path, num_ranks=2)
    assert ours.typed[-5:-3] == [sys.executable, "-m"]
    assert "launch" in ours.typed
    assert ours.variables == {}
    theirs = on_node(OPTIMIZERS["horovod-ring-fp16"], tmp_path, num_ranks=2)
    assert theirs.typed[:5] == ["mpirun", "-np", "2", "-H", "localhost:2"]
    assert theirs.variables == {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    }
    assert theirs.environ["OMPI_MCA_coll_tuned_allreduce_algorithm"] == "4"
    assert not any(name.startswith("HOROVOD_") for name in theirs.environ)
    assert on_node(METHODS["ddp"], tmp_path, num_ranks=2).variables == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("method", "stopped"), [(OPTIMIZERS["horovod"], True), (OPTIMIZERS["hvd"], True), (METHODS["ddp"], False)]
)
def test_ranks_of_a_horovod_script_are_stopped_between_their_turns(
    tmp_path: Path, method: Method, *, stopped: bool
) -> None:
    program = Program(method, tmp_path / "one", num_ranks=1, settings={}, timeout_s=120, idle_s=120)
    argv = [sys.executable, "-c", RANK, str(program.directory)]
    environ = {**os.environ, "PMIX_RANK": "0"}
    try:
        loss, _ = program.start(Command(argv=argv, typed=argv, environ=environ, variables={}))
        assert loss == 2.0
        (rank,) = program.training.processes(ranks_only=True)
        assert is_stopped(rank) == stopped
        assert program.turn().step_s >= 0
        assert is_stopped(rank) == stopped
    finally:
        program.end()
    assert program.training.processes() == []


def is_stopped(process: int) -> bool:
    """A signal takes a moment to arrive."""
    until_s = time.monotonic() + 2
    while time.monotonic() < until_s:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_horovods_best_start_counts_and_each_wire_has_a_record() -> None:
    seconds = {
        "hvd": [0.10, 0.10, 0.20], "hvd-fp16": [0.05, 0.05, 0.05], "horovod": [0.30, 0.30, 0.30],
        "horovod-ring": [0.16, 0.12, 0.40], "horovod-yielding-fp16": [0.07, 0.07, 0.07],
    }  # fmt: skip
    at = {"place": "4x1.1gbit", "where": "there"}
    plain, half = figures.horovod_records(seconds, OPTIMIZERS, binds=True, **at)
    assert (plain.id, plain.value, plain.bar) == ("parallel.7.4x1.1gbit.fp32", pytest.approx(1.6), 1.5)
    assert plain.what == (
        "there: a step of DistributedOptimizer, horovod.torch, with Open MPI's ring / hpctrain.hvd: 160 / 100 ms"
    )
    assert tuple(plain.range) == (pytest.approx(1.2), pytest.approx(2.0))
    assert plain.samples.keys() == {"hvd", "horovod", "horovod-ring"}
    assert (half.id, half.holds) == ("parallel.7.4x1.1gbit.fp16", False)
    assert all(one.holds for one in figures.horovod_records(seconds, OPTIMIZERS, binds=False, **at))
    lines = figures.tables({"records": [plain.as_json(), half.as_json()]})["optimizers"].splitlines()
    assert lines[0] == "| ms, median of the rounds | 4x1.1gbit |"
    assert lines[2:] == [
        "| hpctrain.hvd | 100 |",
        "| horovod.torch | 300 |",
        "| horovod.torch, with Open MPI's ring | 160 |",
        "| hpctrain.hvd, fp16 | 50 |",
        "| horovod.torch, fp16, yielding | 70 |",
    ]


def test_without_a_peer_there_is_no_record() -> None:
    assert figures.horovod_records({"hvd": [0.1]}, OPTIMIZERS, place="1x2", where="there", binds=False) == []
