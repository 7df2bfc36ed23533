"""Starts the ranks of a measurement and returns what rank 0 found."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.ranks_launcher import start_command


class RanksFailed(RuntimeError):
    """The ranks of a measurement ended with an error."""


def measured(
    case: str,
    settings: Mapping[str, Any],
    *,
    num_ranks: int,
    scratch: Path,
    timeout_s: float = 300.0,
) -> Any:
    """Starts ranks with `hpctrain launch` and returns what `case` returned on rank 0.

    case: name of a case, or several separated by commas; then returns a dict of results by name. scratch: directory for
    files. Raises RanksFailed with the last lines of the output if a rank fails.
    """
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=scratch) as writes:
        asked, result = Path(name) / "settings.json", Path(name) / "result.json"
        asked.write_text(
            json.dumps({**settings, "directory": writes, "meeting": name, "timeout_s": timeout_s})
        )
        module = [sys.executable, "-m", "benchmarks.checkpoint.ranks"]
        with start_command(
            num_ranks, [*module, case, str(asked), str(result)], env={"GLOO_SOCKET_IFNAME": "lo"}
        ) as launched:
            try:
                done = launched.wait(timeout_s=timeout_s)
            except AssertionError as error:  # with the last lines, among them each rank's stacks
                raise RanksFailed(str(error)) from None
        if done.returncode != 0 or not result.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise RanksFailed(f"exit code {done.returncode}: {tail}")
        return json.loads(result.read_text())
