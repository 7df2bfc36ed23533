"""An environment that is packed, unpacked by tar at another place, and used there after the first one has gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.environment_archive import PythonPlaces, describe_use, pack_environment

LIBRARY = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def places(tmp_path: Path) -> PythonPlaces:
    """A virtual environment with a package and a command of its own."""
    prefix = tmp_path / "shared" / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True, timeout=300)
    package = prefix / LIBRARY / "site-packages" / "greeting"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\ndef main():\n    print(__file__, *sys.argv[1:])\n")
    command = prefix / "bin" / "greet"
    command.write_text(f"#!{prefix}/bin/python\nimport greeting\ngreeting.main()\n")
    command.chmod(0o755)
    subprocess.run(
        [prefix / "bin" / "python", "-m", "compileall", "-q", str(package)], check=True, timeout=300
    )
    return PythonPlaces(prefix=prefix, base=Path(sys.base_prefix), library=LIBRARY)


def unpacked(archive: Path, place: Path) -> Path:
    place.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(place)], check=True, timeout=300)
    return place / "environment"


@pytest.mark.parametrize("with_python", [False, True])
def test_an_unpacked_environment_runs_without_the_one_it_was_made_from(
    places: PythonPlaces, tmp_path: Path, with_python: bool
) -> None:
    archive = tmp_path / "environment.tar"
    packed = pack_environment(archive, places=places, with_python=with_python)
    assert packed.with_python is with_python
    assert packed.editable == ()
    places.prefix.rename(places.prefix.with_name("gone"))
    environment = unpacked(archive, tmp_path / "node")
    done = subprocess.run(
        [environment / "bin" / "greet", "a b", "c"], capture_output=True, text=True, check=True, timeout=300
    )
    file, *words = done.stdout.split()
    # Resolved: Debian's own Python finds its packages through a link.
    assert Path(file).resolve() == environment / LIBRARY / "site-packages" / "greeting" / "__init__.py"
    assert words == ["a", "b", "c"]
    library = subprocess.run(
        [environment / "bin" / "python", "-c", "import os, greeting; print(os.__file__, greeting.__cached__)"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    standard, compiled = library.stdout.split()
    assert Path(standard).is_relative_to(environment) is with_python
    packages = (environment / LIBRARY / "site-packages").iterdir()
    assert {path.name for path in packages} == {"greeting"}  # not what is installed beside the environment
    assert Path(compiled).is_relative_to(environment)
    assert Path(compiled).stat().st_mtime_ns < (tmp_path / "node").stat().st_mtime_ns + 10**9


def test_packages_that_are_links_to_their_source_are_named(places: PythonPlaces, tmp_path: Path) -> None:
    info = places.prefix / LIBRARY / "site-packages" / "mine-1.0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    assert pack_environment(tmp_path / "e.tar", places=places).editable == ("mine",)


def test_what_is_no_environment_or_cannot_be_written_is_an_error_and_leaves_nothing(
    places: PythonPlaces, tmp_path: Path
) -> None:
    nowhere = PythonPlaces(prefix=tmp_path, base=tmp_path, library=LIBRARY)
    with pytest.raises(LaunchError, match="is not a Python environment"):
        pack_environment(tmp_path / "e.tar", places=nowhere)
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot pack"):
        pack_environment(tmp_path / "file" / "e.tar", places=places)
    assert not list(tmp_path.glob("*.tar*"))
    assert not list(tmp_path.glob(".*"))


def test_the_lines_for_a_batch_script_are_valid_shell() -> None:
    lines = describe_use(Path("/shared/my environment.tar"))
    subprocess.run(["bash", "-n"], input=lines, text=True, check=True, timeout=300)
    assert "'/shared/my environment.tar'" in lines


def test_the_lines_for_a_batch_script_unpack_it_once_per_node(places: PythonPlaces, tmp_path: Path) -> None:
    """With a stand-in for srun that shows its options and runs the command on this machine."""
    archive = tmp_path / "an environment.tar"
    pack_environment(archive, places=places)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do echo "$1"; shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    environ = {
        **os.environ, "PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_TMPDIR": str(tmp_path / "node"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", describe_use(archive) + "command -v greet\n"], env=environ, capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    *options, found = done.stdout.split()
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1"} <= set(options)
    assert found == str(tmp_path / "node" / "hpctrain-7" / "environment" / "bin" / "greet")
