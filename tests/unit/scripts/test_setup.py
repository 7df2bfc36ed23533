"""The set-up script: what it finds, what it asks of a package manager, what it leaves in the cache.

The script itself runs, on machines that are folders: an environment with a torch of a few lines, CUDA and NCCL
of one file each, a PATH with an `apt-get` that writes down what it is asked.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.unit.scripts.setup_machine import (
    MISSING,
    be_user,
    cuda_toolkit,
    environment,
    hdf5,
    nccl,
    planned,
    set_up,
    write_program,
)


# ---------------------------------------------------------------- system packages and sites
def test_site_lists_all_that_is_missing_in_one_message_and_calls_no_package_manager(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    variables = machine | {
        "MPICC": "/site/mpi/bin/mpicc",
        "HDF5_DIR": str(hdf5(tmp_path / "h5", parallel=False)),
    }
    result = set_up(variables=variables)
    assert result.returncode == 1
    assert "no package manager is called, because MPICC is set to /site/mpi/bin/mpicc" in result.stderr
    for thing in (
        "C++17",
        "the MPI compiler wrapper /site/mpi/bin/mpicc",
        "mpirun or srun",
        "built without MPI",
    ):
        assert thing in result.stderr
    assert not (tmp_path / "asked").exists()
    assert not (tmp_path / "venv").exists()


def test_active_environment_counts_as_a_site(tmp_path: Path, machine: dict[str, str]) -> None:
    environment(tmp_path / "site", cuda=None)
    result = set_up(variables=machine | {"VIRTUAL_ENV": str(tmp_path / "site")})
    assert result.returncode == 1
    assert f"the environment {tmp_path}/site is active" in result.stderr
    assert not (tmp_path / "asked").exists()


def test_root_on_plain_debian_asks_apt_for_exactly_what_is_missing(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    be_user(tmp_path, 0)
    result = set_up(variables=machine)
    assert result.returncode == 1
    assert "E: no network" in result.stderr
    assert "apt-get could not install" in result.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].endswith(" update")
    assert re.search(r" install --no-install-recommends " + MISSING, asked[1])


def test_user_without_rights_is_told_what_to_ask_for(tmp_path: Path, machine: dict[str, str]) -> None:
    be_user(tmp_path, 1000)
    result = set_up(variables=machine)
    assert result.returncode == 1
    assert re.search("^Ask for: apt-get install " + MISSING, result.stderr, re.MULTILINE)
    assert "apt-get" not in (tmp_path / "asked").read_text().replace("sudo", "")


def test_nothing_to_build_needs_no_compiler_and_no_hdf5(tmp_path: Path, machine: dict[str, str]) -> None:
    write_program(tmp_path / "bin" / "mpirun", "true")
    result = set_up("--print-plan", variables=machine | {"HPCTRAIN_WITHOUT": "horovod h5py", "MPICC": "none"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert planned("missing", result) == "nothing"
    assert "not built" in planned("horovod", result)
    assert "not parallel" in planned("h5py", result)


def test_unknown_word_in_without_is_refused(machine: dict[str, str]) -> None:
    result = set_up("--print-plan", variables=machine | {"HPCTRAIN_WITHOUT": "horovod hdf5"})
    assert result.returncode == 1
    assert "HPCTRAIN_WITHOUT has 'hdf5'" in result.stderr


def test_python_that_is_too_old_is_refused_by_version(tmp_path: Path, machine: dict[str, str]) -> None:
    write_program(tmp_path / "old", 'case $1 in -V) echo "Python 3.6.8" ;; *) exit 1 ;; esac')
    result = set_up("--print-plan", variables=machine | {"PYTHON": str(tmp_path / "old")})
    assert result.returncode == 1
    assert f"Python 3.10 to 3.14 is needed, and {tmp_path}/old is Python 3.6.8" in result.stderr


def test_plan_takes_the_wrappers_and_hdf5_of_the_site(tmp_path: Path, machine: dict[str, str]) -> None:
    for name in ("mpicc.mpich", "mpicxx.mpich"):
        write_program(tmp_path / "mpi" / "bin" / name, 'echo "gcc -I/usr/include/mpich -lmpich"')
    prefix = hdf5(tmp_path / "h5", parallel=True)
    variables = machine | {"MPICC": str(tmp_path / "mpi/bin/mpicc.mpich"), "HDF5_DIR": str(prefix)}
    result = set_up("--print-plan", variables=variables)
    assert planned("mpi", result) == (
        f"{tmp_path}/mpi/bin/mpicc.mpich (mpich), C++: {tmp_path}/mpi/bin/mpicxx.mpich"
    )
    assert planned("hdf5", result) == f"1.14.3 in {prefix}"


# ---------------------------------------------------------------- CUDA and NCCL
def test_torch_without_cuda_means_no_nccl(tmp_path: Path, machine: dict[str, str]) -> None:
    environment(tmp_path / "site", cuda=None, version="2.13.0+cpu")
    variables = machine | {
        "VIRTUAL_ENV": str(tmp_path / "site"),
        "CUDA_HOME": str(cuda_toolkit(tmp_path / "cuda", release="12.6")),
        "NCCL_HOME": str(nccl(tmp_path / "nccl")),
    }
    result = set_up("--print-plan", variables=variables)
    assert planned("horovod", result).endswith("without NCCL: torch 2.13.0+cpu has no CUDA")
    assert planned("torch", result) == "2.13.0+cpu, CUDA cpu, kept"


@pytest.mark.parametrize(
    "library", ["lib/libnccl.so.2", "lib64/libnccl.so", f"lib/{os.uname().machine}-linux-gnu/libnccl.so"]
)
@pytest.mark.parametrize("names", [("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME"), ("CUDA_HOME", "NCCL_HOME")])
def test_cuda_and_nccl_named_by_variables_are_used(
    tmp_path: Path, machine: dict[str, str], names: tuple[str, str], library: str
) -> None:
    environment(tmp_path / "site", cuda="12.6")
    variables = machine | {
        "VIRTUAL_ENV": str(tmp_path / "site"),
        names[0]: str(cuda_toolkit(tmp_path / "cuda", release="12.4")),
        names[1]: str(nccl(tmp_path / "nccl", library=library)),
    }
    result = set_up("--print-plan", variables=variables)
    assert planned("horovod", result) == (
        f"0.28.1 with MPI and NCCL 2.21.5 ({tmp_path}/nccl/{library}), CUDA 12.4 ({tmp_path}/cuda)"
    )


def test_nccl_that_torch_brought_is_found_and_nvcc_on_the_path(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    packages = environment(tmp_path / "site", cuda="12.6")
    own = nccl(packages / "nvidia" / "nccl")
    cuda_toolkit(tmp_path / "cuda", release="12.6")
    (tmp_path / "bin" / "nvcc").symlink_to(tmp_path / "cuda" / "bin" / "nvcc")
    result = set_up("--print-plan", variables=machine | {"VIRTUAL_ENV": str(tmp_path / "site")})
    assert f"NCCL 2.21.5 ({own}/lib/libnccl.so.2), CUDA 12.6 ({tmp_path}/cuda)" in planned("horovod", result)


def test_cuda_of_another_major_version_is_not_used_and_the_reason_given(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    environment(tmp_path / "site", cuda="13.0")
    toolkit = cuda_toolkit(tmp_path / "cuda", release="12.6")
    variables = machine | {"VIRTUAL_ENV": str(tmp_path / "site"), "NCCL_HOME": str(nccl(tmp_path / "nccl"))}
    result = set_up("--print-plan", variables=variables | {"CUDA_HOME": str(toolkit)})
    assert "without NCCL: torch has CUDA 13.0, but" in planned("horovod", result)
    # Asked for by name, it is an error.
    result = set_up("--print-plan", variables=variables | {"HOROVOD_CUDA_HOME": str(toolkit)})
    assert result.returncode == 1
    assert "has 12.6: set HOROVOD_CUDA_HOME to a CUDA 13" in result.stderr


def test_nccl_home_without_nccl_is_an_error(tmp_path: Path, machine: dict[str, str]) -> None:
    environment(tmp_path / "site", cuda="12.6")
    variables = machine | {
        "VIRTUAL_ENV": str(tmp_path / "site"),
        "CUDA_HOME": str(cuda_toolkit(tmp_path / "cuda", release="12.6")),
        "HOROVOD_NCCL_HOME": str(tmp_path / "nowhere"),
    }
    result = set_up("--print-plan", variables=variables)
    assert result.returncode == 1
    assert f"HOROVOD_NCCL_HOME is {tmp_path}/nowhere, and there is no include/nccl.h" in result.stderr
