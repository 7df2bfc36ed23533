"""A program without MPI that prints its arguments, variables, limits, signals and files: `forked_rank.py CASE`."""

import atexit
import ctypes
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def described() -> dict[str, object]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shown = (
        "Umask",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "Threads",
        "Cpus_allowed_list",
        "Mems_allowed_list",
        "Uid",
        "CapEff",
    )
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": sorted(vars(sys.modules["__main__"])),
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "directory": os.getcwd(),
        "temporary folder": tempfile.gettempdir(),
        "variables": dict(os.environ),
        "shown variables": sorted(filter(None, Path("/proc/self/environ").read_bytes().decode().split("\0"))),
        "command": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "comm": Path("/proc/self/comm").read_text(),
        "status": {name: status[name].strip() for name in shown},
        "limits": Path("/proc/self/limits").read_text(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "score": Path("/proc/self/oom_score_adj").read_text(),
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "interrupts": repr(signal.getsignal(signal.SIGINT)),
        "streams": [
            (s.fileno(), s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.isatty()) for s in streams
        ],
        "input": None if "unread" in sys.argv else sys.stdin.read(),
        "descriptor 7": os.read(7, 100).decode() if "descriptor" in sys.argv else None,
        "leads its group": os.getpgid(0) == os.getpid(),
        "numpy threads": os.environ.get("OMP_NUM_THREADS"),
    }


def leave_in_buffers(file: Path) -> None:
    """Writes into a stream of the C library and a file of HDF5, which nothing closes, and registers a function in C."""
    import h5py

    c_library = ctypes.CDLL(None)
    c_library.printf(b"printed by C, ")
    c_library.__cxa_atexit(c_library.puts, b"registered in C", None)
    group = h5py.File(file, "w")
    group["values"] = np.arange(5)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group.id))


def main(case: str) -> None:
    if case == "describe":
        drawn = [random.random(), float(np.random.random())]
        text = json.dumps({"pid": os.getpid(), "drawn": drawn, **described()})
        if "files" in sys.argv:  # lines of several ranks would be mixed
            names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
            rank = next(os.environ[name] for name in names if name in os.environ)
            Path(f"rank-{rank}").write_text(text)
        else:
            print(text)
        return
    if case == "buffers":
        leave_in_buffers(Path(sys.argv[2]))
        sys.exit(6)
    atexit.register(print, "at exit", flush=True)
    if case == "exit":
        sys.exit(3)
    if case == "text":
        sys.exit("a text")
    if case == "raise":
        raise LookupError("no such thing")
    if case.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[case])
    if case == "handle":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    if case in ("wait", "handle"):
        Path(sys.argv[2]).write_text(str(os.getpid()))
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
