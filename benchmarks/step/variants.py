"""The measured cells and their variants. Pure functions.

A cell is a recipe on a number of ranks at a place. A variant is a method of training it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ONE_NODE_ALGORITHMS = ("auto", "flat", "ring", "direct", "hierarchical")
# On one node these two are replaced by `hierarchical` and `flat`.
ALGORITHMS = (*ONE_NODE_ALGORITHMS, "hierarchical-ring", "hierarchical-flat")
# A sum of hpctrain's own, which needs the backend only for control messages.
OWN_SUM = "hierarchical"
BACKENDS = ("mpi", "horovod")
ONE_RANK_BACKENDS = ("serial", *BACKENDS)
RATES = ("1gbit", "200mbit")
RANKS_PER_NODE = 2

DEFAULT = "default"
FLAT = "horovod/flat, no saves"
PEER = "hvd.DistributedOptimizer"
YIELDING_PEER = "hvd.DistributedOptimizer, yielding"
BEST_HOROVOD = "hvd.DistributedOptimizer, fused"
BEST_YIELDING = "hvd.DistributedOptimizer, yielding, fused"
DDP = "DDP on Gloo"
BEST_DDP = "DDP on Gloo, fused, best settings"
PEERS_AS_THEY_COME = (PEER, YIELDING_PEER, DDP)
PEERS_AT_THEIR_BEST = (*PEERS_AS_THEY_COME, BEST_HOROVOD, BEST_YIELDING, BEST_DDP)
ALONE = "2 ranks that never communicate"
ONE_RANK = "1 rank"
ONE_THREAD = "1 rank, 1 thread"

NO_SAVES = "checkpoint.every_steps=1000000000"
# One thread for each of two ranks: users of Horovod set this themselves, `hpctrain launch` does it for its ranks.
THREADS = ("OMP_NUM_THREADS", "1")
# A variable of Open MPI: waiting ranks yield their core.
YIELD = ("OMPI_MCA_mpi_yield_when_idle", "1")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A method of training.

    overrides: of the recipe, as for `--set`. loop: the library with which `peer_loop.py` runs, "" for `hpctrain train`;
    "alone": each rank by itself on its share of every batch. best: whether that loop has the fastest settings of its
    library. by_mpirun: whether mpirun starts it, as Horovod's users do, instead of `hpctrain launch`. environment:
    variables that the user sets. calibrates: whether it measures the links at its start; then it is started again for
    each link rate.
    """

    name: str
    num_ranks: int
    overrides: tuple[str, ...] = ()
    loop: str = ""
    best: bool = False
    by_mpirun: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    calibrates: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A recipe on a number of ranks at a place.

    own: the recipe's `reduction.algorithm`. rates: link rates of the cluster; (None,) on this machine. steps: length
    of a turn, a multiple of the steps between checkpoints, so that every turn has equally many checkpoints.
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
    for recipe, own, steps in (
        ("digits", "hierarchical", 100), ("characters", "hierarchical", 50), ("convolutions", "auto", 50),
    ):  # fmt: skip
        cell = Cell(name=f"{recipe}-1", recipe=recipe, num_ranks=1, own=own, steps=steps)
        made += [replace(cell, name=f"{recipe}-{ranks}", num_ranks=ranks) for ranks in (1, 2, 4)]
        made.append(replace(cell, name=f"{recipe}-4x{RANKS_PER_NODE}", num_ranks=8, rates=RATES))
    return {cell.name: cell for cell in made}


CELLS = _cells()


def default_of(cell: Cell) -> Variant:
    """Returns the variant with the unchanged recipe."""
    return Variant(name=DEFAULT, num_ranks=cell.num_ranks, calibrates=cell.own == "auto")


def candidates(cell: Cell) -> list[Variant]:
    """Returns a variant for each backend and algorithm that runs in this cell without being replaced by another one."""
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
    """Returns the other variants that the cell's figures need: plain Horovod, DDP and hpctrain's `flat` over Horovod,
    all without checkpoints, and one rank."""
    if cell.num_ranks == 1:
        return []
    ranks = cell.num_ranks
    flat = ("run.backend=horovod", "reduction.algorithm=flat", NO_SAVES)
    found = [Variant(name=FLAT, num_ranks=ranks, overrides=flat)]
    if ranks != 2:
        # With more ranks than cores, polling ranks would starve each other without these settings of `hpctrain launch`.
        return [
            *found,
            Variant(name=PEER, num_ranks=ranks, loop="horovod"),
            Variant(name=BEST_HOROVOD, num_ranks=ranks, loop="horovod", best=True),
            Variant(name=DDP, num_ranks=ranks, loop="ddp"),
            Variant(name=BEST_DDP, num_ranks=ranks, loop="ddp", best=True),
        ]
    plain, yielding = (THREADS,), (THREADS, YIELD)
    return [
        *found,
        *(
            Variant(name=name, num_ranks=ranks, loop=loop, best=best, by_mpirun=True, environment=environment)
            for name, loop, best, environment in (
                (PEER, "horovod", False, plain),
                (YIELDING_PEER, "horovod", False, yielding),
                (BEST_HOROVOD, "horovod", True, plain),
                (BEST_YIELDING, "horovod", True, yielding),
                (DDP, "ddp", False, plain),
                (BEST_DDP, "ddp", True, plain),
                (ALONE, "alone", True, plain),
            )
        ),
        Variant(name=ONE_RANK, num_ranks=1),
        Variant(name=ONE_THREAD, num_ranks=1, environment=(THREADS,)),
    ]


def named_pair() -> tuple[str, str]:
    """Returns the names of one sum of our own over Horovod and over MPI. `auto` might choose another over each."""
    return f"horovod/{OWN_SUM}", f"mpi/{OWN_SUM}"


def finalists(cell: Cell, rates: dict[str, float], *, count: int = 2) -> list[str]:
    """Returns the candidates with the most samples/s in the screening, best first. rates: without those that failed."""
    names = [variant.name for variant in candidates(cell) if variant.name in rates]
    return sorted(names, key=lambda name: -rates[name])[:count]


def decided(cell: Cell, rates: dict[str, float]) -> list[str]:
    """Returns the variants that take part in the rounds: the default, the finalists, and others that figures need."""
    names = [DEFAULT, *finalists(cell, rates), *(variant.name for variant in companions(cell))]
    if cell.num_ranks > 1:
        names += named_pair()
    return [name for name in dict.fromkeys(names) if name in rates]
