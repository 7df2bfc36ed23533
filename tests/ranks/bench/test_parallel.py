"""`python -m benchmarks.parallel --quick` with real ranks: what depends on no time must hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel.layouts import SAME_BITS, of_figure
from benchmarks.parallel.suite import WAYS
from benchmarks.parallel.timed import methods_at
from tests.ranks_launcher import run_command

pytestmark = pytest.mark.launches


def measured(tmp_path: Path, figures: str) -> dict[str, dict[str, Any]]:
    """The records by id."""
    output = tmp_path / "parallel.json"
    argv = [
        sys.executable,
        "-m",
        "benchmarks.parallel",
        "--quick",
        "--only",
        figures,
        "--output",
        str(output),
    ]
    run_command(None, argv, timeout_s=800, expect=0)
    content = json.loads(output.read_text())
    assert all("started" in entry for entry in content["figures"].values())
    return {record["id"]: record for record in content["records"]}


def on_two_ranks(figure: str, *, nodes: bool) -> list[str]:
    """The layouts of a figure that 2 ranks can have. nodes: also on two nodes."""
    return [
        layout.name
        for layout in of_figure(figure)
        if layout.fits(num_ranks=2, num_nodes=1) or (nodes and layout.fits(num_ranks=2, num_nodes=2))
    ]


def test_every_layout_equals_one_process_and_loads_every_other(tmp_path: Path) -> None:
    records = measured(tmp_path, "1,6")
    language = [f"parallel.1.language.{name}" for name in on_two_ranks("1", nodes=True)]
    images = [
        f"parallel.1.convolution.{layout.name}"
        for layout in of_figure("1")
        if layout.name in on_two_ranks("1", nodes=True)
        and not layout.options.keys() & {"pipeline", "sequence"}
    ]
    bits = [
        f"parallel.1.bits.{workload}.{name}" for workload in ("language", "convolution") for name in SAME_BITS
    ]
    assert list(records) == [
        *language, *images, *bits, "parallel.6.bits.2", "parallel.6.loss.2", "parallel.6.dcp",
    ]  # fmt: skip
    assert [name for name, record in records.items() if not record["holds"]] == []
    assert len(records["parallel.6.bits.2"]["samples"]) == len(on_two_ranks("6", nodes=True)) ** 2


def test_every_schedule_runs_with_stages_that_sleep(tmp_path: Path) -> None:
    records = measured(tmp_path, "5")
    assert list(records) == [
        f"parallel.5.{schedule}.4.1KiB" for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
    ]
    for record in records.values():
        alone_s, (step_s,) = record["samples"]["alone_s"], record["samples"]["seconds"]
        assert alone_s > 0
        # Below 0 where something else delayed the run on one rank: how long it took does not matter here.
        assert record["value"] == pytest.approx(1 - alone_s / step_s, abs=1e-3)


def test_peers_that_divide_samples_train_what_ddp_trains(tmp_path: Path) -> None:
    """On two groups of two, so that gradients are summed over groups too, for several steps."""
    result = tmp_path / "losses.json"
    methods = ["ddp", "tensor", "pipeline"]
    # Without the address torchrun takes the host's name, which must then have one.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
    run_command(
        None,
        [sys.executable, *torchrun, "-m", "tests.ranks.bench.peer_losses", str(result), *methods],
        env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        timeout_s=300,
        expect=0,
    )
    losses = json.loads(result.read_text())
    assert losses["ddp"][-1] < losses["ddp"][0]
    for method in methods[1:]:
        assert losses[method] == pytest.approx(losses["ddp"], rel=1e-5), method


@pytest.mark.thorough
def test_memory_and_steps_of_every_method_are_measured(tmp_path: Path) -> None:
    records = measured(tmp_path, "2,4")
    memory = [f"parallel.2.{name}.2" for name in on_two_ranks("2", nodes=False)]
    with_peer = [layout.name for layout in of_figure("4") if layout.peer and not layout.nodes]
    assert list(records) == [
        *memory,
        *(f"parallel.2.plan.{way}" for way in WAYS),
        *(f"parallel.4.1x2.{name}" for name in ("best", "best-16", *with_peer, "exposed")),
    ]
    # A small model: what does not grow with it counts too.
    assert all(record["value"] < 0.5 for name, record in records.items() if name in memory)
    methods = methods_at(num_nodes=1, ranks_per_node=2)
    assert set(records["parallel.4.1x2.best"]["samples"]) == set(methods)
