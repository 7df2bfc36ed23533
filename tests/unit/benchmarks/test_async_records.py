"""What is computed from the rounds that were measured, and the page of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.asynchronous.suite import (
    METHODS,
    PEER,
    SYNCHRONOUS,
    all_record,
    loss_records,
    step_records,
    tables,
)


def found() -> dict[str, dict[str, Any]]:
    rounds = {name: {"steps": 50, "seconds": [20.0, 22.0], "node_bytes": [[100, 90]] * 2} for name in METHODS}
    rounds[SYNCHRONOUS] = {"steps": 1, "seconds": [16.0, 17.0], "node_bytes": [[98, 99], [98, 101]]}
    rounds["diloco int8"]["seconds"] = [5.0, 5.0]
    return rounds


def test_steps_bytes_and_rates() -> None:
    records = {record.id: record for record in step_records(found())}
    assert records["async.1.local-sgd"].value == pytest.approx(21.0 / 50)
    assert not records["async.1.local-sgd"].holds
    assert records["async.2.local-sgd"].value == pytest.approx(0.0)
    assert records["async.3.diloco-int8.synchronous"].value == pytest.approx(16.5 / 0.1)
    assert records["async.3.diloco-int8.peer"].value == pytest.approx(0.42 / 0.1)
    assert not records["async.3.daso-int8.peer"].holds  # as fast as the peer


def test_a_method_that_failed_leaves_its_records_out() -> None:
    rounds = found()
    del rounds[PEER], rounds["local-sgd"]
    ids = {record.id for record in step_records(rounds)}
    assert ids == {
        "async.1.local-sgd-fp16", "async.3.diloco-int8.synchronous", "async.3.daso-int8.synchronous",
    }  # fmt: skip
    assert not all_record(rounds).holds


def test_losses_are_compared_seed_by_seed() -> None:
    [record] = loss_records("digits", {SYNCHRONOUS: [0.10, 0.20], "local-sgd": [0.11, 0.20]})
    assert record.value == pytest.approx((1.1 + 1.0) / 2)
    assert not record.holds


def test_the_page_has_a_row_for_each_method() -> None:
    record = all_record(found())
    shown = tables({"records": [{"id": record.id, "samples": record.samples}]})["methods"].splitlines()
    assert len(shown) == 2 + len(METHODS)
    assert "| synchronous | 16.500 | 0.00 | 1.0 |" in shown
    assert tables({"records": []}) == {}
