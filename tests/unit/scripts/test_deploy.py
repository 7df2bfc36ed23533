"""The files for Apptainer and Spack: that parsers read them, and that they agree with the set-up.

What they build is not tested: neither program is here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from spython.main.parse.parsers import get_parser

from tests.unit.scripts.setup_machine import REPOSITORY

DEPLOY = REPOSITORY / "deploy"


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The definition as the Singularity Python client reads it."""
    (read,) = get_parser("singularity")(str(DEPLOY / "hpctrain.def")).recipe.values()
    return read


def test_the_definition_puts_the_bundle_where_its_commands_look_for_it(recipe: Any) -> None:
    assert recipe.fromHeader == "debian:12"
    (copied,) = recipe.files
    source, target = copied.split()
    assert source == "build/hpctrain-bundle.tar"
    commands = "\n".join(recipe.install)
    assert f"make -C hpctrain setup BUNDLE={target}" in commands
    assert recipe.cmd == 'exec hpctrain "$@"'


def test_shellcheck_has_nothing_against_the_commands_of_the_definition(recipe: Any) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck on the PATH")
    # What spython adds writes the section of tests into a file.
    commands = [line for line in recipe.install if "/tests.sh" not in line]
    text = "\n".join(["#!/bin/sh", *commands, ""])
    done = subprocess.run(
        [program, "-"], input=text, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_packages_of_the_definition_are_those_that_set_up_would_install(recipe: Any) -> None:
    commands = "\n".join(recipe.install).replace("\\\n", " ")
    (installed,) = re.findall(r"--no-install-recommends (.*)", commands)
    finder = (REPOSITORY / "scripts" / "setup_find.sh").read_text()
    wanted = {name for name in re.findall(r'\bmissing ([a-z][\w+-]*) "', finder) if "mpich" not in name}
    assert {"g++", "python3-venv", "libhdf5-openmpi-dev"} <= wanted
    assert wanted <= set(installed.split())


def test_the_environment_of_spack_has_what_set_up_takes_from_the_site() -> None:
    environment = yaml.safe_load((DEPLOY / "spack.yaml").read_text())["spack"]
    specs = {re.split(r"[@ ]", spec)[0]: spec for spec in environment["specs"]}
    assert {"python", "openmpi", "hdf5", "gmake"} == specs.keys()
    assert re.fullmatch(r"python@3\.1[0-3]", specs["python"])
    assert "+mpi" in specs["hdf5"]
    assert environment["packages"]["mpi"]["require"] == "openmpi"
