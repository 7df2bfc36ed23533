"""Builds the command line that starts a run's ranks: mpirun or srun, with options and environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath

from hpctrain.errors import LaunchError
from hpctrain.launch.fork_server.plan import FOR_CLIENT, ForkServer, divide_servers, plan_fork_server
from hpctrain.launch.options import mpirun_argv, srun_argv, srun_mpi_type
from hpctrain.launch.placement import LocalMachine, MpirunFamily, Placement, Srun, place_ranks
from hpctrain.launch.rank_identity.identity import RANKS_PER_NODE_VARIABLE, find_launcher, identify

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*|(ba|da|z|k|mk|a|c|tc|fi)?sh")
_STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
# Options of Python that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Options after which no script follows: a command, a module, or a request for information.
_PROGRAM_GIVEN = ("-c", "-m", "-V", "-VV", "--version", "-h", "--help")


def refuse_program_on_stdin(command: Sequence[str]) -> None:
    """Raises LaunchError if each rank of `command` would read its program from standard input.

    Launchers pass standard input to one rank only.
    """
    if reads_program_from_stdin(command):
        raise LaunchError(
            f"`{' '.join(command)}` reads its program from standard input, but only one rank, or only the first "
            f"start, gets that input: save the program as a file and launch `{command[0]} FILE`"
        )


def reads_program_from_stdin(command: Sequence[str]) -> bool:
    """Returns True if `command` runs an interpreter (Python, a shell) without a script, also through `env`. Pure."""
    words = list(command)
    if words and PurePath(words[0]).name == "env":
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0]):
            words = words[2:] if words[0] in ("-u", "-C", "-S") else words[1:]
    if not words or not _INTERPRETER.fullmatch(PurePath(words[0]).name):
        return False
    is_python = "py" in PurePath(words[0]).name
    place = 1
    while place < len(words):
        word = words[place]
        if word in _STDIN or (word == "-s" and not is_python):
            return True
        if not word.startswith(("-", "+")):
            return False
        letters = "" if word.startswith(("--", "-W", "-X")) else word[1:]
        if word in _PROGRAM_GIVEN or "c" in letters or (is_python and "m" in letters):
            return False
        place += 2 if word in _WITH_VALUE and is_python else 1
    return True


# Builds the command line that starts a run's ranks.


class Launcher(str, Enum):
    """Program that starts the ranks. AUTO chooses srun inside a Slurm allocation, otherwise mpirun."""

    AUTO = "auto"
    MPIRUN = "mpirun"
    SRUN = "srun"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch that is ready to run.

    argv: command line of the launcher.
    emulated: True if one machine emulates several nodes.
    is_hydra: True if the launcher is Hydra (MPICH, Intel MPI).
    fork_words: the words in `argv` that make a fork server start each rank; empty if ranks start by themselves.
    env_updates: variables to set in the launcher's environment.
    env_removed: variables to remove from the launcher's environment.
    notes: messages for the user.
    """

    argv: tuple[str, ...]
    launcher: Launcher
    num_ranks: int
    emulated: bool
    is_hydra: bool = False
    fork_words: tuple[str, ...] = ()
    env_updates: Mapping[str, str] = field(default_factory=dict)
    env_removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def shell_line(self) -> str:
        """Returns the launch as a shell command line, in which each rank starts by itself, without a fork server."""
        words = [f"-u {shlex.quote(name)}" for name in self.env_removed]
        words += [
            f"{name}={shlex.quote(value)}"
            for name, value in self.env_updates.items()
            if name not in FOR_CLIENT
        ]
        argv = [*self.argv]
        if self.fork_words:
            first = argv.index(self.fork_words[0])
            del argv[first : first + len(self.fork_words)]
        return " ".join([*(["env", *words] if words else []), shlex.join(argv)])


