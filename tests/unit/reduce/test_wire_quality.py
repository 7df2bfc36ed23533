"""Both demo tasks, trained with each wire, reach the quality that fp32 on the wire reaches.

Ranks are threads on three nodes: what is compared is numbers, and nothing depends on how messages travel.
"""

from __future__ import annotations

import functools

import pytest
import torch

from hpctrain.reduce.algorithms import Algorithm
from tests.unit.reduce.wire_quality_cases import COURSES, Outcome, train

# Each is trained once with every task; bytes of a step as a share of those of fp32. Round a ring of nodes int8 rounds
# each partial sum. Low-rank knows nothing of nodes: it saves more than half of a ring over all ranks.
MOST_BYTES = {
    (Algorithm.HIERARCHICAL, "fp16"): 0.51,
    (Algorithm.HIERARCHICAL, "bf16"): 0.51,
    (Algorithm.HIERARCHICAL, "int8"): 0.27,
    (Algorithm.HIERARCHICAL_RING, "int8"): 0.27,
    (Algorithm.FLAT, "low-rank"): 0.51,
}
# What a model that has learnt something reaches: a tenth of the digits are right by chance, and the bytes of the
# text have an entropy of 3.1 nats each.
LEARNT = {"digits": lambda accuracy: accuracy > 0.95, "characters": lambda nats: nats < 2.4}
# Seconds are spared: the longer task is trained with int8 by the way that rounds it most.
WAYS = {
    "digits": [*MOST_BYTES],
    "characters": [way for way in MOST_BYTES if way != (Algorithm.HIERARCHICAL, "int8")],
}


# A minute of both cores.
TASKS = ["digits", pytest.param("characters", marks=pytest.mark.thorough)]


@functools.cache
def outcome(task: str, algorithm: Algorithm, wire: str) -> Outcome:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(COURSES[task](), algorithm=algorithm, wire=wire)
    finally:
        torch.set_num_threads(threads)


def with_fp32(task: str) -> Outcome:
    return outcome(task, Algorithm.HIERARCHICAL, "fp32")


@pytest.mark.parametrize("task", TASKS)
def test_fp32_learns_the_task(task: str) -> None:
    reached = with_fp32(task)
    assert LEARNT[task](reached.quality)
    assert reached.skipped == 0


@pytest.mark.parametrize(("algorithm", "wire"), WAYS["digits"])
def test_digits_within_1_percent_of_the_accuracy_of_fp32(algorithm: Algorithm, wire: str) -> None:
    assert outcome("digits", algorithm, wire).quality >= with_fp32("digits").quality - 0.01


@pytest.mark.thorough
@pytest.mark.parametrize(("algorithm", "wire"), WAYS["characters"])
def test_characters_within_1_percent_of_the_nats_of_fp32(algorithm: Algorithm, wire: str) -> None:
    assert outcome("characters", algorithm, wire).quality <= with_fp32("characters").quality * 1.01


@pytest.mark.parametrize(
    ("task", "algorithm", "wire"),
    [
        *(("digits", *way) for way in WAYS["digits"]),
        *(pytest.param("characters", *way, marks=pytest.mark.thorough) for way in WAYS["characters"]),
    ],
)
def test_it_was_reached_with_fewer_bytes_and_no_step_skipped(
    task: str, algorithm: Algorithm, wire: str
) -> None:
    reached = outcome(task, algorithm, wire)
    assert reached.algorithm == algorithm
    assert 0 < reached.bytes_per_step < MOST_BYTES[algorithm, wire] * with_fp32(task).bytes_per_step
    assert reached.skipped == 0
