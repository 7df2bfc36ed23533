"""Steps of hpctrain's layouts and optimizers and of the peers, as programs of their own that take turns in rounds."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.parallel.layouts import LAYOUTS, of_figure
from benchmarks.places import OnCluster, RanksFailed
from benchmarks.reduction.suite import USE_RING, YIELD
from benchmarks.starting import LAUNCH, REPOSITORY, Ended, Start, start_of, user_environment
from benchmarks.turns import Training, mpirun

# ---------------------------------------------------------------------- methods

OUR_INTERFACE = "hpctrain.hvd"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of training that is timed: a layout of hpctrain's, a DistributedOptimizer, or another peer.

    layout: of hpctrain's, or None. interface: the module whose `DistributedOptimizer` a Horovod script uses; empty if
    it is no Horovod script. mpi: settings of Open MPI that its user makes, names in `OPEN_MPI`.
    wire: of the gradients. divides_samples: whether several ranks compute one sample together: tensor groups and
    pipelines. They are compared with each other only.
    """

    name: str
    what: str
    layout: str | None = None
    interface: str = ""
    mpi: tuple[str, ...] = ()
    wire: str = "fp32"
    divides_samples: bool = False

    @property
    def is_ours(self) -> bool:
        return self.layout is not None or self.interface == OUR_INTERFACE


PEERS = {
    method.name: method
    for method in (
        Method(name="ddp", what="DDP"),
        Method(name="ddp-fp16", what="DDP, fp16 hook", wire="fp16"),
        Method(name="zero", what="DDP and ZeroRedundancyOptimizer"),
        Method(name="fsdp2", what="FSDP2"),
        Method(name="tensor", what="tensor groups of 2 by parallelize_module", divides_samples=True),
        Method(name="pipeline", what="pipeline of 2, 1F1B of torch.distributed.pipelining", divides_samples=True),
    )
}  # fmt: skip
OURS = {
    method.name: method
    for layout in of_figure("4")
    for wire in layout.timed_wires
    for method in (
        Method(name=f"ours-{layout.name}{'' if wire == 'fp32' else f'-{wire}'}",
               what=f"{layout.what}{'' if wire == 'fp32' else f', {wire}'}", layout=layout.name, wire=wire,
               divides_samples=layout.tensor * layout.pipeline > 1),
    )
}  # fmt: skip
METHODS = {**OURS, **PEERS}


_OF_OPEN_MPI = {"ring": "with Open MPI's ring", "yielding": "yielding"}


def _optimizers(wire: str) -> list[Method]:
    """Returns those of figure 7 with one wire: hpctrain's, and Horovod's as it comes and with settings of Open MPI."""
    suffix, sent = ("", "") if wire == "fp32" else (f"-{wire}", f", {wire}")
    ours = Method(name=f"hvd{suffix}", what=f"hpctrain.hvd{sent}", interface=OUR_INTERFACE, wire=wire)
    choices: list[tuple[str, ...]] = [(), ("ring",), ("yielding",), ("ring", "yielding")]
    theirs = [
        Method(
            name="-".join(["horovod", *chosen]) + suffix,
            what=", ".join([f"horovod.torch{sent}", *(_OF_OPEN_MPI[one] for one in chosen)]),
            interface="horovod.torch",
            mpi=chosen,
            wire=wire,
        )
        for chosen in choices
    ]
    return [ours, *theirs]


# Of figure 7, by wire: those with different wires do not take turns, nothing compares them.
OPTIMIZERS_IN_TURNS = [_optimizers("fp32"), _optimizers("fp16")]
OPTIMIZERS = {method.name: method for methods in OPTIMIZERS_IN_TURNS for method in methods}
# On several ranks of several nodes the ranks of all methods, which live at the same time, need too much memory for one
# machine: what is left out is timed with one rank on each node.
_ON_TWO_LEVELS = (
    "ours-none", "ours-gradients", "ours-parameters-node", "ours-tensor-2", "ours-pipeline-2", "ddp", "zero", "fsdp2",
    "tensor", "pipeline",
)  # fmt: skip


