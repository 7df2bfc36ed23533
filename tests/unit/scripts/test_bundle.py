"""The archive for a cluster without network: what is refused and with which words, and what pip is left to see.

The archives are made and read by the scripts themselves; in place of the gigabyte of packages they hold one of a few
lines. `make trials-bundle` makes a whole one and sets up from it in a network namespace.
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pack_bundle
import pytest
import setup_bundle
from packing import Target
from setup_requirements import name_of

from tests.unit.scripts.setup_machine import REPOSITORY, SCRIPT, planned, set_up, write_program

RUNNING = "{}.{}".format(*sys.version_info)


def write_wheel(directory: Path, name: str, *needs: str) -> Path:
    path = directory / f"{name}-1.0-py3-none-any.whl"
    directory.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + "".join(
        f"Requires-Dist: {n}\n" for n in needs
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def make_bundle(directory: Path, **changes: Any) -> Path:
    """An archive with the wheel `tiny`, a source and a tree of one file each; its manifest says `changes` instead."""
    root = directory / "root"
    write_wheel(root / "wheels", "tiny")
    for name in ("sources/other-1.0.tar.gz", "tree/README.md"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(random.Random(name).randbytes(3000))
    manifest = pack_bundle.describe(root, target=Target(python=RUNNING), tests=True) | {"torch": "2.13.0+cpu"}
    pack_bundle.write_archive(root, manifest | changes, archive=directory / "bundle.tar")
    return directory / "bundle.tar"


def looked_at(bundle: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, REPOSITORY / "scripts" / "setup_bundle.py", bundle, *options]
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=300, check=False)


def shell(
    tmp_path: Path, commands: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs commands with the functions of setup.sh."""
    text = f'source "{SCRIPT}"; cd "{REPOSITORY}"; py="{sys.executable}" base_python="{sys.executable}"\n{commands}'
    kept = {
        name: text
        for name, text in os.environ.items()
        if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "BUNDLE")
    }
    environment = kept | {"TMPDIR": str(tmp_path), "VENV": str(tmp_path / "venv")} | (variables or {})
    return subprocess.run(
        ["/bin/bash", "-c", text], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


# ---------------------------------------------------------------- what fits
def test_bundle_that_fits_comes_out_whole_and_its_folder_serves_as_well(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    described = looked_at(bundle)
    assert described.returncode == 0, described.stderr
    assert f"torch 2.13.0+cpu, Python {RUNNING}, {os.uname().machine}" in described.stdout
    (tmp_path / "into").mkdir()
    done = looked_at(bundle, "--unpack-into", tmp_path / "into")
    assert done.returncode == 0, done.stderr
    into, root = tmp_path / "into", tmp_path / "root"
    assert done.stdout.splitlines() == [
        f"{(into / 'wheels').as_uri()} {(into / 'sources').as_uri()}",
        "2.13.0+cpu",
        "tests",
    ]
    files = {path.relative_to(into): path.read_bytes() for path in into.rglob("*") if path.is_file()}
    assert files == {path: (root / path).read_bytes() for path in files}
    assert sorted(map(str, files)) == ["sources/other-1.0.tar.gz", "wheels/tiny-1.0-py3-none-any.whl"]

    done = looked_at(root, "--unpack-into", tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == (root / "wheels").as_uri()
    (root / "sources" / "other-1.0.tar.gz").write_bytes(b"")
    done = looked_at(root, "--unpack-into", tmp_path / "venv")
    assert done.returncode == 1
    assert "damaged (SHA-256 differs): sources/other-1.0.tar.gz" in done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.9"}, ["it is for Python 3.9, and ", f" is {RUNNING}: set PYTHON", f"PYTHON_VERSION={RUNNING}"]),
        ({"machine": "riscv64"}, [f"it is for riscv64, and this is {os.uname().machine}"]),
        ({"glibc": 99}, ["its wheels need glibc 2.99 or newer, and this is glibc 2.", "make it with GLIBC="]),
        ({"torch": None}, ["it has no torch, and ", "load the site's module of torch"]),
        ({"requirements": []}, ["this checkout asks for ", "which it does not have: use the tree in the bundle"]),
        ({"format": 2}, ["has format 2, and this checkout reads 1"]),
        ({"files": {"wheels/../../up": {"bytes": 1, "sha256": ""}}}, ["damaged MANIFEST.json", "wheels/../../up"]),
        ({"files": 3}, ["damaged MANIFEST.json", "make it anew"]),
    ],
)  # fmt: skip
def test_bundle_for_something_else_is_refused_with_what_was_found_and_what_to_do(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    done = looked_at(make_bundle(tmp_path, **changes))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"setup: the bundle {tmp_path}/bundle.tar ")
    for word in words:
        assert word in done.stderr


def test_torch_of_the_site_takes_the_place_of_one_in_the_bundle(tmp_path: Path) -> None:
    done = looked_at(make_bundle(tmp_path, torch=None), "--torch-found", "2.4.0+cu126")
    assert done.returncode == 0, done.stderr
    assert "torch of the site" in done.stdout


# ---------------------------------------------------------------- damage
def test_every_changed_byte_and_every_cut_is_found(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    whole = bundle.read_bytes()
    (tmp_path / "into").mkdir()
    with tarfile.open(bundle) as archive:
        used = {
            m.name: (m.offset_data, m.size) for m in archive if "/wheels/" in m.name or "/sources/" in m.name
        }
    end = max(start + size for start, size in used.values())
    for name, (start, size) in used.items():
        if size:
            changed = bytearray(whole)
            changed[start + size // 2] ^= 1
            bundle.write_bytes(changed)
            with pytest.raises(setup_bundle.BundleError, match=Path(name).name):
                setup_bundle.unpack(setup_bundle.read(bundle), tmp_path / "into")
    for length in range(0, end, 97):
        bundle.write_bytes(whole[:length])
        with pytest.raises((setup_bundle.BundleError, tarfile.TarError)):
            setup_bundle.unpack(setup_bundle.read(bundle), tmp_path / "into")
    bundle.write_bytes(whole[: end - 2000])
    done = looked_at(bundle, "--unpack-into", tmp_path / "into")
    assert done.returncode == 1
    assert (
        f"bundle.tar is no whole archive (unexpected end of data; {end - 2000:,} bytes). Copy it here again"
        in done.stderr
    )


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.tar"
    with tarfile.open(other, "w") as archive:
        archive.addfile(tarfile.TarInfo("hpctrain-bundle/wheels/x.whl"), io.BytesIO())
    (tmp_path / "text").write_text("not an archive\n")
    for path in (other, tmp_path, tmp_path / "text"):
        done = looked_at(path)
        assert done.returncode == 1
        assert "Copy it here again, or make it anew with `make bundle`" in done.stderr
        assert "Traceback" not in done.stderr


def test_archive_that_does_not_fit_on_the_disk_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    many = {"wheels/large.whl": {"bytes": 1 << 60, "sha256": "0"}}
    (tmp_path / "into").mkdir()
    done = looked_at(make_bundle(tmp_path, files=many), "--unpack-into", tmp_path / "into")
    assert done.returncode == 1
    assert "MB are free there: set TMPDIR to a larger place" in done.stderr


# ---------------------------------------------------------------- setup.sh
def test_set_up_from_a_bundle_lists_what_the_site_lacks_and_calls_no_package_manager(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    bundle = make_bundle(tmp_path)
    variables = machine | {"BUNDLE": str(bundle), "HDF5_DIR": str(tmp_path / "h5")}
    plan = set_up("--print-plan", variables=variables)
    assert plan.returncode == 1  # as something is missing
    assert planned("mode", plan) == f"site, because BUNDLE is set to {bundle}: no package manager is called"
    assert planned("bundle", plan).startswith(f"{bundle}: hpctrain ")
    result = set_up(variables=variables)
    assert result.returncode == 1
    assert f"no package manager is called, because BUNDLE is set to {bundle}" in result.stderr
    for thing in (
        "C++17",
        "the MPI compiler wrapper mpicc: load the site's MPI module",
        f"HDF5_DIR is {tmp_path}/h5",
    ):
        assert thing in result.stderr
    assert not (tmp_path / "asked").exists()
    assert not (tmp_path / "venv").exists()


def test_python_of_the_bundle_is_looked_for_first(tmp_path: Path, machine: dict[str, str]) -> None:
    variables = machine | {"BUNDLE": str(make_bundle(tmp_path, python="3.12"))}
    write_program(tmp_path / "bin" / "python3.12", f'exec "{sys.executable}" "$@"')
    done = shell(
        tmp_path, 'find_settings; find_mode; find_bundle; find_python; echo "$base_python"', variables
    )
    assert done.stdout.strip() == str(tmp_path / "bin" / "python3.12"), done.stderr


def test_bundle_that_is_not_there_is_refused_before_anything_else(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    result = set_up(variables=machine | {"BUNDLE": str(tmp_path / "nowhere.tar")})
    assert result.returncode == 1
    assert (
        f"BUNDLE is {tmp_path}/nowhere.tar, and there is no such file here: make it with `make bundle`"
        in result.stderr
    )


def test_pip_sees_the_bundle_alone_whatever_the_machine_is_configured_with(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    write_wheel(tmp_path / "elsewhere", "stray")
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nfind-links = {tmp_path / 'elsewhere'}\n")
    variables = {
        "BUNDLE": str(bundle), "PIP_CONFIG_FILE": str(config), "PIP_FIND_LINKS": str(tmp_path / "elsewhere"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONSTRAINT": str(tmp_path / "none.txt"),
    }  # fmt: skip
    opened = "find_settings; find_mode; find_bundle; torch_version=; check_bundle; open_bundle"
    download = f'pip download -q -d "{tmp_path}/got"'
    done = shell(tmp_path, f"{opened}; {download} tiny && ! {download} stray", variables)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["tiny-1.0-py3-none-any.whl"]
    assert "No matching distribution found for stray" in done.stderr
    assert not list(tmp_path.glob("hpctrain-bundle.*"))  # what was unpacked
    # Without a bundle pip keeps its settings.
    done = shell(
        tmp_path, f"BUNDLE=; {opened}; {download} --no-index stray", variables | {"PIP_CONSTRAINT": ""}
    )
    assert done.returncode == 0, done.stderr


def test_environment_remembers_its_bundle_until_told_otherwise(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    flow = 'find_settings; find_mode; find_bundle; echo "$bundle $bundle_id"; torch_version=; check_bundle; open_bundle'
    first = shell(tmp_path, flow, {"BUNDLE": str(bundle)}).stdout.splitlines()[0]
    identity = first.split()[1]
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "hpctrain-bundle").write_text(f"{bundle}\n{identity}\n")
    assert shell(tmp_path, flow).stdout.splitlines()[0] == first
    assert shell(tmp_path, flow, {"BUNDLE": ""}).stdout.strip() == ""
    bundle.unlink()
    done = shell(tmp_path, flow)
    # The same identity: what is set up already needs no bundle.
    assert done.stdout.split() == [identity]
    assert done.returncode == 1
    assert f"set up from the bundle {bundle}, and that is no longer there: set BUNDLE" in done.stderr


# ---------------------------------------------------------------- packing
def test_dependencies_are_those_on_the_python_of_the_cluster(tmp_path: Path) -> None:
    write_wheel(tmp_path, "tiny", 'tomli>=2; python_version < "3.11"', "Other_Name", 'docs; extra == "docs"')
    assert pack_bundle.missing(tmp_path, python="3.10") == {"tomli", "other-name"}
    assert pack_bundle.missing(tmp_path, python="3.12") == {"other-name"}
    write_wheel(tmp_path, "other_name")
    assert pack_bundle.missing(tmp_path, python="3.12") == set()
    # What an extra needs is needed where the extra is asked for.
    write_wheel(tmp_path, "third", "tiny[docs]")
    assert pack_bundle.missing(tmp_path, python="3.12") == {"docs"}


def test_wheels_may_be_for_an_older_c_library_than_this_one() -> None:
    options = Target(python="3.12", glibc=28, machine="x86_64").pip_options
    assert "--python-version=3.12" in options
    assert "--platform=manylinux_2_28_x86_64" in options
    assert "--platform=manylinux_2_29_x86_64" not in options


def test_all_that_set_up_installs_is_pinned_for_every_python() -> None:
    for minor in (10, 11, 12, 13):
        known = Target(python=f"3.{minor}").pinned()
        asked = setup_bundle.asked_versions(tests=True, minor=minor)
        assert {name_of(line): line.split("==")[1] for line in asked}.items() <= known.items()
        assert {"horovod", "h5py", "hdf5plugin", "mpi4py", "cmake"} <= known.keys()
        assert ("tomli" in known) == (minor < 11)


@pytest.mark.parametrize("words", [["--python-version", "3.9"], ["--glibc", "two"]])
def test_packing_for_what_is_not_supported_is_refused(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "pack_bundle.py", *words],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"argument {words[0]}" in done.stderr


def test_failed_download_shows_what_pip_said(tmp_path: Path) -> None:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "pack_bundle.py", "--output", tmp_path],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pack_bundle: pip cannot get what is needed:" in done.stderr
    assert "No matching distribution found for setuptools==" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_source_is_built_with_the_tools_that_were_downloaded_also_below_a_relative_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "tool_of_the_build.py").write_text("NAME = 'needs-a-tool'\n")
    setup = "import setuptools, tool_of_the_build as tool\nsetuptools.setup(name=tool.NAME, version='1.0')\n"
    with tarfile.open(tmp_path / "needs_a_tool-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("needs_a_tool-1.0/setup.py")
        entry.size = len(setup)
        archive.addfile(entry, io.BytesIO(setup.encode()))
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(tmp_path)),
        ("PIP_CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pack_bundle, "SOURCES", ("needs-a-tool",))
    monkeypatch.setattr(pack_bundle, "built_here", lambda: {"needs-a-tool": "1.0"})
    pack_bundle.get_sources(Path("sources"), tools=Path("tools"))
    assert [path.name for path in (tmp_path / "sources").iterdir()] == ["needs_a_tool-1.0.tar.gz"]
