"""The values of the recipe's key `reduction.schedule`: when ranks synchronise, and how. Pure.

The words are the same in a recipe and in `Session.distributed_optimizer(..., schedule=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

from hpctrain.errors import UsageError
from hpctrain.reduce.wire_formats import AUTO, encodes_every_value, wire_format


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSgd:
    """Local SGD: each rank updates its own parameters, and the ranks average them every `every` steps.

    With `from_step` > 0 this is post-local SGD: the first steps are synchronous.

    Sources: Stich 2019, arXiv:1805.09767; post-local: Lin et al. 2020, arXiv:1808.07217.

    Attributes:
        every: Number of steps between two averages.
        from_step: Number of synchronous steps before the first local step.
        wire: Wire format of the averaged changes of the parameters; one that encodes every value.
    """

    METHOD: ClassVar[str] = "local-sgd"

    every: int
    from_step: int = 0
    wire: str = "fp32"

    def __post_init__(self) -> None:
        _check_steps(self, every=self.every, from_step=self.from_step)
        _check_wire(self, self.wire)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCo:
    """DiLoCo: local steps as in local SGD; every `every` steps an outer Nesterov SGD steps on the mean change.

    Source: Douillard et al. 2023, arXiv:2311.08105, whose values are the defaults of the outer optimizer.

    Attributes:
        every: Number of steps between two outer steps.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer; 0: no momentum.
        from_step: Number of synchronous steps before the first local step.
        wire: Wire format of the changes of the parameters (outer gradients); one that encodes every value.
    """

    METHOD: ClassVar[str] = "diloco"

    every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    from_step: int = 0
    wire: str = "fp32"

    def __post_init__(self) -> None:
        _check_steps(self, every=self.every, from_step=self.from_step)
        if not 0 < self.outer_lr < math.inf:
            raise UsageError(f"{_of(self, 'outer_lr')} is {self.outer_lr}: give a finite number above 0")
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(
                f"{_of(self, 'outer_momentum')} is {self.outer_momentum}: give a number from 0 to below 1"
            )
        _check_wire(self, self.wire)


@dataclass(frozen=True, kw_only=True, slots=True)
class Daso:
    """DASO: the ranks of a node sum gradients in each step; nodes average parameters, while the next steps run.

    Source: Coquelin et al. 2022, doi:10.1186/s40537-021-00556-1 (arXiv:2104.05588).

    Attributes:
        every: Number of steps between the starts of two averages.
        wait: Number of steps that run while an average is on its way; less than `every`. 0: training waits for it.
        from_step: Number of synchronous steps before (the paper's warm-up).
        wire: Wire format of the changes of the parameters between nodes; one that encodes every value.
    """

    METHOD: ClassVar[str] = "daso"

    every: int
    wait: int = 1
    from_step: int = 0
    wire: str = "fp32"

    def __post_init__(self) -> None:
        _check_steps(self, every=self.every, from_step=self.from_step)
        if not 0 <= self.wait < max(self.every, 1):
            raise UsageError(
                f"{_of(self, 'wait')} is {self.wait}: an average must arrive before the next one starts, so give a "
                f"number from 0 to below every = {self.every}"
            )
        _check_wire(self, self.wire)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adasum:
    """Adasum: in each step the ranks' gradients are combined by a rule that adds what differs instead of by a mean.

    Gradients are combined before the optimizer's step, for each parameter by itself; see `hpctrain.reduce.adasum`.

    Source: Maleki et al. 2020, arXiv:2006.02924.

    Attributes:
        within_node: What happens within a node. "adasum": the gradients of all ranks are combined by Adasum, as
            Horovod does on CPUs. "mean": the ranks of a node average their gradients, and Adasum combines the means of
            the nodes, as Horovod does with NCCL.
    """

    METHOD: ClassVar[str] = "adasum"

    within_node: str = "adasum"

    def __post_init__(self) -> None:
        if self.within_node not in ("adasum", "mean"):
            raise UsageError(
                f"{_of(self, 'within_node')} is {self.within_node!r}: choose 'adasum', which combines the gradients of "
                "all ranks, or 'mean', which averages within a node first"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ssp:
    """Bounded staleness (stale synchronous parallel): ranks read parameters from servers, which may lag by some steps.

    Each server holds a part of the parameters and of the optimizer's state. A rank that computes for step c (its
    clock) reads parameters that contain the updates of all steps up to c - staleness - 1 of every rank.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS.

    Attributes:
        staleness: How many steps may be missing from the parameters that are read. 0: synchronous training. "any": no
            rank waits for another, and the servers step after each global batch of samples that has arrived.
        servers: World ranks that only serve; the other ranks only train. "all": every rank serves a part and trains.
    """

    METHOD: ClassVar[str] = "ssp"

    staleness: int | str
    servers: str | tuple[int, ...] = "all"

    def __post_init__(self) -> None:
        staleness, servers = self.staleness, self.servers
        if staleness != "any" and not (_is_index(staleness)):
            raise UsageError(
                f"{_of(self, 'staleness')} is {staleness!r}: give a number of steps of 0 or more, or 'any'"
            )
        valid = servers == "all" or (
            isinstance(servers, tuple) and len(servers) and all(map(_is_index, servers))
        )
        if not valid or (servers != "all" and len(set(servers)) < len(servers)):
            raise UsageError(
                f"{_of(self, 'servers')} is {servers!r}: give 'all', or a list of different ranks such as [0]"
            )


Schedule: TypeAlias = LocalSgd | DiLoCo | Daso | Adasum | Ssp
# Schedules with local steps: the ranks update parameters alone between two synchronisations.
LocalSteps: TypeAlias = LocalSgd | DiLoCo | Daso

METHODS: Mapping[str, type[Schedule]] = {kind.METHOD: kind for kind in (LocalSgd, DiLoCo, Daso, Adasum, Ssp)}

# The types of a table's values, by the annotation of the key.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "int | str": (int, str),
    "str | tuple[int, ...]": (str, tuple, list),
}


def parse_schedule(given: Schedule | Mapping[str, Any] | None) -> Schedule | None:
    """Returns the schedule that `given` describes.

    Args:
        given: The table of a recipe's key `reduction.schedule`, such as `{"method": "local-sgd", "every": 50}`; or a
            schedule, which is returned unchanged. None: every step is synchronous.

    Raises:
        UsageError: The method or a key is unknown, a key is missing, or a value is out of its range.
    """
    if given is None or isinstance(given, LocalSgd | DiLoCo | Daso | Adasum | Ssp):
        return given
    if not isinstance(given, Mapping):
        raise UsageError(
            f"schedule is {given!r}: give a table such as {{'method': 'local-sgd', 'every': 50}}, or None"
        )
    method = given.get("method")
    kind = METHODS.get(method) if isinstance(method, str) else None
    if kind is None:
        raise UsageError(f"schedule: the method {method!r} is unknown: choose one of {', '.join(METHODS)}")
    valid = {field.name: field for field in fields(kind)}
    settings = {key: value for key, value in given.items() if key != "method"}
    unknown = sorted(map(str, settings.keys() - valid.keys()))
    if unknown:
        raise UsageError(
            f"schedule {method}: there is no key {', '.join(unknown)}; valid here: method, {', '.join(valid)}"
        )
    missing = [name for name, field in valid.items() if field.default is MISSING and name not in settings]
    if missing:
        raise UsageError(f"schedule {method}: {missing[0]} is missing; see the reference of recipes")
    for key, value in settings.items():
        if not isinstance(value, _TYPES[str(valid[key].type)]) or isinstance(value, bool):
            raise UsageError(f"schedule {method}: {key} is {value!r}: give a value of type {valid[key].type}")
    make: Callable[..., Schedule] = kind
    return make(**{k: tuple(value) if isinstance(value, list) else value for k, value in settings.items()})


def table_of(schedule: Schedule) -> dict[str, Any]:
    """Returns the schedule as the table that `parse_schedule` reads."""
    return {"method": schedule.METHOD, **asdict(schedule)}


def _of(schedule: Schedule, key: str) -> str:
    return f"schedule {schedule.METHOD}: {key}"


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_steps(schedule: Schedule, *, every: int, from_step: int) -> None:
    if every < 1:
        raise UsageError(f"{_of(schedule, 'every')} is {every}: give a number of steps of 1 or more")
    if from_step < 0:
        raise UsageError(f"{_of(schedule, 'from_step')} is {from_step}: give a number of steps of 0 or more")


def _check_wire(schedule: Schedule, wire: str) -> None:
    if wire != AUTO:
        wire_format(wire)  # raises an error with the valid names
    if not encodes_every_value(wire):
        raise UsageError(
            f"{_of(schedule, 'wire')} is {wire!r}, which does not send every change of a parameter: choose a wire "
            "format that does, such as fp32, fp16 or int8"
        )