def methods_at(*, num_nodes: int, ranks_per_node: int) -> dict[str, Method]:
    """Returns name -> method, of those that are timed on so many ranks."""
    fitting = {
        layout.name
        for layout in of_figure("4")
        if layout.fits(num_ranks=num_nodes * ranks_per_node, num_nodes=num_nodes)
        and (num_nodes == 1 or ranks_per_node >= layout.ranks_per_node)
    }
    peers = {LAYOUTS[name].peer for name in fitting}
    names = METHODS if num_nodes == 1 or ranks_per_node == 1 else _ON_TWO_LEVELS
    return {
        name: method
        for name, method in ((name, METHODS[name]) for name in names)
        if method.layout in fitting
        or (method.layout is None and (name in peers or not method.divides_samples))
    }


def in_turns(methods: Mapping[str, Method]) -> list[list[Method]]:
    """Returns the groups of methods whose ranks live at the same time and that take turns, in the order of the names.

    Two groups, so that fewer ranks need memory at the same time: nothing compares methods of different groups.
    """
    groups = ([m for m in methods.values() if m.divides_samples == divides] for divides in (False, True))
    return [group for group in groups if group]


# ---------------------------------------------------------------------- programs

MODULE = "benchmarks.parallel.timed_ranks"
OPEN_MPI: dict[str, Mapping[str, str]] = {"ring": USE_RING, "yielding": YIELD}
END = "end"
_FIRST_PORT = 29_500  # what torch's documentation shows


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a user types, and in which environment. variables: those that the benchmark sets; `environ` has them."""

    argv: list[str]
    typed: list[str]
    environ: Mapping[str, str]
    variables: Mapping[str, str]


def on_node(method: Method, directory: Path, *, num_ranks: int) -> Command:
    """Returns the command that starts a method on this machine.

    hpctrain's ranks are started by `hpctrain launch`, Horovod's by mpirun as its documentation says, torch's by
    torchrun.
    """
    program = ["-m", MODULE, method.name, str(directory)]
    variables = _variables(method)
    environ = {**user_environment(), **variables}
    if method.is_ours:
        typed = [*LAUNCH, "-n", str(num_ranks), "--", sys.executable, *program]
    elif method.interface:
        typed = [*mpirun(num_ranks), sys.executable, *program]
        if os.geteuid() == 0:  # as `hpctrain launch` does
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        typed = [sys.executable, *torchrun, *program]
        variables = {"GLOO_SOCKET_IFNAME": "lo"}
        environ |= variables
    return Command(argv=typed, typed=typed, environ=environ, variables=variables)


def _variables(method: Method) -> dict[str, str]:
    """Returns the environment variables that the user of a Horovod script sets; none for hpctrain's."""
    if method.is_ours or not method.interface:
        return {}
    of_mpi = {name: value for key in method.mpi for name, value in OPEN_MPI[key].items()}
    return {"OMP_NUM_THREADS": "1", **of_mpi}


