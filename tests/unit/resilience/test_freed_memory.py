"""Freed memory stays with the process until it is short, or if it is large pieces, unless the user has set glibc's own
variables."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from hpctrain.resilience import (
    give_back_freed_memory,
    give_back_large_pieces,
    give_back_once,
    keep_freed_memory,
)
from tests.ranks_launcher import REPOSITORY

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's"),
]

# Page faults of 100 training steps, after 20 others.
FAULTS = """
import resource, sys, torch
from hpctrain.resilience import give_back_freed_memory, keep_freed_memory
assert keep_freed_memory()
if sys.argv[1] == "give back":
    assert give_back_freed_memory()
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(64 * 64, 10),
)
def steps(count):
    for _ in range(count):
        model(torch.ones(32, 1, 8, 8)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
steps(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps(100)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# Resident bytes after 64 MB in pieces of 2 MB have been freed, between which small ones stay.
RESIDENT = """
import sys, psutil, torch
from hpctrain.resilience import give_back_large_pieces, keep_freed_memory
assert keep_freed_memory()
if sys.argv[1] == "give back":
    assert give_back_large_pieces()
before = psutil.Process().memory_info().rss
kept, large = [], []
for _ in range(32):
    large.append(torch.ones(500_000))
    kept.append(torch.ones(10_000))
large.clear()
print(psutil.Process().memory_info().rss - before)
"""


# Resident bytes after 64 MB have been freed between small pieces that stay; then the page faults of taking and freeing
# 32 MB again, twice.
ONCE = """
import resource, sys, psutil, torch
from hpctrain.resilience import give_back_once, keep_freed_memory
assert keep_freed_memory()
before = psutil.Process().memory_info().rss
kept, large = [], []
for _ in range(32):
    large.append(torch.ones(500_000))
    kept.append(torch.ones(10_000))
large.clear()
if sys.argv[1] == "give back":
    assert give_back_once()
print(psutil.Process().memory_info().rss - before)
for _ in range(20):
    many = [torch.ones(250_000) for _ in range(32)]
    many.clear()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
many = [torch.ones(250_000) for _ in range(32)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def all_printed(program: str, how: str) -> list[int]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", program, how], cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [int(line) for line in done.stdout.split()]


def printed(program: str, how: str) -> int:
    (found,) = all_printed(program, how)
    return found


def test_a_step_faults_no_page_that_the_one_before_had() -> None:
    assert max(printed(FAULTS, "keep") for _ in range(3)) < 2000
    assert printed(FAULTS, "give back") > 10_000


def test_large_pieces_are_given_back_if_a_model_gathers_and_frees_its_blocks() -> None:
    assert printed(RESIDENT, "keep") > 60_000_000
    assert printed(RESIDENT, "give back") < 10_000_000


def test_what_is_free_is_given_back_once_and_kept_later() -> None:
    resident, _ = all_printed(ONCE, "keep")
    assert resident > 60_000_000
    resident, faults = all_printed(ONCE, "give back")
    assert resident < 10_000_000
    assert faults < 500


def test_the_users_own_settings_count() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not give_back_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not give_back_large_pieces({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not give_back_once({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})
