"""`check-gpu` from its archive, on this machine: what needs no GPU, with the Open MPI that the archive holds."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.gpu import page
from tests.gpu.traces import overlap
from tests.ranks_launcher import REPOSITORY, is_open_mpi, rank_environment

pytestmark = pytest.mark.launches

# Names of the checks: of the tests that compare a device with the CPU.
NAMES = {
    name
    for module in (REPOSITORY / "tests" / "gpu").glob("test_*.py")
    for name in re.findall(r"^def test_(\w+)\(check: Check", module.read_text(), flags=re.MULTILINE)
}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of what is installed here; wheels would be downloaded."""
    if not is_open_mpi():
        pytest.skip("the archive holds Open MPI")
    made = tmp_path_factory.mktemp("archive") / "gpu-check.tar.gz"
    subprocess.run(
        [sys.executable, "scripts/pack_gpu_check.py", "--no-wheels", "--output", str(made)],
        cwd=REPOSITORY, check=True, timeout=800,
    )  # fmt: skip
    return made


def without_mpi(directory: Path) -> str:
    """A PATH on which this Python and a shell are found, and no mpirun."""
    for name in ("bash", "cat", "cp", "dirname", "env", "mkdir", "mv", "uname"):
        found = next(Path(place, name) for place in ("/bin", "/usr/bin") if Path(place, name).exists())
        (directory / name).symlink_to(found)
    return str(directory)


def test_the_archive_has_all_that_hpctrain_needs_but_torch_and_numpy() -> None:
    needed = re.search(r"install_requires=\[(.*?)\]", (REPOSITORY / "setup.py").read_text(), flags=re.DOTALL)
    assert needed is not None
    names = set(re.findall(r"""["']([a-z0-9-]+)[<>=]""", needed[1]))
    assert {"h5py", "lazy-loader"} <= names
    packed = runpy.run_path(str(REPOSITORY / "scripts" / "pack_gpu_check.py"))["WHEELS"]
    assert names - {"torch", "numpy", "tomli"} <= set(packed)


@pytest.mark.thorough
def test_the_archive_checks_what_needs_no_gpu_with_its_own_open_mpi(archive: Path, tmp_path: Path) -> None:
    assert archive.stat().st_size < 60_000_000
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (tmp_path / "bin").mkdir()
    environment = rank_environment()
    for name in ("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH"):
        environment.pop(name, None)
    environment |= {"PATH": without_mpi(tmp_path / "bin"), "PYTHON": sys.executable}
    done = subprocess.run(
        [str(tmp_path / "gpu-check" / "check-gpu"), "--device", "cpu"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "gpu-check" / "gpu.json").read_text())
    by_name = {check["name"]: check for check in made["checks"]}
    assert by_name.keys() == NAMES
    assert {name for name, check in by_name.items() if check["status"] != "passed"} == {"nccl", "largest"}
    assert by_name["nccl"]["status"] == by_name["largest"]["status"] == "skipped"
    assert "NCCL needs a GPU" in done.stdout
    assert by_name["digits"]["needs_gpu"] == ["two ranks on one GPU"]
    assert len(made["commit"].removesuffix("+changes")) == 40
    assert "no GPU: only what needs none" in done.stdout
    assert "are computed by numpy" not in done.stdout  # the compiled ones of this Python were packed


def test_a_check_that_fails_ends_its_process_and_the_rest_is_checked_in_another() -> None:
    """On a device that torch does not know each check fails."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--device", "none", "--only", "device,gloo"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[-3:-1]] == [["device", "failed"], ["gloo", "failed"]]
    assert lines[-1] == "0 passed, 2 failed, 0 skipped: device, gloo failed"


def test_the_page_says_what_each_check_compares() -> None:
    page_text = (REPOSITORY / "docs" / "gpu.md").read_text()
    rows = page_text.partition("| check |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == NAMES


# ---------------------------------------------------------------------- figures


def test_overlap_counts_each_moment_once() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    found = overlap([
        event("kernel", "gemm", 0, 1000), event("kernel", "relu", 500, 1000), event("kernel", "gemm", 4000, 1000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1000, 1000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1800, 1200),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 9000), event("cpu_op", "aten::addmm", 0, 9000),
    ])  # fmt: skip
    assert (found.kernels_ms, found.copies_ms, found.both_ms) == (2.5, 2.0, 0.5)
    assert found.share == 0.25


def results() -> dict[str, object]:
    every = {"needs_gpu": [], "seconds": 1.0}
    checks = [
        {
            "name": "memory",
            "status": "passed",
            "text": "30 steps",
            "figures": {"samples/s": 1234567.0},
            **every,
        },
        {"name": "nccl", "status": "failed", "text": "a | b", "figures": {}, **every},
    ]
    machine = {
        "device": "cuda", "gpu": "A GPU", "gpu_memory_gb": 80, "compute_capability": "9.0", "cuda": "13.0",
        "torch": "2.11.0", "python": "3.12.3", "kernel": "6.18",
    }  # fmt: skip
    return {
        "when": "2026-01-02 03:04 UTC", "commit": "0123456789abcdef+changes", "machine": machine,
        "checks": checks,
    }  # fmt: skip


def test_the_page_has_the_results_where_there_are_some_and_says_where_there_are_none(tmp_path: Path) -> None:
    copy = tmp_path / "gpu.md"
    copy.write_text((REPOSITORY / "docs" / "gpu.md").read_text())
    page.refresh(copy, results())
    text = copy.read_text()
    assert (
        "commit `0123456789ab+changes`: A GPU (80 GB, compute capability 9.0), CUDA 13.0, torch 2.11.0"
        in text
    )
    assert "| `memory` | passed | 30 steps | samples/s: 1.235e+06 |" in text
    assert "| `nccl` | **failed** | a / b |  |" in text
    page.refresh(copy, None)
    assert page.NEVER in copy.read_text()


def test_the_page_is_written_from_the_results_of_the_repository(tmp_path: Path) -> None:
    original = (REPOSITORY / "docs" / "gpu.md").read_text()
    found = REPOSITORY / "benchmarks" / "results" / "gpu.json"
    copy = tmp_path / "gpu.md"
    copy.write_text(original)
    page.refresh(copy, json.loads(found.read_text()) if found.exists() else None)
    assert copy.read_text() == original


def test_results_of_the_cpu_alone_are_not_taken_for_a_gpus() -> None:
    assert page.runs({**results(), "machine": {"device": "cpu"}}) == page.NEVER
