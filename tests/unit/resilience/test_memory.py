"""Errors of memory as the libraries raise them, and the limits of control groups as the kernel shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.resilience.host_memory import read_group_limit
from hpctrain.resilience.out_of_memory import in_binary_units, num_parts, shortage

PETABYTE = 1 << 50


def raised(function: object) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        function()  # type: ignore[operator]
    return caught.value


def test_errors_of_torch_numpy_and_python_are_recognised_with_what_was_asked_for() -> None:
    assert shortage(raised(lambda: torch.empty(PETABYTE))) == "4096.0 TiB"
    assert shortage(raised(lambda: np.empty(PETABYTE, np.uint8))) == "1.0 PiB"
    assert shortage(raised(lambda: bytearray(PETABYTE))) == ""
    assert shortage(MemoryError()) == ""
    # As a device says it; no machine with one is needed to read it.
    cuda = torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.19 GiB"
    )
    assert shortage(cuda) == "1.5 GiB"
    assert shortage(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")) == ""


def test_other_errors_are_not() -> None:
    assert shortage(raised(lambda: torch.zeros(2) @ torch.zeros(3))) is None
    assert shortage(ValueError("can't allocate memory")) is None
    assert shortage(OSError(12, "Cannot allocate memory")) is None


def test_sizes_are_written_as_torch_writes_them() -> None:
    assert [in_binary_units(n) for n in (12, 2048, 3 << 20, 5 << 29)] == [
        "12 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "2.5 GiB",
    ]


@pytest.mark.parametrize(
    ("rows", "largest", "at_least", "expected"),
    [
        (32, 32, 1, 1),
        (32, 16, 1, 2),
        (32, 10, 1, 4),
        (32, 1, 1, 32),
        (10, 2, 1, 8),
        (33, 16, 3, 3),
        (5, 99, 4, 4),
    ],
)
def test_the_fewest_doublings_make_parts_small_enough(
    rows: int, largest: int, at_least: int, expected: int
) -> None:
    assert num_parts(rows, largest_part=largest, at_least=at_least) == expected


def test_doubling_parts_and_remembering_their_size_gives_the_same_number_again() -> None:
    for rows in range(1, 70):
        parts = 1
        while -(-rows // parts) > 1:
            parts *= 2
            assert num_parts(rows, largest_part=-(-rows // parts), at_least=1) == parts


def machine(root: Path, *, groups: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/meminfo").write_text("MemTotal:       16000000 kB\nMemFree:  1 kB\n")
    for path, text in limits.items():
        (root / "sys/fs/cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / path).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        (
            "0::/slurm/job_7/step_0/task_0\n",
            {"slurm/job_7/memory.max": "4000000000", "slurm/job_7/step_0/memory.max": "max"},
            (4_000_000_000, "/slurm/job_7"),
        ),
        (
            "9:cpu:/x\n4:memory:/slurm/uid_0/job_7/step_0\n",
            {
                "memory/slurm/uid_0/job_7/memory.limit_in_bytes": "3000000000",
                "memory/slurm/uid_0/job_7/step_0/memory.limit_in_bytes": "2000000000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            (2_000_000_000, "/slurm/uid_0/job_7/step_0"),
        ),
        ("4:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": "1000000000"}, (1_000_000_000, "/")),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/\n", {"memory.max": "99000000000000"}, None),
        ("", {}, None),
    ],
    ids=["version 2", "version 1", "container", "no limit", "more than there is", "no groups"],
)
def test_the_smallest_limit_below_the_machines_memory_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: tuple[int, str] | None
) -> None:
    found = read_group_limit(machine(tmp_path, groups=groups, limits=limits))
    assert (None if found is None else (found.num_bytes, found.group)) == expected


def test_beyond_its_own_limit_a_process_gets_an_error_that_is_recognised() -> None:
    script = """
import mmap
import torch
from hpctrain.resilience import GroupLimit, limit_own_memory, shortage
never_written = mmap.mmap(-1, 3 << 30, flags=mmap.MAP_PRIVATE)  # as libraries have, and more than the limit
own, used = limit_own_memory(GroupLimit(num_bytes=8 << 30, group="/"), num_sharing=4)
assert own == int(0.9 * 2 * (1 << 30)), own
assert 0 < used < own, used
held = [torch.ones(64 << 20)]
try:
    for _ in range(100):
        held.append(torch.ones(64 << 20))
except RuntimeError as error:
    print(len(held), shortage(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    number, asked = done.stdout.split(maxsplit=1)
    assert 2 <= int(number) <= 7
    assert asked.strip() == "256.0 MiB"
