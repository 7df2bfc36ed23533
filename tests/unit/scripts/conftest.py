"""A PATH with the programs of a plain Debian, each of which only says what it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.scripts.setup_machine import write_program

TOOLS = """
    awk basename bash cat chmod cp cut date dirname env flock grep head id kill ln make mkdir mktemp mv nproc printf
    realpath rm sed seq sha256sum sleep sort tail tar tee touch tr true uname wc
"""


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
