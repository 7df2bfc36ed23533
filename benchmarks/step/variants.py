"""What is measured: the cells, and the variants of each. Pure.

A cell is a recipe on a number of ranks at a place. A variant is one way to train it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ONE_NODE_ALGORITHMS = ("auto", "flat", "ring", "direct", "hierarchical")
# On one node these two run as `hierarchical` and as `flat`.
ALGORITHMS = (*ONE_NODE_ALGORITHMS, "hierarchical-ring", "hierarchical-flat")
BACKENDS = ("mpi", "horovod")
ONE_RANK_BACKENDS = ("serial", *BACKENDS)
RATES = ("1gbit", "200mbit")
RANKS_PER_NODE = 2

DEFAULT = "default"
FLAT = "horovod/flat, no saves"
PEER = "hvd.DistributedOptimizer"
YIELDING_PEER = "hvd.DistributedOptimizer, yielding"
ALONE = "2 ranks that never communicate"
ONE_RANK = "1 rank"
ONE_THREAD = "1 rank, 1 thread"

NO_SAVES = "checkpoint.every_steps=1000000000"
# A core for each of two ranks: Horovod's users set this themselves, `hpctrain launch` does it for its own.
THREADS = ("OMP_NUM_THREADS", "1")
# Open MPI's own variable: ranks give their core away while they wait.
YIELD = ("OMPI_MCA_mpi_yield_when_idle", "1")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train.

    overrides: of the recipe, as `--set` takes them. peer: the loop of `horovod_loop.py` instead of `hpctrain train`.
    alone: that loop without Horovod, each rank by itself on its share of every batch.
    by_mpirun: started by mpirun as Horovod's users do it, instead of `hpctrain launch`. environment: set by the user.
    calibrates: it measures the links when it starts, so it starts anew when they change.
    """

    name: str
    num_ranks: int
    overrides: tuple[str, ...] = ()
    peer: bool = False
    alone: bool = False
    by_mpirun: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    calibrates: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A recipe on a number of ranks at a place.

    own: the algorithm that the recipe names. rates: of the cluster's links; (None,) on this machine. steps: of one
    turn, a multiple of the steps from one checkpoint to the next, so that every turn has as many.
    """

    name: str
    recipe: str
    num_ranks: int
    own: str
    steps: int
    rates: tuple[str | None, ...] = (None,)

    @property
    def on_cluster(self) -> bool:
        return self.rates != (None,)

    @property
    def figure(self) -> str:
        return f"step.{self.name}"


def _cells() -> dict[str, Cell]:
    made = []
    for recipe, steps in (("digits", 100), ("characters", 50)):
        cell = Cell(name=f"{recipe}-1", recipe=recipe, num_ranks=1, own="hierarchical", steps=steps)
        made += [replace(cell, name=f"{recipe}-{ranks}", num_ranks=ranks) for ranks in (1, 2, 4)]
        made.append(replace(cell, name=f"{recipe}-4x{RANKS_PER_NODE}", num_ranks=8, rates=RATES))
    return {cell.name: cell for cell in made}


CELLS = _cells()


def default_of(cell: Cell) -> Variant:
    """The recipe as it stands."""
    return Variant(name=DEFAULT, num_ranks=cell.num_ranks, calibrates=cell.own == "auto")


def candidates(cell: Cell) -> list[Variant]:
    """Every backend and algorithm that can be named and runs as itself in this cell."""
    if cell.num_ranks == 1:
        return [
            Variant(name=backend, num_ranks=1, overrides=(f"run.backend={backend}",))
            for backend in ONE_RANK_BACKENDS
        ]
    return [
        Variant(
            name=f"{backend}/{algorithm}",
            num_ranks=cell.num_ranks,
            overrides=(f"run.backend={backend}", f"reduction.algorithm={algorithm}"),
            calibrates=algorithm == "auto",
        )
        for backend in BACKENDS
        for algorithm in (ALGORITHMS if cell.on_cluster else ONE_NODE_ALGORITHMS)
    ]


def companions(cell: Cell) -> list[Variant]:
    """What else the cell's figures need: Horovod itself and our `flat` over it, neither with checkpoints; one rank."""
    if cell.num_ranks == 1:
        return []
    ranks = cell.num_ranks
    flat = ("run.backend=horovod", "reduction.algorithm=flat", NO_SAVES)
    found = [Variant(name=FLAT, num_ranks=ranks, overrides=flat)]
    if ranks != 2:
        # More ranks than cores: without what `hpctrain launch` sets there they would starve each other.
        return [*found, Variant(name=PEER, num_ranks=ranks, peer=True)]
    return [
        *found,
        Variant(name=PEER, num_ranks=ranks, peer=True, by_mpirun=True, environment=(THREADS,)),
        Variant(name=YIELDING_PEER, num_ranks=ranks, peer=True, by_mpirun=True, environment=(THREADS, YIELD)),
        Variant(name=ALONE, num_ranks=2, peer=True, alone=True, by_mpirun=True, environment=(THREADS,)),
        Variant(name=ONE_RANK, num_ranks=1),
        Variant(name=ONE_THREAD, num_ranks=1, environment=(THREADS,)),
    ]


def named_pair(cell: Cell) -> tuple[str, str]:
    """The recipe's own algorithm over Horovod and over MPI."""
    return f"horovod/{cell.own}", f"mpi/{cell.own}"


def finalists(cell: Cell, rates: dict[str, float], *, count: int = 2) -> list[str]:
    """The candidates with the most samples/s in the screening, best first; those that failed are not in `rates`."""
    names = [variant.name for variant in candidates(cell) if variant.name in rates]
    return sorted(names, key=lambda name: -rates[name])[:count]


def decided(cell: Cell, rates: dict[str, float]) -> list[str]:
    """What takes part in the rounds that the figures are of: the default, the finalists, and what else they need."""
    names = [DEFAULT, *finalists(cell, rates), *(variant.name for variant in companions(cell))]
    if cell.num_ranks > 1:
        names += named_pair(cell)
    return [name for name in dict.fromkeys(names) if name in rates]
