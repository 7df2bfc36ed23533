"""What reductions must take at least, from the bytes of real runs and from speeds that are written beside them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.report import ReductionLimit, RunData, conclude, make_report, read_run, reduction_limit
from hpctrain.telemetry import read_records

# A weight of 4 x 2 and 2 biases, float32; the buckets are padded and carry a step's numbers too.
PARAMETER_BYTES = 40
PROBE = {
    "nodes": [
        {"node": "n0", "bytes_per_s": 2e6, "memory_bytes_per_s": 9e6},
        {"node": "n1", "bytes_per_s": 1e6, "memory_bytes_per_s": 8e6},
    ]
}


@pytest.fixture
def run(runs: list[Path]) -> RunData:
    return replace(read_run(runs[0]), calibrations=())


@pytest.fixture
def sent_bytes(runs: list[Path]) -> int:
    """What each of two nodes sends: half of its buckets to be summed, and half of the sums."""
    records = read_records(runs[0] / "metrics" / "rank-00001.jsonl")
    (found,) = {sum(record["bytes"]) for record in records if record["kind"] == "buckets"}
    assert PARAMETER_BYTES <= found < PARAMETER_BYTES + 4096
    return int(found)


def on_one_node(run: RunData, **changes: Any) -> RunData:
    environment = {**run.environment, "ranks_by_node": [[0, 1]], "node_names": ["n0"], **changes}
    return replace(run, environment=environment)


def limit_of(run: RunData, **given: float) -> ReductionLimit:
    found = reduction_limit(run, **given)
    assert found is not None
    return found


def test_bytes_are_those_of_the_recorded_buckets_and_unknown_rates_stay_unknown(
    run: RunData, sent_bytes: int
) -> None:
    found = limit_of(run)
    assert found.gradient_bytes == sent_bytes
    assert found.nodes is not None
    assert (found.nodes.members, found.nodes.sent_bytes) == (2, sent_bytes)
    assert found.ranks is None
    assert found.nodes.bytes_per_s is None
    assert found.least_s is found.times_least is None
    assert found.measured_s is not None
    assert found.measured_s > 0
    assert not any("at least" in each.text for each in conclude(run, limit=found))


def test_the_slowest_link_that_was_measured_counts_and_a_given_rate_before_it(
    run: RunData, sent_bytes: int
) -> None:
    probed = replace(run, probe=PROBE)
    found = limit_of(probed)
    assert found.least_s == pytest.approx(sent_bytes / 1e6)
    assert found.measured_s is not None
    assert found.times_least == pytest.approx(found.measured_s / (sent_bytes / 1e6))
    assert limit_of(replace(run, probed_link=5e6)).least_s == pytest.approx(sent_bytes / 5e6)
    assert limit_of(replace(probed, probed_link=5e6)).least_s == found.least_s
    given = limit_of(probed, link_bytes_per_s=4e6)
    assert given.least_s == pytest.approx(sent_bytes / 4e6)
    (text,) = [each for each in conclude(probed, limit=given) if "at least" in each.text]
    least = f"{1e3 * sent_bytes / 4e6:.3g} ms that {sent_bytes / 1e6:.3g} MB at 4 MB/s need between nodes"
    assert f"{given.times_least:.1f} x the {least}" in text.text
    assert text.source.endswith("rate: --link")


def test_within_a_node_the_memory_counts_that_its_ranks_share(run: RunData, sent_bytes: int) -> None:
    found = limit_of(
        on_one_node(replace(run, probe={"nodes": PROBE["nodes"][:1]}), algorithm="hierarchical", wire="fp16")
    )
    assert found.nodes is None
    assert found.ranks is not None
    assert (found.ranks.sent_bytes, found.ranks.bytes_per_s) == (sent_bytes, 4.5e6)  # float32 in memory
    encoded = limit_of(on_one_node(run, algorithm="ring", wire="fp16")).ranks
    assert encoded is not None
    assert encoded.sent_bytes == sent_bytes / 2


def test_rates_of_auto_are_taken_from_the_same_ranks_only(run: RunData) -> None:
    def entry(ranks_by_node: list[list[int]], rate: float) -> dict[str, Any]:
        return {
            "key": {"ranks_by_node": ranks_by_node},
            "found": {"levels": [{"axis": "node", "bytes_per_s": rate}]},
        }

    found = limit_of(replace(run, calibrations=[entry([[0], [1]], 5e6), entry([[0, 1]], 1.0)]))
    assert found.nodes is not None
    assert found.nodes.bytes_per_s == 5e6
    assert limit_of(replace(run, calibrations=[entry([[0, 1]], 1.0)])).nodes == limit_of(run).nodes


def test_bytes_of_a_sparse_wire_are_not_known(run: RunData) -> None:
    sparse = replace(run, environment={**run.environment, "wire": "top-k"})
    found = limit_of(sparse, link_bytes_per_s=1e6)
    assert found.nodes is not None
    assert found.nodes.sent_bytes is found.least_s is None


def test_one_rank_reduces_nothing(runs: list[Path]) -> None:
    assert reduction_limit(read_run(runs[1])) is None
    report = make_report([runs[1]])
    assert not any(part.name == "reduction" for part in (*report.tables, *report.plots))


def test_the_report_has_table_figure_and_what_is_missing(
    runs: list[Path], sent_bytes: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    (run / "reduction.json").unlink()
    plain = make_report([runs[1], run])
    (table,) = [each for each in plain.tables if each.name == "reduction"]
    assert list(table.columns) == ["run"]
    assert "rate of a link is not known: give --link" in table.note
    assert not any(plot.name == "reduction" for plot in plain.plots)
    (run / "probe.json").write_text(json.dumps(PROBE))
    report = make_report([run])
    rows = {
        row.name: list(row.values) for row in next(t for t in report.tables if t.name == "reduction").rows
    }
    assert rows["each node sends at least"] == [pytest.approx(sent_bytes / 1e6)]
    assert rows["known from"] == ["probe.json, slowest node"]
    together, least = rows["measured together"][0], rows["so the time between nodes is at least"][0]
    assert rows["measured / least"][0] == pytest.approx(together / least)  # type: ignore[operator]
    (plot,) = [plot for plot in report.plots if plot.name == "reduction"]
    assert plot.text.startswith(f"run: at least {1e3 * sent_bytes / 1e6:.3g} ms, measured")
