"""Start real ranks from a test: `run_ranks` for a function, `run_command` for a command line.

Ranks are started as `hpctrain launch --fork-server` starts them: the same command line, environment and preloaded
library. Servers are shared by all tests of a run; `cold_starts` has ranks start by themselves.
pytest itself stays outside MPI: it would hang when one rank fails. Each launch has a time limit that ends
every process of it, and a failure shows the last lines of each rank. This module is also what each rank runs:
`python -m tests.ranks_launcher module:function backend args-json out-dir timeout_s num_ranks`.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.launch import ForkServer, LocalMachine, plan_launch, survey_machine
from hpctrain.launch.fork_server.plan import KEY_VARIABLE, OFF, divide_servers, plan_fork_server
from hpctrain.launch.placement import MpirunFamily

REPOSITORY = Path(__file__).resolve().parent.parent
# What an outer launcher leaves in the environment would make the inner ranks take themselves for its ranks.
OUTER_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "PRTE_", "ORTE_", "HPCTRAIN_", "HOROVOD_")
# pytest's own, of which one names the test: servers are shared by launches with the same variables.
OF_PYTEST = ("PYTEST_",)
TAIL_LINES = 40
# For how long a fork server waits for the next test that can use it.
LINGERS_S = 60.0
PRELOAD = (
    "torch",
    "torch.optim",
    "torch.utils.data",
    "hpctrain.run.training",
    "hpctrain.run.recipe.schema",
    "hpctrain.cli.commands",
    "hpctrain.cli.train",
    "hpctrain.comm.backends.mpi_world",
    "hpctrain.tasks",
)
# Single processes that are forked too: commands that start no other processes of a launch.
FORKED_COMMANDS = ("train", "data")
CLIENT = "_fork_client"
_forks = os.environ.get("HPCTRAIN_TESTS_START") != "cold"


@dataclass(frozen=True, kw_only=True)
class RanksResult:
    """How a launch of `run_ranks` ended. `outputs[r]` is what rank r's function returned, or None."""

    returncode: int
    outputs: list[Any]
    stdout: str
    stderr: str
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a launch of `run_command` ended."""

    returncode: int
    stdout: str
    stderr: str
    wall_s: float


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A user's environment: ours without an outer launcher's variables, plus `extra`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith((*OUTER_LAUNCHER, *OF_PYTEST))}
    path = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    environment.update(
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(path),
    )
    if not _forks:
        environment[KEY_VARIABLE] = OFF
    environment.update(extra or {})
    return environment


@contextmanager
def cold_starts() -> Iterator[None]:
    """Ranks start by themselves meanwhile."""
    global _forks
    before, _forks = _forks, False
    try:
        yield
    finally:
        _forks = before


def _fork_server() -> ForkServer | None:
    """The servers of this run of pytest, whose workers share them."""
    if not _forks:
        return None
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return ForkServer(key=f"tests-{owner}", lingers_s=LINGERS_S, owner=owner, preload=PRELOAD)


def _as_forked(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a single process that is forked from a server."""
    server, updates = _fork_server(), dict[str, str]()
    words: tuple[str, ...] = ()
    if server is not None:
        words, _ = plan_fork_server(server, command, environ=environment, ranks_on_a_node=1, updates=updates)
        divide_servers(words, environ=environment, updates=updates)
    return [*words, *command], {**environment, **updates}


@functools.cache
def _machine() -> LocalMachine:
    return survey_machine()


def is_open_mpi() -> bool:
    """Whether `mpirun` is Open MPI's."""
    return _family() in (MpirunFamily.OPEN_MPI_4, MpirunFamily.OPEN_MPI_5)


def launcher_name() -> str:
    """The launcher of `mpirun`, as hpctrain calls it."""
    if is_open_mpi():
        return "Open MPI"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "Intel MPI" if "Intel" in version.stdout else "MPICH"


def variables_of_another_mpi(*, rank: int, num_ranks: int) -> dict[str, str]:
    """What the launcher of an MPI other than that of `mpirun` sets in a rank of one node."""
    names: tuple[str, ...] = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if not is_open_mpi():
        names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return dict(zip(names, map(str, (rank, num_ranks) * 2), strict=True))


def has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def skip_without_horovod() -> None:
    """Skips the test that calls it where Horovod is not installed: it is optional."""
    if not has_horovod():
        import pytest  # not in the ranks, which import this module too

        pytest.skip("Horovod is not installed: hpctrain runs without it")


def _family() -> MpirunFamily | None:
    mpirun = _machine().mpirun
    return None if mpirun is None else mpirun.family


