"""Tensor parallelism: several ranks hold the parts of one layer, by PyTorch's DTensor styles.

A `column` layer computes a part of its output on each rank, a `row` layer takes such a part as its input and sums the
outputs over the ranks (Shoeybi et al. 2019, arXiv:1909.08053). What no plan names every rank of the group holds whole
and computes alike.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.distributed.plan import TensorPlan
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DIMENSIONS = {
    (nn.Linear, "column"): "out_features",
    (nn.Linear, "column-gathered"): "out_features",
    (nn.Linear, "row"): "in_features",
    (nn.Embedding, "column-gathered"): "embedding_dim",
    (nn.Embedding, "row"): "num_embeddings",
}
_STYLES = ("column", "column-gathered", "row")
_SPLIT = "_hpctrain_tensor_split"


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSplit:
    """How a model is split that `parallelize` has split with tensor > 1.

    mesh: over all ranks; its last axis is `tensor`, those before it are data parallel. by_fsdp: FSDP2 has
    sharded the parameters and sums gradients over the data-parallel ranks; otherwise they are still to be summed.
    """

    mesh: DeviceMesh
    by_fsdp: bool

    @property
    def num_data_ranks(self) -> int:
        return self.mesh.size() // self.num_tensor_ranks

    @property
    def num_tensor_ranks(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def is_first(self) -> bool:
        """True on the one rank that counts and saves what every rank holds."""
        return not any(self.mesh.get_coordinate() or ())

    def data_group(self) -> Any:
        """Returns the process group over which gradients are still to be summed; None if there is no such."""
        return None if self.by_fsdp or self.num_data_ranks == 1 else self.mesh.get_group("data")

    def tensor_group(self) -> Any:
        """Returns the process group of the ranks that hold one layer."""
        return self.mesh.get_group("tensor")


def split_of(model: nn.Module) -> TensorSplit | None:
    """Returns how `parallelize` has split the layers of a model; None if it has not."""
    found: TensorSplit | None = getattr(model, _SPLIT, None)
    return found


def mark_split(model: nn.Module, split: TensorSplit) -> None:
    """Makes `split_of` return `split` for the model."""
    setattr(model, _SPLIT, split)


def split_layers(model: nn.Module, plan: TensorPlan, *, mesh: DeviceMesh) -> None:
    """Replaces the parameters of the modules that `plan` names by DTensors over the axis `tensor` of `mesh`, in place.

    Collective over each tensor group, whose first rank's values are taken. `plan` has passed `check_tensor_plan`.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    entries = _resolve(model, plan)
    styles = {name: _style_of(model.get_submodule(name), entry.how) for name, entry in entries.items()}
    linear = [module for name in entries if isinstance(module := model.get_submodule(name), nn.Linear)]
    # Around those of `parallelize_module`: before the first and after the last.
    rows = [_Rows(module) for module in linear]
    parallelize_module(model, mesh["tensor"], styles)
    for module, its_rows in zip(linear, rows, strict=True):
        module.register_forward_hook(its_rows.restore)