def plan_launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    ranks_per_node: int | None = None,
    environ: Mapping[str, str],
    machine: LocalMachine,
    launcher: Launcher = Launcher.AUTO,
    hosts: Sequence[str] = (),
    hostfile: str | None = None,
    nodes: Sequence[str] = (),
    fork_server: ForkServer | None = None,
) -> LaunchPlan:
    """Plans the start of `num_ranks` ranks of `command`.

    On several nodes (a Slurm allocation, or `hosts`) the ranks are placed in blocks of `ranks_per_node`; the last node
    may have fewer. On one machine `ranks_per_node` emulates nodes: the ranks read HPCTRAIN_RANKS_PER_NODE.

    environ: environment variables of this process.
    machine: cores and launchers of this machine.
    hosts: machines to start the ranks on.
    hostfile: file from which `hosts` were read. If given, mpirun gets this file instead of a list of hosts.
    nodes: nodes of the Slurm allocation to use, by name; if empty, Slurm chooses as many as are needed.
    fork_server: if given, and the command is a Python program, the ranks are forked from one process per node. A note
    tells the user whether the ranks are forked and, if they are not, why.

    Raises LaunchError if the ranks cannot be placed, the launcher is not installed, or this process is itself one of
    several ranks.
    """
    if not command:
        raise LaunchError(
            "no command to launch: write it after two dashes, as in `hpctrain launch -n 4 -- python train.py`"
        )
    if num_ranks < 1:
        raise LaunchError(f"-n {num_ranks}: a run has at least 1 rank")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise LaunchError(f"--ranks-per-node {ranks_per_node}: a node holds at least 1 rank")
    _refuse_launch_by_a_rank(environ)
    if num_ranks > 1:
        refuse_program_on_stdin(command)
    notes: list[str] = []
    chosen = _choose(launcher, environ=environ, machine=machine, has_hosts=bool(hosts), notes=notes)
    placement = place_ranks(num_ranks, ranks_per_node, environ=environ, hosts=hosts or nodes, notes=notes)
    updates, removed = _common_environment(placement, environ)
    words: tuple[str, ...] = ()
    if fork_server is not None:
        words, note = plan_fork_server(
            fork_server, command, environ=environ, ranks_on_a_node=placement.ranks_on_a_node, updates=updates
        )
        notes += [note] if note is not None else []
    if chosen is Launcher.SRUN:
        argv = srun_argv(
            placement,
            environ=environ,
            machine=machine,
            updates=updates,
            removed=removed,
            notes=notes,
            nodes=nodes,
        )
    else:
        argv = mpirun_argv(
            placement,
            environ=environ,
            machine=machine,
            updates=updates,
            hosts=hosts or nodes,
            hostfile=hostfile,
            notes=notes,
        )
    kept = {name: value for name, value in environ.items() if name not in removed}
    divide_servers(words, environ=kept, updates=updates)
    return LaunchPlan(
        argv=(*argv, *words, *command),
        launcher=chosen,
        num_ranks=num_ranks,
        emulated=placement.emulated,
        is_hydra=chosen is Launcher.MPIRUN
        and machine.mpirun is not None
        and machine.mpirun.family is MpirunFamily.HYDRA,
        fork_words=words,
        env_updates=updates,
        env_removed=tuple(removed),
        notes=tuple(notes),
    )


def read_hosts(text: str) -> list[str]:
    """Returns the machines in a hostfile, each once: the first word of each line, without `:slots`.

    text: content of the file.
    """
    lines = (line.split("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(words[0].split(":")[0] for words in lines if words))


def _refuse_launch_by_a_rank(environ: Mapping[str, str]) -> None:
    row = find_launcher(environ)
    if row is None:
        return
    identity = identify({k: v for k, v in environ.items() if k != RANKS_PER_NODE_VARIABLE}, "this machine")
    # One Slurm task is the shell of `srun --pty bash`: launching from it is allowed.
    if identity.num_ranks > 1 or row.name != "Slurm":
        raise LaunchError(
            f"`hpctrain launch` was itself started as rank {identity.rank} of {identity.num_ranks} by "
            f"{row.name}, so every rank would start a whole run: either give the command to that launcher "
            "directly, or call `hpctrain launch` once, outside it"
        )


def _choose(
    asked: Launcher, *, environ: Mapping[str, str], machine: LocalMachine, has_hosts: bool, notes: list[str]
) -> Launcher:
    in_slurm = bool(environ.get("SLURM_JOB_ID"))
    if asked is Launcher.SRUN:
        if machine.srun is None:
            raise LaunchError(
                "--launcher srun: no srun on the PATH; use --launcher mpirun, or load Slurm's module"
            )
        if not in_slurm:
            raise LaunchError(
                "--launcher srun: this shell is not in a Slurm allocation (SLURM_JOB_ID is not set); get one "
                "with salloc or sbatch first, or use --launcher mpirun"
            )
        if has_hosts:
            raise LaunchError(
                "--launcher srun takes its nodes from the allocation: leave out --host and --hostfile"
            )
        is_known = machine.mpirun is not None and machine.mpirun.family is not MpirunFamily.UNKNOWN
        if (
            machine.mpirun is not None
            and is_known
            and machine.srun.mpi_types
            and srun_mpi_type(machine) is None
        ):
            raise LaunchError(
                f"--launcher srun: srun cannot start ranks of {machine.mpirun.version} ({_listed(machine.srun)}): "
                "leave --launcher out, so that mpirun starts them, or install Slurm's plugin for PMIx (Open MPI) "
                "or PMI2 (MPICH)"
            )
        return Launcher.SRUN
    if asked is Launcher.AUTO and in_slurm and not has_hosts:
        if machine.srun is None:
            notes.append("in a Slurm allocation, but there is no srun on the PATH: using mpirun")
        elif machine.mpirun is not None and srun_mpi_type(machine) is None:
            notes.append(
                f"srun cannot start ranks of {machine.mpirun.version} "
                f"({machine.srun.failure or _listed(machine.srun)}): using mpirun"
            )
        else:
            return Launcher.SRUN
    if machine.mpirun is None:
        raise LaunchError(
            "neither mpirun nor mpiexec is on the PATH: install an MPI (Debian: openmpi-bin), or load your "
            "site's MPI module" + ("" if in_slurm else "; inside a Slurm allocation srun is used instead")
        )
    return Launcher.MPIRUN


def _listed(srun: Srun) -> str:
    return f"it lists {', '.join(srun.mpi_types) or 'no MPI types'}"


def _common_environment(placement: Placement, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    if placement.emulated:
        return {RANKS_PER_NODE_VARIABLE: str(placement.ranks_per_node)}, []
    asked_for_real = placement.ranks_per_node is not None or not placement.on_one_machine
    return {}, [RANKS_PER_NODE_VARIABLE] if asked_for_real and RANKS_PER_NODE_VARIABLE in environ else []