def as_hpctrain_launch(
    num_ranks: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    copy_output_to: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment with which `hpctrain launch -n NUM_RANKS -- COMMAND` starts the ranks.

    copy_output_to: each rank's output in files of its own as well.
    """
    plan = plan_launch(
        command,
        num_ranks=num_ranks,
        environ=environment,
        machine=_machine(),
        fork_server=_fork_server(),
    )
    argv = list(plan.argv)
    # Open MPI 5 writes the files instead of showing the output, and of several ranks nothing at all.
    if copy_output_to is not None and _family() is MpirunFamily.OPEN_MPI_4:
        argv[1:1] = ["--output-filename", str(copy_output_to)]
    kept = {name: value for name, value in environment.items() if name not in plan.env_removed}
    return argv, {**kept, **plan.env_updates}


@dataclass
class Launched:
    """A started command. Its processes share a session, but for ranks that were forked, which know their clients: so
    all of them are found and ended."""

    process: subprocess.Popen[bytes]
    directory: tempfile.TemporaryDirectory[str]
    started: float = field(default_factory=time.monotonic)
    clients: set[bytes] = field(default_factory=set)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self.directory.cleanup()

    @property
    def stdout(self) -> str:
        return _read(Path(self.directory.name) / "stdout")

    @property
    def stderr(self) -> str:
        return _read(Path(self.directory.name) / "stderr")

    def processes(self) -> dict[int, str]:
        """Process id -> command line of every live process of the launch, the launcher's own included."""
        found: dict[int, str] = {}
        others: list[tuple[Path, str]] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # Fields after the ")" of the name: state, parent, group, session. A zombie is not alive.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                if fields[0] == "Z":
                    continue
                if int(fields[3]) != self.process.pid:
                    others.append((entry, command))
                    continue
                found[int(entry.name)] = command
                if is_client(command):
                    self.clients.add(entry.name.encode())
            except (OSError, IndexError):
                continue  # it ended while we looked
        for entry, command in others if self.clients else ():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(b"HPCTRAIN_FORKED_FOR=" + client in variables for client in self.clients):
                found[int(entry.name)] = command
        return found

    def rank_processes(self) -> dict[int, int]:
        """World rank -> process id, for ranks that mpirun has started."""
        found = {}
        for pid, command in self.processes().items():
            if is_client(command):
                continue
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for item in environment:
                name, _, value = item.partition(b"=")
                if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
                    # A rank's own children carry the variable too: the rank itself is the lowest pid.
                    rank = int(value)
                    found[rank] = min(pid, found.get(rank, pid))
        return found

    def kill(self) -> None:
        """End every process of the launch."""
        self.processes()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        self.process.wait()

    def wait(self, *, timeout_s: float) -> CommandResult:
        """Wait for the end. After `timeout_s` from the start everything is killed: AssertionError."""
        try:
            remaining_s = max(0.0, self.started + timeout_s - time.monotonic())
            returncode = self.process.wait(remaining_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"still running after {timeout_s:g} s, killed\n--- stdout\n{_tail(self.stdout)}"
                f"\n--- stderr\n{_tail(self.stderr)}"
            ) from None
        wall_s = time.monotonic() - self.started
        return CommandResult(returncode=returncode, stdout=self.stdout, stderr=self.stderr, wall_s=wall_s)


def start_command(
    num_ranks: int | None,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str = REPOSITORY,
    copy_output_to: Path | None = None,
    forks: bool = False,
) -> Launched:
    """Start `argv` as `hpctrain launch -n num_ranks` does, or by itself when `num_ranks` is None; do not wait.

    forks: a single process too is forked from a server; it starts no processes that outlive it.
    Use it as a context manager: leaving it ends every process of the launch.
    copy_output_to: each rank's output in files of its own as well.
    """
    directory = tempfile.TemporaryDirectory(prefix="hpctrain-test-")
    command, environment = [str(word) for word in argv], rank_environment(env)
    if num_ranks is not None:
        command, environment = as_hpctrain_launch(
            num_ranks, command, environment, copy_output_to=copy_output_to
        )
    elif forks or (Path(command[0]).name == "hpctrain" and command[1:2] and command[1] in FORKED_COMMANDS):
        command, environment = _as_forked(command, environment)
    # Files, not pipes: a process that outlives its rank would keep a pipe open, and us waiting.
    with (
        open(Path(directory.name) / "stdout", "wb") as stdout,
        open(Path(directory.name) / "stderr", "wb") as stderr,
    ):
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    return Launched(process, directory)


def run_command(
    num_ranks: int | None,
    argv: Sequence[str],
    *,
    timeout_s: float = 800,
    env: Mapping[str, str] | None = None,
    cwd: Path | str = REPOSITORY,
    expect: int | None = None,
) -> CommandResult:
    """Run `argv` as `hpctrain launch -n num_ranks` does, or by itself when `num_ranks` is None.

    expect: the exit code that must come out; None accepts any.
    """
    with start_command(num_ranks, argv, env=env, cwd=cwd) as launched:
        result = launched.wait(timeout_s=timeout_s)
    if expect is not None and result.returncode != expect:
        raise AssertionError(
            f"exit code {result.returncode}, expected {expect}: {' '.join(map(str, argv))}"
            f"\n--- stdout\n{_tail(result.stdout)}\n--- stderr\n{_tail(result.stderr)}"
        )
    return result


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "mpi",
    ranks_per_node: int | None = None,
    timeout_s: float = 800,
    env: Mapping[str, str] | None = None,
    expect: int | None = 0,
) -> RanksResult:
    """Run `function(world, *args)` on `num_ranks` ranks and collect what each returned.

    function: at module level of an importable module; args and results must be JSON.
    backend: `horovod` and `mpi` under mpirun; `threads` as threads of one process; `serial` needs one rank. A test that
    asks for Horovod where it is not installed is skipped.
    ranks_per_node: nodes are emulated (HPCTRAIN_RANKS_PER_NODE), as `hpctrain launch` does.
    expect: the exit code that must come out; None accepts any.
    """
    if backend == "horovod":
        skip_without_horovod()
    under_mpirun = backend in ("horovod", "mpi")
    extra = {} if ranks_per_node is None else {"HPCTRAIN_RANKS_PER_NODE": str(ranks_per_node)}
    extra.update(env or {})
    with tempfile.TemporaryDirectory(prefix="hpctrain-ranks-") as name:
        directory = Path(name)
        command = [sys.executable, "-m", "tests.ranks_launcher"]
        command += [f"{function.__module__}:{function.__qualname__}", backend, json.dumps(args), name]
        command += [str(timeout_s), str(num_ranks)]
        try:
            with start_command(
                num_ranks if under_mpirun else None,
                command,
                env=extra,
                copy_output_to=directory / "ranks",
                forks=True,
            ) as launched:
                result = launched.wait(timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_rank_tails(directory)}") from None
        if expect is not None and result.returncode != expect:
            shown = _rank_tails(directory) or f"{_tail(result.stdout)}\n{_tail(result.stderr)}"
            raise AssertionError(
                f"{function.__qualname__} on {num_ranks} {backend} ranks: exit code {result.returncode}, "
                f"expected {expect}\n{shown}"
            )
        outputs = [_read_json(directory / f"rank-{rank}.json") for rank in range(num_ranks)]
    return RanksResult(
        returncode=result.returncode,
        outputs=outputs,
        stdout=result.stdout,
        stderr=result.stderr,
        wall_s=result.wall_s,
    )


