"""A sink that fails is reported once and closed; the records and the other sinks go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpctrain.telemetry import RecordWriter, Sinks, read_records


class Kept:
    """Keeps what it gets; fails at the record of a chosen step, or when it is closed."""

    def __init__(self, name: str, *, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.name = name
        self.steps: list[int] = []
        self.closed = 0
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def receive(self, record: Mapping[str, Any]) -> None:
        if record["step"] == self._fails_at:
            raise RuntimeError("the server is gone")
        self.steps.append(record["step"])

    def close(self) -> None:
        self.closed += 1
        if self._fails_to_close:
            raise OSError("the disk is full")


def test_a_sink_that_fails_is_reported_once_and_off_and_the_rest_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    sinks = Sinks(warn=warnings.append)
    good, bad, sticky = Kept("good"), Kept("bad", fails_at=2), Kept("sticky", fails_to_close=True)

    def unreachable() -> Kept:
        raise ConnectionRefusedError("nobody listens")

    for name, make in (
        ("bad", lambda: bad),
        ("unreachable", unreachable),
        ("good", lambda: good),
        ("sticky", lambda: sticky),
    ):
        sinks.open(name, make)
    records = RecordWriter(tmp_path / "records.jsonl", sinks=sinks)
    for step in range(1, 5):
        records.write({"kind": "step", "step": step})
    records.observe({"kind": "step", "step": 5})
    assert warnings == [
        "the unreachable could not be opened: nobody listens; training goes on without it",
        "the bad failed and is off from now on: the server is gone; training goes on",
    ]
    assert (bad.steps, bad.closed) == ([1], 1)
    assert (good.steps, good.closed) == ([1, 2, 3, 4, 5], 0)
    records.close()
    sinks.close()
    sinks.close()
    assert (good.closed, bad.closed, sticky.closed) == (1, 1, 1)
    assert warnings[2:] == ["the sticky could not be closed: the disk is full"]
    records.write({"kind": "step", "step": 6})
    assert good.steps[-1] == 5
    assert [record["step"] for record in read_records(tmp_path / "records.jsonl")] == [1, 2, 3, 4]


def test_sinks_see_what_the_file_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sinks = Sinks()
    kept = Kept("kept", fails_at=3)
    sinks.open("kept", lambda: kept)
    records = RecordWriter(tmp_path / "records.jsonl", kinds=["damage"], sinks=sinks)
    for step in range(1, 5):
        records.write({"kind": "step", "step": step})
    records.close()
    assert kept.steps == [1, 2]
    assert not (tmp_path / "records.jsonl").exists()
    assert capsys.readouterr().err.splitlines() == [
        "hpctrain: the kept failed and is off from now on: the server is gone; training goes on"
    ]
