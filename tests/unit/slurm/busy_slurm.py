"""Slurm's commands as small programs on a PATH, which answer as slurmctld does when it is busy, slow or refuses.

They are for what a real controller cannot be made to do at will. What a real one does is tested in tests/cluster.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.launch import SlurmController

# $folder/NAME.answers has one line for each call: EXIT_CODE STREAM TEXT; the last one is repeated.
_PROGRAM = """#!/bin/bash
name=$(basename "$0")
printf '%s\\n' "$*" >> {folder}/$name.calls
number=$(wc -l < {folder}/$name.calls)
line=$(sed -n "${{number}}p" {folder}/$name.answers)
[[ $line ]] || line=$(tail -n 1 {folder}/$name.answers)
read -r code stream text <<< "$line"
[[ $stream == sleep ]] && {{ sleep "$text"; exit; }}
if [[ $stream == out ]]; then printf '%b\\n' "$text"; else printf '%b\\n' "$text" >&2; fi
exit "$code"
"""


class FakeSlurm:
    """Programs in `folder`, and a controller that uses them and waits for a moment only."""

    def __init__(self, folder: Path, *, timeout_s: float = 300.0) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.controller = SlurmController(
            waits_s=(0.01, 0.01, 0.01),
            timeout_s=timeout_s,
            environ={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
            say=self.said.append,
        )

    def answers(self, program: str, *lines: str) -> None:
        """Each line: exit code, `out`, `err` or `sleep`, text."""
        (self.folder / f"{program}.answers").write_text("\n".join(lines) + "\n")
        path = self.folder / program
        path.write_text(_PROGRAM.format(folder=self.folder))
        path.chmod(0o755)

    def calls(self, program: str) -> list[str]:
        """The arguments of each call so far."""
        path = self.folder / f"{program}.calls"
        return path.read_text().splitlines() if path.exists() else []
