"""Freed memory stays with the process until it is short, unless the user has set glibc's own variables."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from hpctrain.resilience import give_back_freed_memory, keep_freed_memory
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


def faults(how: str) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


def test_a_step_faults_no_page_that_the_one_before_had() -> None:
    assert max(faults("keep") for _ in range(3)) < 2000
    assert faults("give back") > 10_000


def test_the_users_own_settings_count() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not give_back_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})
