"""The set-up script: what it finds, what it asks of a package manager, what it leaves in the cache.

The script itself runs, on machines that are folders: an environment with a torch of a few lines, CUDA and NCCL
of one file each, a PATH with an `apt-get` that writes down what it is asked.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "scripts" / "setup.sh"
TOOLS = """
    awk basename bash cat chmod cp cut date dirname env flock grep head id kill ln make mkdir mktemp mv nproc printf
    realpath rm sed seq sha256sum sleep sort tail tee touch tr true uname wc
"""
# Debian's HDF5 has a fixed place, and is there where these tests run or not.
MISSING = r"g\+\+ libopenmpi-dev openmpi-bin( libhdf5-openmpi-dev)? hdf5-tools$"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The variables of a machine with a shell and a Python, and nothing to build with.

    Its apt-get and sudo write what they are asked to `asked`, and refuse.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in TOOLS.split():
        for folder in ("/usr/bin", "/bin"):
            if Path(folder, tool).exists():
                (programs / tool).symlink_to(Path(folder, tool))
                break
    write_program(programs / "python3", f'exec "{sys.executable}" "$@"')
    write_program(
        programs / "apt-get", f'echo "apt-get $*" >> "{tmp_path}/asked"; echo "E: no network"; exit 100'
    )
    write_program(programs / "sudo", f'echo "sudo $*" >> "{tmp_path}/asked"; exit 1')
    return {
        "PATH": str(programs),
        "HOME": str(tmp_path / "home"),
        "VENV": str(tmp_path / "venv"),
        "TMPDIR": str(tmp_path),
    }


def be_user(tmp_path: Path, number: int) -> None:
    (tmp_path / "bin" / "id").unlink(missing_ok=True)
    write_program(tmp_path / "bin" / "id", f"echo {number}")


def set_up(*words: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", SCRIPT, *words], env=variables, capture_output=True, text=True, timeout=60, check=False
    )


def environment(folder: Path, *, cuda: str | None, version: str = "2.13.0") -> Path:
    """An environment with a torch that says it was built with `cuda`. Returns its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    packages = next(folder.glob("lib/python3*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(
        "raise ImportError('libcuda.so.1: not on a login node')\n"
    )
    (packages / "torch" / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    return packages


def cuda_toolkit(folder: Path, *, release: str) -> Path:
    write_program(folder / "bin" / "nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.20"')
    return folder


def nccl(folder: Path, *, library: str = "lib/libnccl.so.2") -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "nccl.h").write_text(
        '#define NCCL_MAJOR 2\n#define NCCL_MINOR 21\n#define NCCL_PATCH 5\n#define NCCL_SUFFIX ""\n'
    )
    (folder / library).parent.mkdir(parents=True, exist_ok=True)
    (folder / library).touch()
    return folder


def hdf5(folder: Path, *, parallel: bool) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "H5public.h").write_text(
        "#define H5_VERS_MAJOR 1\n#define H5_VERS_MINOR 14\n#define H5_VERS_RELEASE 3\n"
    )
    pubconf = "#define H5_HAVE_PARALLEL 1\n" if parallel else "/* #undef H5_HAVE_PARALLEL */\n"
    (folder / "include" / "H5pubconf.h").write_text(pubconf)
    return folder


def planned(name: str, result: subprocess.CompletedProcess[str]) -> str:
    found = re.search(rf"^{name} +(.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    return found[1]


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
    assert f"Python 3.10 to 3.13 is needed, and {tmp_path}/old is Python 3.6.8" in result.stderr


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


# ---------------------------------------------------------------- the cache of built wheels
def with_functions(tmp_path: Path, commands: str) -> list[str]:
    """A shell with the script's functions, a cache in `tmp_path`, and one wheel, `tiny`, to build."""
    prepared = f"""
        source "{SCRIPT}"
        cd "{tmp_path}"
        CACHE={tmp_path}/cache py={sys.executable} record={tmp_path}/record
        export TMPDIR={tmp_path}
        pip() {{ if [[ $1 == install && $* == *build.txt* ]]; then return 0; fi
                 "$py" -m pip --python "{tmp_path}/env" --disable-pip-version-check "$@"; }}
        wheels=(tiny) tiny_key="tiny 1.0 Open MPI v4.1.4"
        {commands}
    """
    return ["/bin/bash", "-c", prepared]


def shell(tmp_path: Path, commands: str) -> subprocess.CompletedProcess[str]:
    words = with_functions(tmp_path, commands)
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("cache/wheels/*") if path.suffix != ".lock")


def tiny_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny-1.0.dist-info/RECORD", "")


def test_failed_build_shows_the_end_of_its_log_and_leaves_no_wheel(tmp_path: Path) -> None:
    result = shell(
        tmp_path,
        'build_tiny() { echo "old line"; touch "$1/half.whl"; echo "no mpi.h"; false; echo "not reached"; }\n'
        "prepare_wheels; echo went on",
    )
    assert result.returncode == 1
    assert "no mpi.h" in result.stderr
    assert "building tiny failed; whole log: " in result.stderr
    assert "not reached" not in result.stderr
    assert "went on" not in result.stdout
    assert cached(tmp_path) == []


def test_build_that_makes_no_wheel_is_a_failure(tmp_path: Path) -> None:
    result = shell(tmp_path, "build_tiny() { true; }; prepare_wheels")
    assert result.returncode == 1
    assert cached(tmp_path) == []


def test_one_failed_build_does_not_throw_the_other_away(tmp_path: Path) -> None:
    result = shell(
        tmp_path,
        'build_tiny() { sleep 1; touch "$1/tiny.whl"; }; build_other() { false; }\n'
        'wheels=(tiny other) other_key="other 2.0"; prepare_wheels',
    )
    assert result.returncode == 1
    assert [name.split("-")[0] for name in cached(tmp_path)] == ["tiny"]


def test_two_set_ups_at_once_build_once(tmp_path: Path) -> None:
    commands = (
        f'build_tiny() {{ echo built >> "{tmp_path}/count"; sleep 1; touch "$1/tiny.whl"; }}; prepare_wheels'
    )
    both = [subprocess.Popen(with_functions(tmp_path, commands)) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert (tmp_path / "count").read_text() == "built\n"
    assert len(cached(tmp_path)) == 1


def test_killed_build_leaves_nothing_that_the_next_one_takes_for_a_wheel(tmp_path: Path) -> None:
    first = subprocess.Popen(
        with_functions(
            tmp_path, f'build_tiny() {{ touch "$1/tiny.whl" "{tmp_path}/begun"; sleep 60; }}; prepare_wheels'
        )
    )
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=30) == 130
    assert cached(tmp_path) == []
    while list(tmp_path.glob("hpctrain-tiny.*")):
        time.sleep(0.02)
    folder = shell(tmp_path, 'wheel_folder tiny "$tiny_key"').stdout
    Path(f"{folder}.partial.1").mkdir()
    result = shell(tmp_path, 'build_tiny() { echo whole > "$1/tiny.whl"; }; prepare_wheels')
    assert result.returncode == 0, result.stderr
    assert [(Path(folder) / "tiny.whl").read_text()] == ["whole\n"]
    assert cached(tmp_path) == [Path(folder).name]
    assert (Path(folder) / "BUILT_AGAINST").read_text() == "tiny 1.0 Open MPI v4.1.4\n"


def test_wheel_is_installed_once_and_a_broken_one_is_thrown_out_of_the_cache(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=60)
    tiny_wheel(tmp_path / "tiny-1.0-py3-none-any.whl")
    build = f'build_tiny() {{ cp "{tmp_path}/tiny-1.0-py3-none-any.whl" "$1"; }}; py="{tmp_path}/env/bin/python"; '
    install = (
        f'pip() {{ echo "pip $1"; "{sys.executable}" -m pip --python "{tmp_path}/env" "$@"; }}; '
        'install_wheel tiny "$tiny_key"'
    )
    result = shell(tmp_path, f"{build} prepare_wheels; {install}; {install}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("pip install") == 1
    assert list((tmp_path / "env").glob("lib/python3*/site-packages/tiny.py"))

    folder = Path(shell(tmp_path, 'wheel_folder tiny "$tiny_key"').stdout)
    (folder / "tiny-1.0-py3-none-any.whl").write_bytes(b"PK cut short")
    (tmp_path / "record" / "tiny").unlink()
    result = shell(tmp_path, f"{build} prepare_wheels; {install}")
    assert result.returncode == 1
    assert "was broken, and is removed" in result.stderr
    assert cached(tmp_path) == []


# ---------------------------------------------------------------- requirements
def written(into: Path, name: str) -> dict[str, str]:
    lines = (into / name).read_text().splitlines()
    return {
        re.split(r"[=<>;]", line)[0].lower().replace("_", "-"): line
        for line in lines
        if "#" not in line and line
    }


def test_site_keeps_what_is_new_enough_and_gets_the_rest_as_pinned(tmp_path: Path) -> None:
    packages = environment(tmp_path / "site", cuda="12.6")
    for name, version in [
        ("torch", "2.4.0+cu126"),
        ("numpy", "1.26.4"),
        ("typer", "0.9.0"),
        ("click", "8.1.7"),
        ("rich", "99.0"),
    ]:
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    words = [tmp_path / "site/bin/python", REPOSITORY / "scripts/setup_requirements.py", "--into", tmp_path]
    told = subprocess.run(
        [*words, "--keep-installed"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "keeping torch 2.4.0+cu126" in told
    wanted, limits = written(tmp_path, "requirements.txt"), written(tmp_path, "constraints.txt")
    assert "torch" not in wanted
    assert "numpy" not in wanted
    assert limits["torch"] == "torch==2.4.0+cu126"
    assert limits["numpy"] == "numpy==1.26.4"
    # Stays if it serves; if another package needs a newer one, then ours and not any.
    assert re.fullmatch(r"click>=8\.1\.7,<=8\.\d\.\d", limits["click"])
    assert limits["rich"] == "rich>=99.0"
    assert "typer" not in limits
    assert re.fullmatch(r"typer==\S+", wanted["typer"])
    assert re.fullmatch(r"mpi4py==\S+", wanted["mpi4py"])

    subprocess.run(words, check=True, timeout=60)
    assert {"torch", "numpy", "typer", "setuptools"} <= set(written(tmp_path, "requirements.txt"))
    assert "click" in written(tmp_path, "constraints.txt")


def test_all_that_the_requirements_bring_along_is_pinned() -> None:
    pinned: set[str] = set()
    for path in (REPOSITORY / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                assert re.match(r"[A-Za-z0-9_-]+==[0-9.]+(; python_version [<>=]+ \"3\.\d+\")?$", line), line
                pinned.add(canonicalize_name(line.split("==")[0]))
    loose: set[str] = set()
    for name in pinned:
        try:
            needed = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue  # for another Python, or only where a wheel is built
        loose |= {
            canonicalize_name(r.name) for r in needed if not r.marker or r.marker.evaluate({"extra": ""})
        }
    # torch pins its CUDA parts itself.
    loose = {name for name in loose if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert loose - pinned == set()


def test_help_of_arguments_is_shown_and_nothing_warns() -> None:
    # typer and click are released apart: some pairs warn, and lose the arguments' help.
    program = "from hpctrain.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", program, "data", "pack", "--help"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Directory of the dataset" in result.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="makes a shared library")
def test_two_mpi_libraries_in_one_process_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "libmpich.so.12"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", other], check=True, timeout=60)
    words = [sys.executable, REPOSITORY / "scripts/setup_requirements.py", "--report"]
    for variables, code in (({}, 0), ({"LD_PRELOAD": str(other)}, 1)):
        result = subprocess.run(
            words, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == code, result.stderr
        assert "torch" in result.stdout
    assert f"different MPIs: {other}" in result.stderr or f", {other}" in result.stderr
