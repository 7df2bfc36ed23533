"""`hvd.DistributedOptimizer`: an optimizer of the given class, whose gradients are reduced over the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hpctrain.errors import UsageError
from hpctrain.hvd.errors import HorovodValueError
from hpctrain.hvd.gradient_buckets import GradientReduction, Named, Settings, reduce_deltas
from hpctrain.hvd.reductions import Adasum, Average, Compression, Compressor, chosen_op
from hpctrain.hvd.running import ProcessSet, global_process_set, gradient_group_of


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[Named] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns an optimizer of the class of `optimizer`, with its state and parameter groups, that reduces gradients.

    Gradients are reduced in buckets while `loss.backward()` runs; `step()` waits for them. A parameter without a
    gradient counts as zeros. Not collective; `step` and `synchronize` are, over `process_set`; other ranks train alone.

    named_parameters: names for messages and comparisons; all of the optimizer's, or None. backward_passes_per_step:
    gradients are accumulated on each rank before they are reduced. gradient_predivide_factor: an average is divided by
    it before the sum, and by ranks / factor after. groups: lists of parameters that are reduced together, or a number
    of groups. sparse_as_dense: sparse gradients are reduced as dense ones; otherwise their entries are gathered.
    op: with Adasum each rank steps alone, and the changes of the parameters are combined in `step`.
    Raises HorovodValueError for wrong arguments.
    """
    chosen = chosen_op(op, None)
    if gradient_predivide_factor != 1.0 and chosen is not Average:
        raise HorovodValueError("gradient_predivide_factor divides an average: use op=hvd.Average")
    if backward_passes_per_step < 1:
        raise HorovodValueError(f"backward_passes_per_step is {backward_passes_per_step}: give at least 1")
    if num_groups:
        warnings.warn("num_groups is an old name of groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HorovodValueError(
            "DistributedOptimizer of LBFGS is not supported: it computes gradients many times in a step"
        )
    if process_set.process_set_id is None:
        gradient_group_of(process_set)  # raises
    settings = Settings(
        op=chosen, compression=compression, passes=backward_passes_per_step, groups=groups,
        prescale=1.0 / gradient_predivide_factor, postscale=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
    )  # fmt: skip
    base: type[torch.optim.Optimizer] = type(optimizer)
    mixin = _Combining if chosen is Adasum else _Reducing
    made = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    # The same parameter groups and state, so that a scheduler of `optimizer` is one of this. `step` would be an
    # attribute of the instance where a scheduler has wrapped it.
    wrapped: Any = object.__new__(made)
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    named = None if named_parameters is None else list(named_parameters)
    wrapped._distribute(named, settings=settings, process_set=process_set)
    return wrapped


