"""Both demo tasks, trained with each wire, reach the quality that fp32 on the wire reaches.

Ranks are threads: what is compared is numbers, and nothing depends on how they travel.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.ranks.wire_quality_cases import COURSES, Outcome, train

NUM_RANKS = 4
# Each is trained once with every task; bytes of a step as a share of those of fp32.
MOST_BYTES = {"fp16": 0.51, "bf16": 0.51, "int8": 0.27, "low-rank": 0.45}
# What a model that has learnt something reaches: a tenth of the digits are right by chance, and the bytes of the
# text have an entropy of 3.1 nats each.
LEARNT = {"digits": lambda accuracy: accuracy > 0.95, "characters": lambda nats: nats < 2.4}


@functools.cache
def outcome(task: str, wire: str) -> Outcome:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(COURSES[task](), wire=wire, num_ranks=NUM_RANKS)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("task", COURSES)
def test_fp32_learns_the_task(task: str) -> None:
    reached = outcome(task, "fp32")
    assert LEARNT[task](reached.quality)
    assert reached.skipped == 0


@pytest.mark.parametrize("wire", MOST_BYTES)
def test_digits_within_1_percent_of_the_accuracy_of_fp32(wire: str) -> None:
    assert outcome("digits", wire).quality >= outcome("digits", "fp32").quality - 0.01


@pytest.mark.parametrize("wire", MOST_BYTES)
def test_characters_within_1_percent_of_the_nats_of_fp32(wire: str) -> None:
    assert outcome("characters", wire).quality <= outcome("characters", "fp32").quality * 1.01


@pytest.mark.parametrize("wire", MOST_BYTES)
@pytest.mark.parametrize("task", COURSES)
def test_it_was_reached_with_fewer_bytes_and_no_step_skipped(task: str, wire: str) -> None:
    assert outcome(task, wire).bytes_per_step < MOST_BYTES[wire] * outcome(task, "fp32").bytes_per_step
    assert outcome(task, wire).skipped == 0