def on_cluster(method: Method, directory: Path, *, place: OnCluster, number: int) -> Command:
    """Returns the command that starts a method in a Slurm job with one core of each node.

    srun starts a peer's ranks: Horovod's with PMIx, torch's with its env:// initialisation. number: number of the
    method; peers that run at the same time have ports of their own.
    """
    program = [sys.executable, "-m", MODULE, method.name, str(directory)]
    nodes, on_each = place.num_nodes, place.ranks_per_node
    variables = _variables(method)
    if method.is_ours:
        ranks = ["-n", str(nodes * on_each), "--ranks-per-node", str(on_each)]
        typed = [*place.job(), *LAUNCH, *ranks, "--", *program]
    else:
        pmix = ["--mpi=pmix"] if method.interface else []
        tasks = [f"--nodes={nodes}", f"--ntasks={nodes * on_each}", f"--ntasks-per-node={on_each}"]
        options = ["--distribution=block", "--kill-on-bad-exit=1", "--overcommit"]
        typed = [*place.job(), "srun", *pmix, *tasks, *options, *program]
        if method.interface:
            variables["SLURM_PMIX_FENCE"] = "ring"  # as slurm/train.sbatch says
        else:
            variables |= {
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": place.cluster.node_names[0], "MASTER_PORT": str(_FIRST_PORT + number),
            }  # fmt: skip
    argv = place.cluster.argv(typed, cwd=REPOSITORY)
    return Command(argv=argv, typed=typed, environ={**place.environment(), **variables}, variables=variables)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Seconds of a step in a turn, on the slowest rank. exposed_s: of it without computing, on the rank that waited
    most; None where that is not known."""

    step_s: float
    exposed_s: float | None


class Program:
    """The ranks of a method. directory: its own, which all ranks see. timeout_s: of the start, and of a turn. idle_s: a
    rank that waits longer for its turn ends. Raises RanksFailed with their last lines.

    The ranks of all methods live at the same time and wait for their turns asleep. Those of a Horovod script are
    stopped between their turns: Horovod's thread and Open MPI poll even when there is nothing to do.
    """

    def __init__(
        self, method: Method, directory: Path, *, num_ranks: int, settings: Mapping[str, Any], timeout_s: float,
        idle_s: float,
    ) -> None:  # fmt: skip
        self.method, self.directory = method, directory
        self._num_ranks, self._timeout_s, self._turn = num_ranks, timeout_s, 0
        directory.mkdir()
        (directory / "settings.json").write_text(json.dumps({**settings, "idle_s": idle_s}))
        self.training = Training(method.name, mark=str(directory), log=directory / "log")

    def start(self, command: Command) -> tuple[float, Start]:
        """Starts the ranks and waits for the end of their warm-up steps. Returns the loss of the last one, the mean of
        the ranks, and how they were started."""
        self.training.launch(command.argv, environ=command.environ)
        ready = self._wait_for("ready-{}.json")
        ended = Ended(returncode=0, stdout="", stderr="\n".join(self.training.lines()))
        start = start_of(
            command.typed, ended, variables=command.variables, ranks=[one["facts"] for one in ready],
            directory=self.directory,
        )  # fmt: skip
        return fmean(one["loss"] for one in ready), start

    def turn(self) -> Turn:
        """Has the ranks take a turn."""
        (self.directory / f"turn-{self._turn}").touch()
        self.training.resume()
        found = self._wait_for(f"done-{self._turn}-{{}}.json")
        self._turn += 1
        exposed = [one["exposed_s"] for one in found if one["exposed_s"] is not None]
        return Turn(step_s=max(one["step_s"] for one in found), exposed_s=max(exposed, default=None))

    def end(self) -> None:
        """Ends the ranks."""
        (self.directory / END).touch()
        self.training.end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wait_for(self, name: str) -> list[Any]:
        """Returns the contents of a file of each rank, when all are there. Stops the ranks of a Horovod script."""
        paths = [self.directory / name.format(rank) for rank in range(self._num_ranks)]
        self.training.wait_until(
            lambda: all(path.exists() for path in paths), within_s=self._timeout_s, what=lambda: "not ready"
        )
        if self.method.interface:
            self.training.stop()
        return [json.loads(path.read_text()) for path in paths]


# ---------------------------------------------------------------------- rounds

# Of the loss after the warm-up steps, between methods: 16 bits on the wire change it by less, ranks that do not reduce
# by more.
TOLERANCE = 5e-4
# Free memory without which a method is not started: of each of its ranks, and of the machine besides.
RANK_BYTES = 350_000_000
_REST_BYTES = 1_000_000_000


@dataclass(kw_only=True)
class Rounds:
    """Result of timing methods in turns.

    turns: by link rate and method, the turn of each round. failed: by method, its error. starts: how the ranks of each
    method were started.
    """

    turns: dict[str, dict[str, list[Turn]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TurnTaking:
    """How methods take turns.

    command: how to start a method, with its folder and its number. directory: in which each method has a folder.
    settings: `workload`, `batch`, `warmup` and `steps` of a turn. rates: name -> function that sets the links' rate.
    timeout_s: of a start and of a turn. idle_s: ranks that wait longer end.
    """

    command: Callable[[Method, Path, int], Command]
    directory: Path
    num_ranks: int
    settings: Mapping[str, Any]
    rates: Mapping[str, Callable[[], None]]
    num_rounds: int
    seed: int
    timeout_s: float
    idle_s: float


def take_rounds(groups: Sequence[Sequence[Method]], turns: TurnTaking) -> Rounds:
    """Starts the methods of a group, takes rounds at each rate, and ends them; then those of the next group.

    A method that fails, trains something else than the others, or would need memory that is not there is left out and
    named in `failed`.
    """
    found = Rounds(turns={rate: {} for rate in turns.rates})
    losses: dict[str, float] = {}
    order, numbers = random.Random(turns.seed), count()
    for methods in groups:
        programs: dict[str, Program] = {}
        try:
            for method in methods:
                _start(method, turns, number=next(numbers), programs=programs, losses=losses, found=found)
            for name, error in wrong_losses(losses).items():
                if name in programs:
                    _drop(name, error, programs, found)
            for rate, set_rate in turns.rates.items():
                set_rate()
                taken: dict[str, list[Turn]] = {name: [] for name in programs}
                for _ in range(turns.num_rounds):
                    for name in order.sample(list(programs), len(programs)):
                        try:
                            taken[name].append(programs[name].turn())
                        except RanksFailed as error:
                            _drop(name, str(error), programs, found)
                found.turns[rate] |= {name: taken[name] for name in programs}
        finally:
            for program in programs.values():
                program.end()
    return found


def _start(
    method: Method, turns: TurnTaking, *, number: int, programs: dict[str, Program], losses: dict[str, float],
    found: Rounds,
) -> None:  # fmt: skip
    """Starts a method, and adds its program, loss and start, or its failure."""
    if missing := missing_memory(Path("/proc/meminfo").read_text(), num_ranks=turns.num_ranks):
        found.failed[method.name] = missing
        return
    program = Program(
        method, turns.directory / method.name, num_ranks=turns.num_ranks, settings=turns.settings,
        timeout_s=turns.timeout_s, idle_s=turns.idle_s,
    )  # fmt: skip
    programs[method.name] = program
    try:
        losses[method.name], start = program.start(turns.command(method, program.directory, number))
    except RanksFailed as error:
        _drop(method.name, str(error), programs, found)
        return
    found.starts.append(start)


def _drop(name: str, error: str, programs: dict[str, Program], found: Rounds) -> None:
    found.failed[name] = error
    programs.pop(name).end()


def missing_memory(meminfo: str, *, num_ranks: int) -> str:
    """Returns why so many ranks are not started, if memory is short; otherwise an empty text.

    meminfo: of Linux. A machine without free memory ends any process, not only the one that asks for more.
    """
    available = next(line.split()[1] for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    free, needed = 1024 * int(available), num_ranks * RANK_BYTES + _REST_BYTES
    if free >= needed:
        return ""
    return f"not started: {num_ranks} ranks need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def wrong_losses(losses: Mapping[str, float]) -> dict[str, str]:
    """Returns the methods whose loss differs from the median of all, so that their times are not valid, and why."""
    if not losses:
        return {}
    # Without NaN, whose place in a sorted list depends on the version of Python.
    middle = median([loss for loss in losses.values() if loss == loss] or [math.nan])
    return {
        name: f"its loss is {loss} after the same steps, that of others {middle}"
        for name, loss in losses.items()
        if not abs(loss / middle - 1) < TOLERANCE
    }
