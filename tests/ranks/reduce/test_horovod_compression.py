"""Our compressions in a plain Horovod script, on real ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest

from tests.ranks_launcher import run_command

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
]

TRAINED = ["fp16", "fp16 predivided", "int8", "int8 in groups", "int8 in passes", "int8 clipped"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.ranks.reduce.plain_horovod_script"]
    result = run_command(2, argv, timeout_s=800, expect=0)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1]))


@pytest.mark.parametrize("case", TRAINED)
def test_training_is_as_good_as_without_compression(found: dict[str, Any], case: str) -> None:
    assert found["none"]["accuracy"] > 0.9
    assert found[case]["accuracy"] == pytest.approx(found["none"]["accuracy"], abs=0.01)
    if "clipped" not in case:
        assert found[case]["loss"] == pytest.approx(found["none"]["loss"], rel=0.01)


@pytest.mark.parametrize("case", TRAINED)
def test_all_ranks_hold_the_same_bits(found: dict[str, Any], case: str) -> None:
    first, second = found[case]["bits"]
    assert first == second
    assert first != found["none"]["bits"][0], "nothing was compressed"


def test_int8_training_has_the_same_bits_each_time(found: dict[str, Any]) -> None:
    assert found["int8 again"] == found["int8"]


@pytest.mark.parametrize("case", ["fp16", "int8"])
def test_a_script_that_saves_the_compression_goes_on_as_if_never_stopped(
    found: dict[str, Any], case: str
) -> None:
    assert found[f"{case} interrupted"] == found[case]


def test_an_average_of_int8_ends_every_rank_with_what_to_change(found: dict[str, Any]) -> None:
    assert len(found["average of int8"]) == 2
    for text in found["average of int8"]:
        assert "op=hvd.Sum" in text


@pytest.mark.parametrize("case", ["fp16", "int8"])
def test_sparse_and_unused_parameters_come_out_as_without_compression(
    found: dict[str, Any], case: str
) -> None:
    plain, compressed = found["sparse"]["none"], found["sparse"][case]
    assert plain[0] == [0.5, 1.0, 1.5]
    assert len(compressed) == len(plain)
    for row, expected in zip(compressed, plain, strict=True):
        assert row == pytest.approx(expected, abs=0.03)