class _Rows:
    """Gives a linear layer its input as a matrix: DTensor cannot reshape one of no samples and several dimensions."""

    def __init__(self, module: nn.Module) -> None:
        self._shape = torch.Size()  # one: recomputed activations may end a forward before `restore`
        module.register_forward_pre_hook(self.flatten)

    def flatten(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (features,) = args
        self._shape = features.shape[:-1]
        return (features.flatten(0, -2) if features.dim() > 2 else features,)

    def restore(self, module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.unflatten(0, self._shape) if len(self._shape) > 1 else output


def check_tensor_plan(model: nn.Module, plan: TensorPlan, *, tensor: int) -> None:
    """Raises UsageError, with what to change, if the modules that `plan` names cannot be split over `tensor` ranks.

    plan: by name of a module, in which `*` stands for any text without a dot: `column` (each rank has some of the
    outputs, which a `row` module takes), `row` (some of the inputs; outputs are summed), or `column-gathered` (some of
    the outputs, which all ranks then receive); or that and the number of equal parts that stay whole, such as heads.
    """
    shared = _shared_parameters(model)
    for name, entry in _resolve(model, plan).items():
        module = model.get_submodule(name)
        dimension = _dimension(module, entry.how)
        if dimension is None:
            raise UsageError(
                f"tensor_plan splits {name}, {type(module).__name__}, by {entry.how!r}: it can split an nn.Linear by "
                "'column', 'column-gathered' or 'row', an nn.Embedding by 'column-gathered' or 'row'"
            )
        if isinstance(module, nn.Embedding) and (module.padding_idx, module.max_norm) != (None, None):
            raise UsageError(
                f"{name} has padding_idx or max_norm, with which it cannot be split: make it without"
            )
        for parameter, _ in module.named_parameters(prefix=name):
            if parameter in shared:
                raise UsageError(
                    f"{parameter} and {shared[parameter]} are one parameter, which tensor_plan would split with {name} "
                    f"only: untie them, or leave {name} out of the plan"
                )
        size = int(getattr(module, dimension))
        parts = entry.parts or size
        if size % parts:
            raise UsageError(
                f"tensor_plan: {dimension} = {size} of {name} does not consist of {parts} equal parts"
            )
        if parts % tensor:
            what = (
                f"{dimension} = {size}"
                if entry.parts is None
                else f"the {parts} parts (heads) of {dimension}"
            )
            raise UsageError(f"tensor = {tensor} does not divide {what} of {name}: change one of the two")


def tensor_styles(model: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """Returns how each module that `plan` splits is split, by name: `column`, `column-gathered` or `row`.

    Raises UsageError for names that the model lacks.
    """
    return {name: entry.how for name, entry in _resolve(model, plan).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """How one module is split. parts: that stay whole; None: each feature is one. pattern: that named it."""

    how: str
    parts: int | None
    pattern: str


def _resolve(model: nn.Module, plan: TensorPlan) -> dict[str, _Entry]:
    """Returns how each module that the plan's patterns match is split, by name. Raises UsageError."""
    found: dict[str, _Entry] = {}
    modules = [name for name, _ in model.named_modules() if name]
    for pattern, given in plan.items():
        how, parts = (given, None) if isinstance(given, str) else given
        if how not in _STYLES:
            raise UsageError(f"tensor_plan splits {pattern} by {how!r}: choose one of {', '.join(_STYLES)}")
        if parts is not None and parts < 1:
            raise UsageError(
                f"tensor_plan splits {pattern} into {parts} parts: give their number, such as heads"
            )
        matching = [name for name in modules if _matches(name, pattern)]
        if not matching:
            shown = ", ".join(modules[:12]) + (", ..." if len(modules) > 12 else "")
            raise UsageError(f"tensor_plan names {pattern!r}, which the model does not have; it has {shown}")
        for name in matching:
            if name in found:
                raise UsageError(
                    f"tensor_plan names {name} twice, by {found[name].pattern!r} and {pattern!r}"
                )
            found[name] = _Entry(how=how, parts=parts, pattern=pattern)
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _shared_parameters(model: nn.Module) -> dict[str, str]:
    """Returns the names of parameters that have several, each with another of its names."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: same[name == same[0]] for same in names.values() if len(same) > 1 for name in same}


def _dimension(module: nn.Module, how: str) -> str | None:
    """Returns the attribute with the size of the dimension that is split; None if the module cannot be split so."""
    return next(
        (name for (kind, style), name in _DIMENSIONS.items() if style == how and isinstance(module, kind)),
        None,
    )


def _style_of(module: nn.Module, how: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if how == "column":
        return ColwiseParallel()
    if how == "column-gathered":
        return ColwiseParallel(output_layouts=Replicate())
    # The rows of an embedding are those of its vocabulary: every rank looks up all indices and finds its own.
    return (
        RowwiseParallel(input_layouts=Replicate()) if isinstance(module, nn.Embedding) else RowwiseParallel()
    )


def replicated_over_tensor_ranks(tensor: torch.Tensor) -> bool:
    """Returns True if every rank of a tensor group holds the same part of a parameter, or all of it."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
        return True
    placement = tensor.placements[mesh.mesh_dim_names.index("tensor")]  # type: ignore[attr-defined]
    return bool(placement.is_replicate())
