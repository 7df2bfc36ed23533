"""A deadline for the start of a run.

Without a deadline, MPI_Init waits forever for a rank that never calls MPI_Init. All Python threads are then blocked.
Each rank that starts writes a file into a folder of its node (in memory), one folder per launcher process, and removes
the file once all ranks have started. A script that the launcher starts as a rank may run several programs, but MPI can
be started only once per rank. If there is such a script, the rank leaves a note in the folder, and hpctrain refuses the
second program.

A thread written in C (`gil_free_timer`) ends a rank that still waits at the deadline. Before that, the thread runs this
file as a program, which prints which ranks of the node have no file. If the nodes share the working directory, the
programs of all nodes exchange their findings there, so that ranks of other nodes are named too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# At run time hpctrain is imported inside functions, because this file as a program finds it only later.
if TYPE_CHECKING:
    from hpctrain.launch import LauncherProcess, RankIdentity

_PREFIX = "hpctrain-start-"
_ENDING_SHARE, _LONGEST_ENDING_S = 0.25, 5.0  # as a collective operation's, see `Monitored`
_RANKS_NAMED = 8
# Ranks that wait for the one that prints, so that the launcher does not end it before it has.
_OTHERS_LEAVE_AFTER_S = 1.0
# The program's share of the time to end all ranks, in which it waits for those of other nodes.
_MEETING_SHARE = 0.5
_SCANCEL_S = 10.0
_MEETING_PREFIX = ".hpctrain-absent-"


@contextlib.contextmanager
def start_deadline(
    identity: RankIdentity, *, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Ends this rank with exit code 6 if the `with` block, which waits for all other ranks to start, takes too long.

    The block may take `timeout_s` minus a reserve for ending all ranks. Does nothing for a single rank. Raises
    LaunchError if another program has already run as this rank.
    """
    from hpctrain.comm.watchdog.gil_free_timer import GilFreeTimer, find_timer_library
    from hpctrain.errors import ExitCode

    library = find_timer_library()
    if identity.num_ranks == 1 or library is None or not 0 < timeout_s < math.inf:
        yield
        return
    folder, launcher = _folder(environ)
    _refuse_second_program(folder, identity)
    ending_s = min(_LONGEST_ENDING_S, _ENDING_SHARE * timeout_s)
    limit_s = timeout_s - ending_s
    numbers = {
        "rank": identity.rank, "num_ranks": identity.num_ranks, "host_size": identity.host_size,
        "launcher": identity.launcher, "pid": launcher.pid, "variable": _variable(environ), "limit_s": limit_s,
        "timeout_s": timeout_s, "folder": None if folder is None else str(folder),
        "step": f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}" if identity.launcher == "Slurm" else None,
        "meeting": _meeting(environ, identity), "meeting_s": _MEETING_SHARE * ending_s,
    }  # fmt: skip
    own = _write(folder, identity)
    try:
        timer = GilFreeTimer(
            library,
            [sys.executable, "-I", __file__, json.dumps(numbers)],
            exit_code=int(ExitCode.COMMUNICATION),
        )
    except OSError:
        timer = None
    try:
        if timer is not None:
            timer.set(limit_s)
        yield
    finally:
        if timer is not None:
            timer.stop()
        if own is not None:
            with contextlib.suppress(OSError):
                if launcher.between:
                    _note_of(own.parent, identity).write_text(str(os.getpid()))
                own.unlink(missing_ok=True)
                own.parent.rmdir()  # the last rank does


def _variable(environ: Mapping[str, str]) -> str | None:
    from hpctrain.launch import find_launcher

    row = find_launcher(environ)
    return None if row is None else row.rank