def is_client(command: str) -> bool:
    """Whether a command line is that of the program which stands for a forked rank."""
    return CLIENT in command.partition(" ")[0]


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])


def _rank_tails(directory: Path) -> str:
    """The last lines of each rank, from the files that mpirun copied their output to."""
    parts = []
    for path in sorted((directory / "ranks").glob("*/rank.*/std*")):
        text = _tail(_read(path))
        if text:
            parts.append(f"--- {path.parent.name} {path.name}\n{text}")
    return "\n".join(parts)


def _rank_main(argv: Sequence[str]) -> int:
    """What each launched process does: open the backend, call the function, write its result."""
    target, backend, arguments, directory, timeout_s, num_ranks = argv
    # A hang becomes a stack of each thread, shortly before the launch is killed.
    faulthandler.dump_traceback_later(0.9 * float(timeout_s), exit=False)
    from hpctrain.run.compute.postponed_dynamo import postpone_dynamo

    postpone_dynamo()  # as `hpctrain.init` does
    module, _, name = target.partition(":")
    gc.disable()  # as `hpctrain train` does while it imports
    function = getattr(importlib.import_module(module), name)
    gc.enable()

    def case(world: Any) -> None:
        value = function(world, *json.loads(arguments))
        (Path(directory) / f"rank-{world.rank}.json").write_text(json.dumps(value))

    if backend == "threads":
        from hpctrain.comm.backends.threads_world import run_threads

        run_threads(int(num_ranks), case, timeout_s=float(timeout_s))
        return 0
    world = _open(backend)
    if world.num_ranks != int(num_ranks):
        raise RuntimeError(f"{num_ranks} ranks asked for, {backend} has {world.num_ranks}")
    try:
        case(world)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        code = int(getattr(error, "exit_code", 1))
        if getattr(error, "agreed", False):
            world.barrier()  # the launcher ends all when one leaves: not before each has said its word
            world.close()
            return code  # every rank has raised it: all leave by the same door
        world.abort(code)
    world.close()
    return 0


def _open(backend: str) -> Any:
    if backend == "horovod":
        from hpctrain.comm.backends.horovod_world import HorovodWorld

        return HorovodWorld.open()
    if backend == "mpi":
        from hpctrain.comm.backends.mpi_world import MpiWorld

        return MpiWorld.open()
    if backend == "serial":
        from hpctrain.comm.backends.serial_world import SerialWorld

        return SerialWorld()
    raise ValueError(f"no backend {backend!r}")


if __name__ == "__main__":
    sys.exit(_rank_main(sys.argv[1:]))
