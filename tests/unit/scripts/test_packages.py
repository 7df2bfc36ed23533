"""The wheel and the sdist, each installed into an empty environment outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.ranks_launcher import REPOSITORY, rank_environment

pytestmark = pytest.mark.launches

RECIPE = """
[run]
directory = "run"
backend = "serial"
steps = 20
[task]
target = "hpctrain.tasks.digits:Digits"
[data]
train = "digits/train"
global_batch = 32
"""


def run(argv: list[str | Path], *, cwd: Path, **environment: str) -> str:
    environ = {name: text for name, text in rank_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in argv], cwd=cwd, env={**environ, **environment}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist of a clean copy of the tracked files."""
    where = tmp_path_factory.mktemp("packages")
    copy = where / "copy"
    names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY)
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file() and name.startswith(
            ("hpctrain/", "setup.py", "pyproject", "README")
        ):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    for extra in ("LICENSE", "MANIFEST.in"):
        (copy / extra).write_bytes((REPOSITORY / extra).read_bytes())
    run([sys.executable, "setup.py", "-q", "sdist", "-d", where / "out"], cwd=copy)
    run([sys.executable, "setup.py", "-q", "bdist_wheel", "-d", where / "out"], cwd=copy)
    (sdist,), (wheel,) = (where / "out").glob("*.tar.gz"), (where / "out").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def test_the_wheel_holds_every_module_stub_and_library(built: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    for path in (REPOSITORY / "hpctrain").rglob("*.py*"):
        if path.suffix in (".py", ".pyi"):
            assert path.relative_to(REPOSITORY).as_posix() in names
    for library in (
        "reduce/shared_memory/_add", "launch/_yield_by_sleep", "comm/watchdog/_gil_free_timer",
        "comm/backends/mpi_process/_exit_status", "resilience/_second_signal",
    ):  # fmt: skip
        assert any(name.startswith(f"hpctrain/{library}.") and name.endswith(".so") for name in names), (
            library
        )
    assert "hpctrain/py.typed" in names


def test_an_installed_package_trains(built: dict[str, Path], tmp_path: Path) -> None:
    """The sdist, of which pip makes a wheel; then the wheel of the checkout, which has the same files, in its place."""
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", environment], cwd=tmp_path)
    python = environment / "bin" / "python"
    site = Path(
        run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=tmp_path).strip()
    )
    # What hpctrain needs, from this environment; its own entry in there, a hook of an editable install, is not read.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    contents = []
    for kind in ("sdist", "wheel"):
        run(
            [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation",
             "--no-index", "--force-reinstall", built[kind]],
            cwd=tmp_path,
        )  # fmt: skip
        package = site / "hpctrain"
        files = [path for path in package.rglob("*") if path.suffix in (".py", ".pyi", ".typed", ".c")]
        libraries = {path.relative_to(package): b"" for path in package.rglob("*.so")}
        contents.append({**{path.relative_to(package): path.read_bytes() for path in files}, **libraries})
    assert contents[0] == contents[1]
    where = run([python, "-c", "import hpctrain; print(hpctrain.__file__)"], cwd=tmp_path).strip()
    assert Path(where).is_relative_to(environment)
    hpctrain = environment / "bin" / "hpctrain"
    run([hpctrain, "doctor"], cwd=tmp_path)
    run([hpctrain, "data", "pack", "digits", "digits"], cwd=tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    reported = run(
        [hpctrain, "train", "recipe.toml"], cwd=tmp_path, PATH=f"{hpctrain.parent}:{os.environ['PATH']}"
    )
    assert "step 20/20" in reported