class _Distributed(torch.optim.Optimizer):
    """What both kinds share: names of the parameters, and whether this rank has others to reduce with."""

    _named: list[Named]
    _settings: Settings
    _process_set: ProcessSet

    _has_names: bool

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Name of each parameter, as programs read it from Horovod's optimizer, though it is not documented."""
        prefix = "" if self._has_names else "allreduce.noname."
        return {parameter: f"{prefix}{name}" for name, parameter in self._named}

    @property
    def _alone(self) -> bool:
        return not self._process_set.included() or self._process_set.size() == 1

    def _distribute(self, named: list[Any] | None, *, settings: Settings, process_set: ProcessSet) -> None:
        self._settings, self._process_set = settings, process_set
        self._named = _checked_names(self.param_groups, named)
        self._has_names = named is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which are reduced too. Call it on all ranks between two steps."""
        super().add_param_group(param_group)
        known = {id(parameter) for _, parameter in self._named}
        first = len(self._named)
        added = [p for p in self.param_groups[-1]["params"] if id(p) not in known]
        self._named += [(f"added.{first + place}", parameter) for place, parameter in enumerate(added)]


class _Reducing(_Distributed):
    """Reduces gradients before it steps. Methods and their meaning are those of Horovod's DistributedOptimizer."""

    _reduction: GradientReduction | None = None
    _synchronized = False
    _synchronizes = True

    def _distribute(self, named: list[Any] | None, *, settings: Settings, process_set: ProcessSet) -> None:
        super()._distribute(named, settings=settings, process_set=process_set)
        self._reduction = None
        if not self._alone:
            self._reduction = self._made_reduction()

    def _made_reduction(self) -> GradientReduction:
        return GradientReduction(
            self._named, group=lambda: gradient_group_of(self._process_set), settings=self._settings
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes come before a reduction, from the next step on."""
        self._settings = dataclasses.replace(self._settings, passes=passes)
        if self._reduction is not None:
            self._reduction.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = self._made_reduction()

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        if self._reduction is not None:
            self._reduction.reset()
        self._synchronized, self._synchronizes = False, True
        super().load_state_dict(*arguments, **options)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced: for clipping, for one. Collective over the process set."""
        if self._reduction is not None:
            self._reduction.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In the `with` block `step` reduces nothing, since `synchronize` was called before."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients and steps. Collective over the process set. closure: called once, before that.

        After `synchronize()` outside of `skip_synchronize()` it reduces again, with a warning, as Horovod does.
        """
        if not self._synchronizes:
            self._synchronized = False
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                "gradients are reduced again",
                stacklevel=2,
            )
        self.synchronize()
        self._synchronized = False
        super().step()
        return loss

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Raises UsageError between backward and `step` or `synchronize`, while gradients are being reduced."""
        if self._reduction is not None and self._reduction.begun:
            raise UsageError(
                "zero_grad() was called after backward and before step() or synchronize(): the gradients are being "
                "reduced"
            )
        super().zero_grad(*arguments, **options)


class _Combining(_Distributed):
    """Steps on each rank alone, and combines the changes of the parameters by Adasum."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: gradients are accumulated until `step`."""

    def synchronize(self) -> None:
        """Does nothing: gradients stay this rank's."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise UsageError("with op=hvd.Adasum the changes are combined in step(), which cannot be skipped")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps with this rank's gradients, and combines the changes. Collective over the process set."""
        if self._alone:
            return super().step(closure)
        trained = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        parameters = [parameter for _, parameter in trained]
        before = [parameter.detach().clone() for parameter in parameters]
        loss = super().step(closure)
        deltas = [parameter.detach() - start for parameter, start in zip(parameters, before, strict=True)]
        deltas = reduce_deltas(
            trained,
            deltas,
            group=gradient_group_of(self._process_set),
            compression=self._settings.compression,
            op=Adasum,
        )
        with torch.no_grad():
            for parameter, start, delta in zip(parameters, before, deltas, strict=True):
                parameter.copy_(start + delta)
        return loss


def _checked_names(param_groups: Sequence[dict[str, Any]], named: list[Any] | None) -> list[Named]:
    """Returns the optimizer's parameters with their names, in the optimizer's order."""
    parameters = [
        (f"{place}.{index}", parameter)
        for place, of_group in enumerate(param_groups)
        for index, parameter in enumerate(of_group["params"])
    ]
    if named is None:
        return parameters
    if any(not isinstance(entry, tuple) for entry in named):
        raise HorovodValueError(
            "named_parameters is a sequence of (name, parameter): model.named_parameters()"
        )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise HorovodValueError(f"named_parameters has these names more than once: {', '.join(repeated)}")
    name_of = {id(parameter): name for name, parameter in named}
    missing = [place for place, parameter in parameters if id(parameter) not in name_of]
    if missing:
        raise HorovodValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters; the first is number "
            f"{missing[0]} (group and place)"
        )
    return [(name_of[id(parameter)], parameter) for _, parameter in parameters]


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list):
        raise HorovodValueError(f"groups is {groups!r}: give a number above 0, or lists of parameters")
    members = [parameter for of_group in groups for parameter in of_group]
    if any(not isinstance(parameter, torch.Tensor) for parameter in members):
        raise HorovodValueError("groups has something that is not a parameter")
    if len({id(parameter) for parameter in members}) < len(members):
        raise HorovodValueError("a parameter is in more than one of the groups")
