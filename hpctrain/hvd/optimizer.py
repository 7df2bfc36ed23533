"""`hvd.DistributedOptimizer`: subclasses any PyTorch optimizer so that it reduces the gradients over the ranks."""

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
from hpctrain.hvd.gradient_reduction import GradientReduction, Named, Settings, reduce_deltas
from hpctrain.hvd.reductions import Adasum, Average, Compression, Compressor, chosen_op
from hpctrain.hvd.running import ProcessSet, global_process_set, gradient_group_of
from hpctrain.reduce import keep_layouts


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
    """Returns an optimizer that reduces the gradients over the ranks before it steps. Not collective.

    The class of the result is a subclass of the class of `optimizer`; state and parameter groups are the same objects.
    Gradients are reduced in buckets while `loss.backward()` runs, and `step()` waits for the reductions. A missing
    gradient counts as zeros. `step` and `synchronize` are collective over `process_set`; ranks outside of the set train
    alone. With `op=Adasum` each rank steps with its own gradients, and `step` combines the changes of the parameters.

    Args:
        optimizer: An optimizer of any class but LBFGS.
        named_parameters: A sequence of (name, parameter) for all parameters of the optimizer. The names are used in
            messages and compared between the ranks. None: numbers are used as names.
        compression: The format in which gradients are sent.
        backward_passes_per_step: The number of backward passes whose gradients are added up before they are reduced.
        op: Average, Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: A factor f that splits the division of an average in two. Gradients are divided by f
            before the sum, and by (number of ranks) / f after the sum.
        num_groups: Deprecated name of `groups`.
        groups: Lists of parameters that are reduced together, or the number of groups to form. None: buckets of 8 MiB.
        sparse_as_dense: Whether sparse gradients are reduced as dense tensors. Otherwise their entries are gathered.
        process_set: The ranks that take part.

    Returns:
        The optimizer.

    Raises:
        HorovodValueError: If an argument is invalid.
    """
    chosen = chosen_op(op, None)
    if gradient_predivide_factor != 1.0 and chosen is not Average:
        raise HorovodValueError(
            "gradient_predivide_factor is only for op=hvd.Average: leave it out, or use op=hvd.Average"
        )
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
    # The same parameter groups and state, so that a scheduler of `optimizer` also works here. `step` would be an
    # attribute of the instance where a scheduler has wrapped it.
    wrapped: Any = object.__new__(made)
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    named = None if named_parameters is None else list(named_parameters)
    wrapped._distribute(named, settings=settings, process_set=process_set)
    return wrapped


class _Distributed(torch.optim.Optimizer):
    """Base class of the optimizers that `DistributedOptimizer` returns; has the names of the parameters."""

    _named: list[Named]
    _settings: Settings
    _process_set: ProcessSet

    _has_names: bool

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter. Undocumented in Horovod, but programs read it from Horovod's optimizer."""
        prefix = "" if self._has_names else "allreduce.noname."
        return {parameter: f"{prefix}{name}" for name, parameter in self._named}

    @property
    def _alone(self) -> bool:
        return not self._process_set.included() or self._process_set.size() == 1

    def _distribute(self, named: list[Any] | None, *, settings: Settings, process_set: ProcessSet) -> None:
        self._settings, self._process_set = settings, process_set
        self._named = _checked_names(self.param_groups, named)
        self._has_names = named is not None
        keep_layouts(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, whose gradients are reduced too. Call it on all ranks, between two steps."""
        super().add_param_group(param_group)
        known = {id(parameter) for _, parameter in self._named}
        first = len(self._named)
        added = [p for p in self.param_groups[-1]["params"] if id(p) not in known]
        self._named += [(f"added.{first + place}", parameter) for place, parameter in enumerate(added)]


class _Reducing(_Distributed):
    """Reduces the gradients before each step. Its methods are those of Horovod's DistributedOptimizer."""

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
        """Changes the number of backward passes per step, from the next step on."""
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
        """Waits until all gradients are reduced, for example to clip them. Collective over the process set."""
        if self._reduction is not None:
            self._reduction.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes `step` inside the `with` block reduce nothing, since `synchronize` was called before."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients, then steps. Collective over the process set.

        If `synchronize()` was called before, outside of `skip_synchronize()`, this reduces the gradients again and
        warns, as Horovod does.

        Args:
            closure: A function that computes the loss and its gradients. It is called once, before the gradients are
                reduced.

        Returns:
            The result of `closure`, or None.
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
        """Sets the gradients to zero or None.

        Raises UsageError while the gradients are being reduced: between backward and `step`.
        """
        if self._reduction is not None and self._reduction.begun:
            raise UsageError(
                "zero_grad() was called after backward and before step() or synchronize(): the gradients are being "
                "reduced"
            )
        super().zero_grad(*arguments, **options)


class _Combining(_Distributed):
    """Steps on each rank with its own gradients, and combines the changes of the parameters by Adasum."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing, since gradients are accumulated until `step` in any case."""

    def synchronize(self) -> None:
        """Does nothing, since gradients are not reduced."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise UsageError("with op=hvd.Adasum the changes are combined in step(), which cannot be skipped")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps with this rank's gradients, then combines the changes of all ranks. Collective over the process set."""
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
            "named_parameters must be a sequence of pairs (name, parameter): pass model.named_parameters()"
        )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise HorovodValueError(
            f"named_parameters has these names more than once: {', '.join(repeated)}: give each name once"
        )
    name_of = {id(parameter): name for name, parameter in named}
    missing = [place for place, parameter in parameters if id(parameter) not in name_of]
    if missing:
        raise HorovodValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters: give all of them. The first is "
            f"{missing[0]} (parameter group and index in it)"
        )
    return [(name_of[id(parameter)], parameter) for _, parameter in parameters]


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list):
        raise HorovodValueError(f"groups is {groups!r}: give a number above 0, or lists of parameters")
    members = [parameter for of_group in groups for parameter in of_group]
    if any(not isinstance(parameter, torch.Tensor) for parameter in members):
        raise HorovodValueError("groups contains an object that is not a parameter: give lists of parameters")
    if len({id(parameter) for parameter in members}) < len(members):
        raise HorovodValueError("a parameter is in groups more than once: put each parameter into one group")
