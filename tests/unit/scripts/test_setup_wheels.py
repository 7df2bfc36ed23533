"""The cache of built wheels, and the requirements that pip is given."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, requires, version as version_of
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.scripts.setup_machine import REPOSITORY, SCRIPT, environment


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
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


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


def test_without_horovod_the_set_up_continues_and_says_what_the_compiler_said(tmp_path: Path) -> None:
    result = shell(
        tmp_path,
        'build_horovod() { echo "a.h:3:1: error: no member named x"; seq 100; false; }\n'
        'build_h5py() { touch "$1/h.whl"; }\n'
        'wheels=(horovod h5py) horovod_key="h 1" h5py_key="h5 1"; prepare_wheels; echo "left: ${wheels[*]}"',
    )
    assert result.returncode == 0, result.stderr
    assert "a.h:3:1: error: no member named x" in result.stderr
    assert "HPCTRAIN_WITHOUT=horovod make setup" in result.stderr
    assert result.stdout.endswith("left: h5py\n")


def test_two_set_ups_at_once_build_once(tmp_path: Path) -> None:
    commands = (
        f'build_tiny() {{ echo built >> "{tmp_path}/count"; sleep 1; touch "$1/tiny.whl"; }}; prepare_wheels'
    )
    both = [subprocess.Popen(with_functions(tmp_path, commands)) for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
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
    assert first.wait(timeout=300) == 130
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
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=300)
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
        ("torch", "2.9.0+cu126"),
        ("numpy", "1.26.4"),
        ("typer", "0.9.0"),
        ("click", "8.1.7"),
        ("rich", "99.0"),
    ]:
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    words = [tmp_path / "site/bin/python", REPOSITORY / "scripts/setup_requirements.py", "--into", tmp_path]
    reported = subprocess.run(
        [*words, "--keep-installed"], check=True, capture_output=True, text=True, timeout=300
    ).stdout
    assert "keeping torch 2.9.0+cu126" in reported
    wanted, limits = written(tmp_path, "requirements.txt"), written(tmp_path, "constraints.txt")
    assert "torch" not in wanted
    assert "numpy" not in wanted
    assert limits["torch"] == "torch==2.9.0+cu126"
    assert limits["numpy"] == "numpy==1.26.4"
    # Stays if it serves; if another package needs a newer one, then ours and not any.
    assert re.fullmatch(r"click>=8\.1\.7,<=8\.\d\.\d", limits["click"])
    assert limits["rich"] == "rich>=99.0"
    assert "typer" not in limits
    assert re.fullmatch(r"typer==\S+", wanted["typer"])
    assert re.fullmatch(r"mpi4py==\S+", wanted["mpi4py"])

    subprocess.run(words, check=True, timeout=300)
    assert {"torch", "numpy", "typer", "setuptools"} <= set(written(tmp_path, "requirements.txt"))
    assert "click" in written(tmp_path, "constraints.txt")


def test_all_that_the_requirements_bring_along_is_pinned() -> None:
    pinned: dict[str, set[str]] = defaultdict(set)
    for path in (REPOSITORY / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                pattern = r"[A-Za-z0-9_-]+==[0-9.]+(b\d+)?(; python_version [<>=]+ \"3\.\d+\")?$"
                assert re.match(pattern, line), line
                name, _, pin = line.partition("==")
                pinned[canonicalize_name(name)].add(pin.partition(";")[0])
    loose: set[str] = set()
    for name in pinned:
        try:
            if version_of(name).partition("+")[0] not in pinned[name]:
                continue  # another release than the pinned one: `make newest`
            needed = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue  # for another Python, or only where a wheel is built
        loose |= {
            canonicalize_name(r.name) for r in needed if not r.marker or r.marker.evaluate({"extra": ""})
        }
    # torch pins its CUDA parts itself.
    loose = {name for name in loose if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert loose - {*pinned} == set()


def test_help_of_arguments_is_shown_and_nothing_warns() -> None:
    # typer and click are released apart: some pairs warn, and lose the arguments' help.
    program = "from hpctrain.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", program, "data", "pack", "--help"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Directory of the dataset" in result.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="makes a shared library")
def test_two_mpi_libraries_in_one_process_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "libmpich.so.12"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", other], check=True, timeout=300)
    words = [sys.executable, REPOSITORY / "scripts/setup_requirements.py", "--report"]
    for variables, code in (({}, 0), ({"LD_PRELOAD": str(other)}, 1)):
        result = subprocess.run(
            words, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == code, result.stderr
        assert "torch" in result.stdout
    assert f"different MPIs: {other}" in result.stderr or f", {other}" in result.stderr
