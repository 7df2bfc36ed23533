"""What the communication libraries of this environment are: facts for `hpctrain doctor`, nothing started.

The libraries are looked at through importlib, so that a missing one is a fact and not an error. MPI is the
exception among them: loading `mpi4py.MPI` may start it, and a start that fails ends the process. It is
therefore asked after a world has been opened, or in a process of its own
(`python -m hpctrain.comm.backends.library_probe`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from typing import Any

_MARK = "hpctrain-mpi-facts "
_LEVELS = ("single", "funneled", "serialized", "multiple")
_HOROVOD_PARTS = ("mpi", "gloo", "nccl", "cuda", "rocm")


def probe_horovod() -> dict[str, Any]:
    """`version` and `built`, the parts it was built with; or `error`, when it cannot be loaded."""
    try:
        version = importlib.metadata.version("horovod")
        horovod = importlib.import_module("horovod.torch")
    except importlib.metadata.PackageNotFoundError:
        return {"error": "not installed"}
    except Exception as error:
        # A build against another torch fails to load in many ways; any of them is a finding, not a crash.
        return {"error": f"cannot be loaded: {_first_line(error)}"}
    built = [part for part in _HOROVOD_PARTS if bool(getattr(horovod, f"{part}_built")())]
    return {"version": version, "built": built}


def probe_mpi4py() -> dict[str, Any]:
    """`version` of mpi4py from its metadata, or `error`. MPI is neither loaded nor started."""
    try:
        return {"version": importlib.metadata.version("mpi4py")}
    except importlib.metadata.PackageNotFoundError:
        return {"error": "not installed"}


def probe_started_mpi() -> dict[str, Any]:
    """`library`, `standard`, `thread_level` of the MPI that this process has started; `error` if it has not.

    Does not start MPI, and loads `mpi4py.MPI` only in a process where it is loaded already or MPI runs.
    """
    try:
        mpi4py: Any = importlib.import_module("mpi4py")
        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # Horovod may have started it; then it is only asked
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except Exception as error:
        return {"error": f"mpi4py cannot be loaded: {_first_line(error)}"}
    facts = {
        "library": mpi.Get_library_version().strip("\x00 \n").split("\n")[0].split(", package")[0],
        "standard": ".".join(map(str, mpi.Get_version())),
    }
    if mpi.Is_initialized() and not mpi.Is_finalized():
        facts["thread_level"] = _LEVELS[int(mpi.Query_thread())]
        facts["num_ranks"] = mpi.COMM_WORLD.Get_size()
    return facts


def probe_mpi_alone(*, timeout_s: float = 60.0) -> dict[str, Any]:
    """The facts of `probe_started_mpi` from a process of its own, which starts MPI as one rank.

    `error` says how the start failed: MPI ends a process in which it cannot start.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain.comm.backends.library_probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"MPI did not start within {timeout_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            facts: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return facts
    told = [line.strip() for line in done.stderr.splitlines() if line.strip(" -*\t")]
    return {"error": f"MPI cannot start (exit code {done.returncode}): {' '.join(told)[:300]}"}


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def main() -> None:
    """Start MPI as one rank and print its facts."""
    try:
        mpi4py: Any = importlib.import_module("mpi4py")
        mpi4py.rc.thread_level = "multiple"
        importlib.import_module("mpi4py.MPI")
        facts = probe_started_mpi()
    except Exception as error:
        facts = {"error": f"mpi4py cannot be loaded: {_first_line(error)}"}
    print(_MARK + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
