"""Starts ranks with `hpctrain launch`, as a user does, and reads what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.outcome import CheckFailed

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HPCTRAIN = (sys.executable, "-m", "hpctrain.cli.main")
# Variables of an outer launcher: with them the ranks would consider themselves ranks of that launcher.
_OUTER = ("OMPI_COMM_", "PMIX_", "PMI_", "SLURM_", "PRTE_", "ORTE_", "HPCTRAIN_")


def run(words: Sequence[str], *, num_ranks: int | None = None, timeout_s: float) -> None:
    """Runs a command, on `num_ranks` ranks if given. Raises CheckFailed with the last lines of its output if it fails
    or exceeds `timeout_s`."""
    command = list(words)
    if num_ranks is not None:
        command = [*HPCTRAIN, "launch", "--launcher", "mpirun", "-n", str(num_ranks), "--", *command]
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, errors="replace", timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise CheckFailed(f"still running after {timeout_s:g} s: {_tail(late.stdout, late.stderr)}") from None
    if done.returncode != 0:
        raise CheckFailed(
            f"exit code {done.returncode} of {' '.join(words[-4:])}: {_tail(done.stdout, done.stderr)}"
        )


def _environment() -> Mapping[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
    path = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    # TF32 rounds the factors of a product to 11 bits; convolutions would differ from the CPU's in the third digit.
    return environment | {"PYTHONPATH": os.pathsep.join(path), "NVIDIA_TF32_OVERRIDE": "0"}


def _tail(*outputs: str | bytes | None) -> str:
    texts = [out.decode(errors="replace") if isinstance(out, bytes) else out or "" for out in outputs]
    return " | ".join("\n".join(texts).strip().splitlines()[-12:])