def _meeting(environ: Mapping[str, str], identity: RankIdentity) -> str | None:
    """Returns the prefix of the paths of the files through which the nodes exchange which of their ranks are absent.

    Returns None if there is only one node, or if the environment does not name this launch.
    """
    name = environ.get("PMIX_NAMESPACE") or ".".join(
        filter(None, (environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")))
    )
    if not name or identity.host_size is None or identity.host_size == identity.num_ranks:
        return None
    with contextlib.suppress(OSError):  # the folder is gone
        return os.path.join(os.getcwd(), _MEETING_PREFIX + re.sub(r"[^\w.-]", "-", name))
    return None


def _note_of(folder: Path, identity: RankIdentity) -> Path:
    return folder / f"started-{identity.rank}"


def _refuse_second_program(folder: Path | None, identity: RankIdentity) -> None:
    from hpctrain.errors import LaunchError

    try:
        before = "" if folder is None else _note_of(folder, identity).read_text()
    except OSError:
        return
    if before not in ("", str(os.getpid())):
        raise LaunchError(
            f"rank {identity.rank} has already run another program that used hpctrain (process {before}), but MPI "
            f"can be started only once in each rank that {identity.launcher} starts: launch each program separately"
        )


def _folder(environ: Mapping[str, str]) -> tuple[Path | None, LauncherProcess]:
    """Returns the folder for the files of this node's ranks (None if it is unknown), and the launcher's process."""
    from hpctrain.comm.watchdog.board.node_files import local_parent, node_identity
    from hpctrain.launch import find_launcher_process

    launcher = find_launcher_process(environ)
    key = launcher.key()
    if key is None:
        return None, launcher
    try:
        parent = local_parent()
        _, _, processes = node_identity(parent).partition(":[")
    except OSError:
        return None, launcher
    return parent / f"{_PREFIX}{os.getuid()}-{processes.strip(']')}-{key}", launcher


def _write(folder: Path | None, identity: RankIdentity) -> Path | None:
    """Writes this rank's file and returns the path of the file; None if it cannot be written."""
    if folder is None:
        return None
    path = folder / f"rank-{identity.rank}"
    try:
        _remove_abandoned(folder)
        for _ in range(100):
            folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(
                FileNotFoundError
            ):  # another rank has started meanwhile, and removed the folder
                path.write_text("" if identity.host_rank is None else str(identity.host_rank))
                return path
    except OSError:
        pass
    return None


def _remove_abandoned(folder: Path) -> None:
    """Removes the folders of this user's launchers that have ended.

    Such folders are left behind by ranks that were killed during their start.
    """
    start, _, _ = folder.name.rsplit("-", 2)
    for other in folder.parent.glob(f"{start}-*"):
        pid, ticks = other.name.rsplit("-", 2)[1:]
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[19] != ticks:
                shutil.rmtree(other, ignore_errors=True)


# ---------------------------------------------------------------------- the program


def _report(found: Mapping[str, Any]) -> None:
    """Prints why the rank ends, unless another rank prints it. The timer ends the rank when this function returns.

    found: what the rank knows: the decoded JSON argument with which the timer has started this file as a program.
    """
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    folder = None if found["folder"] is None else Path(found["folder"])
    if folder is not None:
        try:
            os.close(os.open(folder / "told", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(_OTHERS_LEAVE_AFTER_S)
            return
        except OSError:
            folder = None
    here = describe_absent(folder, found)
    known = _meet(here, found)
    if known and min(known) != min(here.waiting):  # that node's program prints
        time.sleep(_OTHERS_LEAVE_AFTER_S)
        return
    lines = [
        f"hpctrain: rank {found['rank']} on {socket.gethostname()} has waited {found['limit_s']:.1f} s at its start "
        f"for the other ranks (timeout_s = {found['timeout_s']:g}) and ends the run",
        *_describe_nodes(known, here, found),
        f"each of the {found['num_ranks']} ranks that {found['launcher']} started must start hpctrain (hpctrain.init, "
        "hpctrain.hvd.init, init_process_group, `hpctrain train`) within that time of the first. A program that is "
        "read from standard input reaches rank 0 only: save it as a file",
    ]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
    nodes = list(known.values()) or [here]
    num_left = sum(len(node.waiting) + node.num_ended for node in nodes)
    if found["step"] is not None and num_left < found["num_ranks"]:
        _end_step(found["step"])


def _end_step(step: str) -> None:
    """Ends a Slurm step: without --kill-on-bad-exit, srun waits for the absent ranks after the others have ended."""
    try:
        done = subprocess.run(
            ["scancel", step], capture_output=True, text=True, check=False, timeout=_SCANCEL_S
        )
        failure = done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        sys.stderr.write(
            f"hpctrain: scancel {step}: {failure}. Without --kill-on-bad-exit=1 srun keeps waiting for the absent "
            "ranks whose processes still run: end that job step by hand\n"
        )
        sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAtDeadline:
    """State of one node's ranks at the deadline.

    waiting: ranks that have started hpctrain and wait for the others.
    absent: ranks that have not started hpctrain, as far as it is known which ranks these are.
    num_ended: number of ranks whose processes have ended without starting hpctrain.
    lines: report about the ranks that have not started.
    """

    waiting: list[int]
    absent: list[int]
    num_ended: int
    lines: list[str]


def _meet(here: NodeAtDeadline, found: Mapping[str, Any]) -> dict[int, NodeAtDeadline]:
    """Exchanges the states of the nodes through files in the working directory.

    Takes at most `found["meeting_s"]` seconds. Returns the state of each node that has written its file. The key is the
    lowest waiting rank of the node.

    here: state of this node.
    found: the decoded JSON argument with which this file was started as a program.
    """
    known = {min(here.waiting): here} if here.waiting else {}
    if not known or found["meeting"] is None:
        return known
    begin = Path(found["meeting"])
    mine = begin.with_name(f"{begin.name}-{min(here.waiting)}")
    until = time.monotonic() + found["meeting_s"]
    try:
        partial = mine.with_name(f"{mine.name}.partial")
        partial.write_text(json.dumps(asdict(here)))
        partial.rename(mine)
        while (
            time.monotonic() < until
            and sum(len(node.waiting) for node in known.values()) < found["num_ranks"]
        ):
            for path in begin.parent.glob(f"{begin.name}-*"):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    known[int(path.name.rpartition("-")[2])] = NodeAtDeadline(**json.loads(path.read_text()))
            time.sleep(0.1)
    except OSError:
        return {min(here.waiting): here}
    finally:
        # The first one removes the files of the others, which may be killed before they do.
        for path in begin.parent.glob(f"{begin.name}-*") if min(known) == min(here.waiting) else [mine]:
            with contextlib.suppress(OSError):
                path.unlink()
    return known


def _describe_nodes(
    known: Mapping[int, NodeAtDeadline], here: NodeAtDeadline, found: Mapping[str, Any]
) -> list[str]:
    """Returns lines about the absent ranks of all nodes.

    known: state of each known node, from `_meet`.
    here: state of this node.
    found: the decoded JSON argument with which this file was started as a program.
    """
    if not known:
        return here.lines
    lines = [line for _, node in sorted(known.items()) for line in node.lines]
    waiting = sorted(rank for node in known.values() for rank in node.waiting)
    silent = set(range(found["num_ranks"])).difference(waiting, *(node.absent for node in known.values()))
    if len(known) > 1 and silent:
        lines.append(
            f"ranks {_listed(waiting)} wait. Absent, or started more than {found['meeting_s']:.1f} s after rank "
            f"{found['rank']}: {_listed(sorted(silent))}"
        )
    elif not lines and silent:
        lines.append(
            f"all ranks of {socket.gethostname()} wait ({_listed(here.waiting)}): the absent ranks are on other "
            "nodes, or the network between the nodes does not connect them (`hpctrain doctor` tests it)"
        )
    elif not lines:
        lines.append(
            "all ranks wait: the network between their nodes does not connect them (`hpctrain doctor` tests it)"
        )
    return lines


def describe_absent(folder: Path | None, found: Mapping[str, Any]) -> NodeAtDeadline:
    """Returns which ranks of this node wait, and which have not started, as far as this is known.

    folder: folder with the files of this node's ranks; None if it is unknown.
    found: the decoded JSON argument with which this file was started as a program.
    """
    from hpctrain.launch import command_of, processes_of_ranks

    if folder is None:
        cannot = (
            "from here it cannot be seen which ranks of this node have not started hpctrain (perhaps each rank runs "
            "in a separate container)"
        )
        return NodeAtDeadline(waiting=[], absent=[], num_ended=0, lines=[cannot])
    here = {int(path.name.removeprefix("rank-")): path for path in folder.glob("rank-*")}
    running = processes_of_ranks(found["pid"], variable=found["variable"])
    num_ranks, on_host = int(found["num_ranks"]), found["host_size"]
    if on_host == num_ranks:
        absent = [rank for rank in range(num_ranks) if rank not in here]
    else:
        absent = sorted(rank for rank in running if rank not in here)
    lines = []
    for rank in absent[:_RANKS_NAMED]:
        pid = running.get(rank)
        state = (
            "its process has ended"
            if pid is None
            else f"its process {pid} ({command_of(pid)}) runs, but has not started hpctrain"
        )
        lines.append(f"rank {rank} on {socket.gethostname()} is absent: {state}")
    if len(absent) > _RANKS_NAMED:
        lines.append(f"and {len(absent) - _RANKS_NAMED} more are absent: {_listed(absent[_RANKS_NAMED:])}")
    num_ended = len(set(absent).difference(running))
    num_gone = 0 if on_host is None or on_host == num_ranks else on_host - len(here) - len(absent)
    if num_gone > 0:
        local = {path.read_text() for path in here.values()}
        missing = [number for number in range(on_host) if str(number) not in local]
        lines.append(
            f"{num_gone} of the {on_host} ranks of {socket.gethostname()} have ended before they started hpctrain: "
            f"they are among local ranks {_listed(missing)}; the ranks that wait are {_listed(sorted(here))}"
        )
        num_ended += num_gone
    return NodeAtDeadline(waiting=sorted(here), absent=absent, num_ended=num_ended, lines=lines)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_RANKS_NAMED]))
    return shown + (f" and {len(numbers) - _RANKS_NAMED} more" if len(numbers) > _RANKS_NAMED else "")


if __name__ == "__main__":
    _report(json.loads(sys.argv[1]))
