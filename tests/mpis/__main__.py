"""Prints the table of docs/platforms.md for the MPI of each environment that is named.

    python -m tests.mpis [--times N] [--only CELL[,CELL]] ENVIRONMENT...

ENVIRONMENT: a folder with bin/hpctrain, bin/python and the MPI's mpirun; `make mpis` makes some. N: how often each cell
is tried. It ends with 1 if any cell is not as promised.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.check.faulty_data import make_data, write_recipe
from tests.forked_ranks import PROGRAM, differences
from tests.mpis.ranks_program import CULPRIT

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 180.0
NUM_RANKS = 3


class Unkept(Exception):
    """What was promised did not happen. The message says what did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A launch that runs. output: of the launcher and its ranks."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text(errors="replace")

    def until(self, text: str, *, count: int = 1) -> None:
        end = time.monotonic() + LIMIT_S
        while self.output.count(text) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                raise Unkept(f"no {text!r}, code {self.process.poll()}: {self.output[-600:]}")
            time.sleep(0.05)

    def code(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unkept(f"still running after {LIMIT_S:.0f} s: {self.output[-600:]}") from None

    def expect(self, code: int, *words: str) -> None:
        found = self.code()
        if found != code:
            raise Unkept(f"code {found}: {self.output[-600:]}")
        for word in words:
            if word not in self.output:
                raise Unkept(f"code {found}, without {word!r}: {self.output[-600:]}")

    def ranks(self) -> list[int]:
        """Returns the processes of the ranks, which have printed them."""
        lines = [line for line in self.output.splitlines() if " is process " in line]
        return [int(line.rpartition(" ")[2]) for line in lines]


class Environment:
    """An environment with an MPI, and a folder of its own for what is started there."""

    def __init__(self, path: Path, *, folder: Path) -> None:
        self.path, self.folder = path, folder
        self._number = 0
        self.environ = {
            **os.environ,
            "PATH": f"{path / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(path / "lib"),  # of Debian's MPICH, which is unpacked there
            "PYTHONPATH": str(REPOSITORY),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.python, self.hpctrain = str(path / "bin/python"), str(path / "bin/hpctrain")

    def mpi(self) -> str:
        words = [
            self.python,
            "-c",
            "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])",
        ]
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, check=True)
        return " ".join(done.stdout.strip("\0\n ").split())[:60]

    @contextmanager
    def start(self, *words: str) -> Iterator[Started]:
        self._number += 1
        path = self.folder / f"output-{self._number}"
        with path.open("wb") as output:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self.environ,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        try:
            yield Started(process=process, path=path)
        finally:
            process.kill()
            process.wait()
            for pid in _remaining(self.folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def program(self, case: str) -> list[str]:
        ranks = [self.python, "-m", "tests.mpis.ranks_program", case]
        return [self.hpctrain, "launch", "-n", str(NUM_RANKS), "--", *ranks]

    def training(self, *settings: str) -> list[str]:
        words = [word for each in ("run.steps=10000000", *settings) for word in ("--set", each)]
        return [self.hpctrain, "train", "recipe.toml", *words]


def _remaining(folder: Path) -> list[int]:
    """Returns the processes that work in the folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if Path(os.readlink(f"/proc/{name}/cwd")) == folder:
                    found.append(int(name))
    return found


def _nothing_remains(folder: Path) -> None:
    end = time.monotonic() + 15.0
    while left := _remaining(folder):
        if time.monotonic() > end:
            raise Unkept(f"{len(left)} processes remain")
        time.sleep(0.1)


def sound(there: Environment) -> None:
    with there.start(*there.program("sound")) as run:
        run.expect(0)


def exits(there: Environment) -> None:
    with there.start(*there.program("exit")) as run:
        run.expect(3)


# Addresses and folders of a launch, which Hydra and Open MPI pass to the ranks in variables.
_OF_A_LAUNCH = ("PMI_", "HYDI_", "HYDRA_", "I_MPI_", "OMPI_MCA_", "OMPI_FILE_LOCATION", "MPI_LOCAL", "PRTE_")


def forked(there: Environment) -> None:
    launch = [there.hpctrain, "launch", "-n", str(NUM_RANKS)]
    # Hydra's ranks 1 and later see no end of their standard input.
    program = [there.python, str(PROGRAM), "describe", "files", "unread"]
    for name, option in (("cold", "--no-fork-server"), ("warm", "--fork-server")):
        with there.start(*launch, option, "--", *program) as run:
            run.expect(0)
            if "starts by itself" in run.output:
                raise Unkept(run.output[-600:])
        (there.folder / name).mkdir(exist_ok=True)
        for rank in range(NUM_RANKS):
            (there.folder / f"rank-{rank}").rename(there.folder / name / f"rank-{rank}")
    for rank in range(NUM_RANKS):
        cold, warm = (there.folder / name / f"rank-{rank}" for name in ("cold", "warm"))
        if found := differences(cold, warm, differ=_OF_A_LAUNCH):
            raise Unkept(f"rank {rank}: {found}")


def leaves(there: Environment) -> None:
    with there.start(*there.program("leaves")) as run:
        if run.code() == 0:
            raise Unkept("code 0")


def ended_by(name: str) -> Callable[[Environment], None]:
    number = signal.Signals[name]

    def cell(there: Environment) -> None:
        with there.start(*there.program(name)) as run:
            run.expect(128 + number, f"rank {CULPRIT} on ", f"signal {int(number)}")

    return cell


@contextmanager
def training(there: Environment, *, plain: bool = False) -> Iterator[Started]:
    directory = f"run-{there._number}"
    words = there.training(f"run.directory={directory}", "checkpoint.every_steps=1000000")
    launcher = ["mpirun"] if plain else [there.hpctrain, "launch"]
    with there.start(*launcher, "-n", "2", *([] if plain else ["--"]), *words) as run:
        run.until("step ", count=1)
        time.sleep(1.0)
        yield run


def stopped_by(number: signal.Signals, *, plain: bool = False) -> Callable[[Environment], None]:
    def cell(there: Environment) -> None:
        with training(there, plain=plain) as run:
            run.process.send_signal(number)
            run.expect(75, "; the state is saved")
        _nothing_remains(there.folder)

    return cell


def saves_now(there: Environment) -> None:
    with training(there) as run:
        before = run.output
        run.process.send_signal(signal.SIGUSR2)
        end = time.monotonic() + 60.0
        while not list(there.folder.glob(f"run-{there._number - 1}/checkpoints/*")):
            if run.process.poll() is not None or time.monotonic() > end:
                raise Unkept(f"no checkpoint, code {run.process.poll()}: {run.output[len(before) :][-600:]}")
            time.sleep(0.1)
        run.process.send_signal(signal.SIGINT)
        run.expect(75, "; the state is saved")


def several(presses: int) -> Callable[[Environment], None]:
    def cell(there: Environment) -> None:
        with there.start(*there.program("ignores")) as run:
            run.until("ready", count=NUM_RANKS)
            for _ in range(presses):
                run.process.send_signal(signal.SIGINT)
                time.sleep(1.5)
            run.expect(130)
        _nothing_remains(there.folder)

    return cell


def killed_launcher(there: Environment) -> None:
    with there.start(*there.program("waits")) as run:
        run.until(" is process ", count=NUM_RANKS)
        run.process.kill()
        _nothing_remains(there.folder)


def killed_mpirun(there: Environment) -> None:
    with there.start(*there.program("waits")) as run:
        run.until(" is process ", count=NUM_RANKS)
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        run.expect(137)
        _nothing_remains(there.folder)


CELLS: dict[str, Callable[[Environment], None]] = {
    "starts and ends: 0": sound,
    "forked ranks: as those that start by themselves": forked,
    "a rank exits with 3: 3": exits,
    "a rank leaves with 0 and without MPI_Finalize: not 0": leaves,
    "SIGKILL of a rank: 137, named": ended_by("SIGKILL"),
    "SIGSEGV of a rank: 139, named": ended_by("SIGSEGV"),
    "SIGABRT of a rank: 134, named": ended_by("SIGABRT"),
    "SIGBUS of a rank: 135, named": ended_by("SIGBUS"),
    "Ctrl-C: 75, saved": stopped_by(signal.SIGINT),
    "SIGTERM: 75, saved": stopped_by(signal.SIGTERM),
    "SIGUSR1: 75, saved": stopped_by(signal.SIGUSR1),
    "SIGUSR1 to plain mpirun: 75, saved": stopped_by(signal.SIGUSR1, plain=True),
    "SIGUSR2: saves, continues": saves_now,
    "two Ctrl-C: 130": several(2),
    "three Ctrl-C: 130": several(3),
    "launcher killed: nothing remains": killed_launcher,
    "mpirun killed: 137, nothing remains": killed_mpirun,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environments", nargs="+", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--times", type=int, default=1, metavar="N")
    parser.add_argument("--only", default="", metavar="CELL[,CELL]", help="begins of cells' names")
    arguments = parser.parse_args()
    names = [name for name in CELLS if name.startswith(tuple(arguments.only.split(",")))]
    failed = False
    for path in arguments.environments:
        with tempfile.TemporaryDirectory(prefix="hpctrain-mpis-") as name:
            folder = Path(name).resolve()
            make_data(folder)
            write_recipe(folder, "Sound", name="recipe")
            there = Environment(path.absolute(), folder=folder)
            print(f"## {path.name}: {there.mpi()}", flush=True)
            for cell in names:
                kept, reasons = 0, Counter[str]()
                for _ in range(arguments.times):
                    try:
                        CELLS[cell](there)
                        kept += 1
                    except Unkept as unkept:
                        reasons[str(unkept)] += 1
                failed = failed or bool(reasons)
                print(f"| {cell} | {kept} of {arguments.times} |", flush=True)
                for reason, _ in reasons.most_common(2):
                    print("    " + reason.replace("\n", "\n    "), file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
