"""Traces of chosen steps: which steps, clocks that drift, rows that do not overlap, Horovod's timeline."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from hpctrain.scaling import (
    chrome_trace,
    measure_clock_offset,
    parse_trace_steps,
    read_horovod_timeline,
    read_traces,
)
from hpctrain.telemetry import RecordWriter
from hpctrain.topology import Topology

BEGAN = 1_700_000_000.0  # seconds since 1970


def test_steps_are_parsed_and_mistakes_are_explained() -> None:
    assert parse_trace_steps("100-105, 2000") == (range(100, 106), range(2000, 2001))
    for text in ("", "a", "5-", "-5", "5-4", "0-3", "5,5", "5-8,7", "9,3", "5-6,7"):
        with pytest.raises(ValueError):
            parse_trace_steps(text)


def clock_of_rank_0(at_s: float) -> float:
    return 50.0 + at_s


def write_trace(folder: Path, *, rank: int, ranks: int, clock_of: Any, spans: list[tuple[Any, ...]]) -> None:
    """clock_of: the rank's monotonic clock at a time of rank 0's. spans: (step, name, begin, end, bucket) there."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(folder / f"rank-{rank:05}.jsonl")
    writer.write({
        "kind": "rank", "rank": rank, "ranks": ranks, "node": f"n{rank}", "clock_s": clock_of(0.0), "time": BEGAN,
    })  # fmt: skip

    def compared(at_s: float) -> None:
        offset_s = clock_of_rank_0(at_s) - clock_of(at_s)
        writer.write(
            {"kind": "clock", "clock_s": clock_of(at_s), "offset_s": offset_s, "error_s": 1e-5 * rank}
        )

    compared(0.0)
    for step, name, begin_s, end_s, bucket in spans:
        number = {} if bucket is None else {"bucket": bucket}
        span = {"begin_s": clock_of(begin_s), "end_s": clock_of(end_s), **number}
        writer.write({"kind": "span", "step": step, "name": name, **span})
    compared(100.0)
    writer.close()


SPANS = [
    (5, "input", 1.0, 1.5, None),
    (5, "forward and backward", 1.5, 2.5, None),
    (5, "bucket 0", 1.8, 2.6, 0),
    (5, "bucket 1", 2.2, 2.7, 1),
    (5, "bucket 2", 2.65, 2.9, 2),
    (5, "wait for reduction", 2.5, 2.95, None),
]


def test_offset_and_drift_of_a_clock_are_removed_and_no_row_holds_two_spans_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "trace" / "step-00000005"
    clocks = [clock_of_rank_0, lambda t: 9e5 + t * (1 + 1e-4)]  # the second is late by 10 ms after 100 s
    for rank, clock_of in enumerate(clocks):
        write_trace(folder, rank=rank, ranks=2, clock_of=clock_of, spans=SPANS)
    write_trace(folder, rank=2, ranks=3, clock_of=clocks[0], spans=SPANS)  # left by a run on more ranks
    traces = read_traces(tmp_path)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        for span, (_, name, begin_s, end_s, bucket) in zip(trace.spans, SPANS, strict=True):
            assert (span.name, span.bucket) == (name, bucket)
            assert span.begin_s - BEGAN == pytest.approx(begin_s, abs=1e-6)
            assert span.end_s - BEGAN == pytest.approx(end_s, abs=1e-6)
    found = json.loads(json.dumps(chrome_trace(traces)))
    assert found["otherData"]["clock_error_us"] == pytest.approx(10)
    for rank in (0, 1):
        events = [e for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
        assert len(events) == len(SPANS)
        for row in {event["tid"] for event in events}:
            mine = sorted((e for e in events if e["tid"] == row), key=lambda e: e["ts"])
            for one, other in pairwise(mine):
                assert one["ts"] + one["dur"] <= other["ts"] + 1
        assert {e["args"]["bucket"]: e["tid"] for e in events if "bucket" in e["args"]} == {0: 1, 1: 2, 2: 1}
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0 (n0)", 1: "rank 1 (n1)"}


def test_an_absent_or_incomplete_trace_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"telemetry\.trace_steps"):
        read_traces(tmp_path)
    folder = tmp_path / "trace" / "step-00000005"
    write_trace(folder, rank=0, ranks=2, clock_of=clock_of_rank_0, spans=SPANS)
    with pytest.raises(UsageError, match=r"step-00000005 cannot be read .*rank-00001"):
        read_traces(tmp_path)


def test_horovods_timeline_is_moved_to_the_same_clock_and_cut_to_the_traced_steps(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace" / "step-00000005", rank=0, ranks=1, clock_of=clock_of_rank_0, spans=SPANS)
    head = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "gradients"}}
    began = {
        "name": "",
        "ph": "M",
        "pid": 0,
        "args": {"start_time_since_epoch_in_micros": int(BEGAN * 1e6) - 500_000},
    }
    events = [
        {"ph": "B", "name": "ALLREDUCE", "ts": 100, "pid": 0},
        {"ph": "E", "ts": 200, "pid": 0},
        {"ph": "B", "name": "ALLREDUCE", "ts": 2_500_000, "pid": 0},
        {"ph": "E", "ts": 3_000_000, "pid": 0},
    ]
    path = tmp_path / "timeline.json"
    path.write_text("[\n" + ",".join(map(json.dumps, [began, head, *events])) + ',{"ph": "B", "na')
    merged = chrome_trace(read_traces(tmp_path), horovod=read_horovod_timeline(path))
    ours = [event for event in merged["traceEvents"] if event["pid"] == 0]
    theirs = [event for event in merged["traceEvents"] if event["pid"] != 0]
    assert len(ours) == len(SPANS) + 5
    assert [event["args"]["name"] for event in theirs if event.get("name") == "process_name"] == [
        "Horovod: gradients"
    ]
    # Their 2.5 s since their begin, half a second before ours, are 2 s of ours; our first span begins at 1 s.
    assert [event["ts"] for event in theirs if event["ph"] in "BE"] == pytest.approx([1e6, 1.5e6], abs=1)
    path.write_text("no timeline")
    with pytest.raises(UsageError, match=r"does not say when it began|cannot be read"):
        read_horovod_timeline(path)


def test_clocks_of_nodes_are_compared_with_rank_0s() -> None:
    """The ranks are threads, so their clocks are one: what is found is the error, which must be within its bound."""

    def case(world: World) -> Any:
        topology = Topology.from_node_names(["a", "a", "b", "b", "c"])
        return measure_clock_offset(world, topology)

    a, also_a, b, also_b, c = run_threads(5, case)
    assert (a.offset_s, a.error_s, also_a.offset_s) == (0.0, 0.0, 0.0)
    assert b == also_b
    for offset in (b, c):
        assert 0 < offset.error_s < 0.1
        assert abs(offset.offset_s) <= offset.error_s
