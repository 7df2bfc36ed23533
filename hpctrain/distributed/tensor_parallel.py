"""Tensor parallelism: splits layers over several ranks with PyTorch's DTensor styles.

A `column` layer computes a part of its outputs on each rank; a `row` layer takes such a part as its input, and its
outputs are summed over the ranks (Shoeybi et al. 2019, arXiv:1909.08053). Layers that the plan does not name are held
whole, and every rank of the group computes the same in them. With sequence parallelism each rank computes in these
layers only its part of the sequence.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hpctrain.distributed.blocks import matches
from hpctrain.distributed.plan import TensorPlan
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# Sequence parallelism: between split layers each rank of a tensor group computes a part of the sequence.
#
# Features have the sequence along the last dimension but one, shape (..., sequence, width), indices of an
# embedding along the last. Source: Korthikanti et al. 2022, arXiv:2205.05198.


@final
class SequenceParts:
    """Converts between whole sequences and equal parts of them, in forward and in backward.

    mesh: the ranks of a tensor group, a mesh with one axis. Collective methods are collective in backward too.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._num_parts, self._index = mesh.size(), mesh.get_local_rank()

    def check(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns `indices`, shape (..., sequence), unchanged.

        Raises UsageError if the sequence cannot be divided into equal parts.
        """
        length = indices.shape[-1]
        if length % self._num_parts:
            raise UsageError(
                f"sequence = true with tensor = {self._num_parts}: a sequence of {length} positions cannot be split "
                f"into {self._num_parts} equal parts. Use sequences of {length - length % self._num_parts} "
                "positions, or leave sequence out"
            )
        return indices

    def part(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of `indices`, shape (..., sequence). Raises the error of `check`.

        Does not communicate.
        """
        return self.check(indices).chunk(self._num_parts, dim=-1)[self._index].contiguous()

    def as_input(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the whole sequence of features, for a layer of which this rank computes some outputs. Collective.

        part: this rank's part of the sequence of features.

        The gradient on each rank covers only the outputs of that rank. Backward sums the gradients over the ranks, and
        splits the sum along the sequence again.
        """
        from torch.distributed.tensor import Partial

        return self._gathered(part).to_local(grad_placements=(Partial(),))

    def sharing_gradient(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `rows`, a result of `as_input`, as a DTensor. Does not communicate.

        Backward of `as_input` sums the gradient of this DTensor over the ranks.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate

        return DTensor.from_local(rows, self._mesh, (Replicate(),), grad_placements=(Partial(),))

    def as_output(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the whole sequence of features, for layers in which every rank computes the same.

        part: this rank's part of the sequence of features.

        Collective in forward only.
        """
        return self._gathered(part).to_local()

    def summed(self, features: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part, along the sequence, of the sum of all ranks' features. Collective."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        whole = DTensor.from_local(features, self._mesh, (Partial(),))
        return whole.redistribute(placements=(Shard(features.dim() - 2),)).to_local()

    def drop_as_whole(self, module: nn.Dropout) -> None:
        """Makes a dropout module draw random numbers for the whole sequence, but use only those for this rank's part.

        All ranks of the group draw the same numbers, so that their generators stay equal and the result equals that of
        one rank.
        """
        module.forward = functools.partial(self._dropped, module, module.forward)  # type: ignore[method-assign]

    def _dropped(
        self, module: nn.Dropout, forward: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor
    ) -> torch.Tensor:
        if not module.training:
            return forward(part)
        *others, places, width = part.shape
        factors = forward(part.new_ones(*others, places * self._num_parts, width))
        # Copied: backward would keep the factors of the whole sequence.
        return part * factors.chunk(self._num_parts, dim=-2)[self._index].clone()

    def _gathered(self, part: torch.Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        features = DTensor.from_local(part, self._mesh, (Shard(part.dim() - 2),))
        return features.redistribute(placements=(Replicate(),))


# Tensor parallelism.


_DIMENSIONS = {
    (nn.Linear, "column"): "out_features",
    (nn.Linear, "column-gathered"): "out_features",
    (nn.Linear, "row"): "in_features",
    (nn.Embedding, "column-gathered"): "embedding_dim",
    (nn.Embedding, "row"): "num_embeddings",
}
_ON_PARTS = ("sequence", "sequence-gathered")
_STYLES = ("column", "column-gathered", "row", *_ON_PARTS)
_SPLIT = "_hpctrain_tensor_split"


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSplit:
    """How `parallelize` has split a model with tensor > 1.

    mesh: the mesh of all ranks. Its last axis is `tensor`; the axes before it are data parallel.
    by_fsdp: whether FSDP2 has sharded the parameters. If so, FSDP2 sums gradients over the data-parallel ranks;
    otherwise the updater does.
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
        """True on the one rank of a tensor group that counts and saves data of which all ranks hold equal copies."""
        return not any(self.mesh.get_coordinate() or ())

    def data_group(self) -> Any:
        """Returns the process group over which the updater sums gradients; None if no sum is needed."""
        return None if self.by_fsdp or self.num_data_ranks == 1 else self.mesh.get_group("data")

    def tensor_group(self) -> Any:
        """Returns the process group of the ranks that share each layer."""
        return self.mesh.get_group("tensor")


def split_of(model: nn.Module) -> TensorSplit | None:
    """Returns how `parallelize` has split the model's layers; None if they are not split."""
    found: TensorSplit | None = getattr(model, _SPLIT, None)
    return found


def mark_split(model: nn.Module, split: TensorSplit) -> None:
    """Stores on the model what `split_of` returns."""
    setattr(model, _SPLIT, split)


def split_layers(model: nn.Module, plan: TensorPlan, *, mesh: DeviceMesh, sequence: bool = False) -> None:
    """Replaces the parameters that `plan` splits with DTensors over the axis `tensor` of `mesh`, in place.

    Collective over each tensor group; the parameter values of the first rank of the group are used. `plan` must have
    passed `check_tensor_plan`.

    sequence: whether norms, dropout and other modules with the style `sequence` are computed on parts of the sequence.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    entries = _resolve(model, plan, sequence=sequence)
    parts = SequenceParts(mesh["tensor"]) if sequence else None
    modules = {name: model.get_submodule(name) for name in entries}
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    after: dict[str, list[_Change]] = {}
    # Around the hooks of `parallelize_module`: before the first and after the last.
    for name, module in modules.items():
        before, after[name] = _changes(module, entries[name].how, parts=parts)
        for change in before:
            module.register_forward_pre_hook(lambda _, args, change=change: (change(*args),))
    styles = {
        name: _style_of(module, entries[name].how, sequence=sequence)
        for name, module in modules.items()
        if not isinstance(module, nn.Dropout)
    }
    parallelize_module(model, mesh["tensor"], styles)
    for name, module in modules.items():
        for change in after[name]:
            module.register_forward_hook(lambda _, args, output, change=change: change(output))
        if parts is not None and isinstance(module, nn.Dropout):
            parts.drop_as_whole(module)
    for name in fixed:  # `SequenceParallel` makes parameters that require gradients
        model.get_parameter(name).requires_grad_(False)


_Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def _changes(
    module: nn.Module, how: str, *, parts: SequenceParts | None
) -> tuple[list[_Change], list[_Change]]:
    """Returns the functions that are applied to a module's input, and those applied to its output, in order.

    how: style by which the plan splits the module.
    parts: converts parts of sequences; None without sequence parallelism.
    """
    before: list[_Change] = []
    after: list[_Change] = []
    if isinstance(module, nn.Linear):
        rows = _Rows()
        before, after = [rows.flatten], [rows.restore]
    if parts is not None and isinstance(module, nn.Embedding):
        before = [parts.part if how in _ON_PARTS else parts.check]
    elif parts is not None and how in ("column", "column-gathered"):
        before = [parts.as_input, *before, parts.sharing_gradient]
    elif parts is not None and how == "row":
        after.append(parts.summed)
    if parts is not None and how == "sequence-gathered":
        after.append(parts.as_output)
    return before, after


class _Rows:
    """Flattens the input of a linear layer to a matrix, and restores the shape of its output.

    DTensor cannot reshape an input that has several dimensions and no samples.
    """

    def __init__(self) -> None:
        self._shape = torch.Size()  # of one call: recomputation may end a forward before `restore`

    def flatten(self, features: torch.Tensor) -> torch.Tensor:
        self._shape = features.shape[:-1]
        return features.flatten(0, -2) if features.dim() > 2 else features

    def restore(self, output: torch.Tensor) -> torch.Tensor:
        return output.unflatten(0, self._shape) if len(self._shape) > 1 else output


def check_tensor_plan(model: nn.Module, plan: TensorPlan, *, tensor: int, sequence: bool = False) -> None:
    """Raises UsageError if the modules that `plan` names cannot be split over `tensor` ranks. Does not communicate.

    The plan is described at `TensorParallelTask.tensor_plan`.

    sequence: whether modules are also computed on parts of the sequence; otherwise the entries `sequence` and
    `sequence-gathered` are ignored.
    """
    entries = _resolve(model, plan, sequence=sequence)
    shared = _shared_parameters(model)
    for name, entry in entries.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding) and (module.padding_idx, module.max_norm) != (None, None):
            raise UsageError(
                f"{name} has padding_idx or max_norm, with which it cannot be split: make it without these"
            )
        if entry.how in _ON_PARTS:
            _check_on_parts(module, entry, name=name)
        else:
            _check_split(module, entry, name=name, tensor=tensor)
        for parameter, _ in module.named_parameters(prefix=name):
            if parameter in shared:
                raise UsageError(
                    f"{parameter} and {shared[parameter]} share one tensor, but tensor_plan splits only {name}: "
                    f"untie them, or leave {name} out of the plan"
                )
    if sequence:
        _check_sequence(model, entries, tensor=tensor)


def _check_split(module: nn.Module, entry: _Entry, *, name: str, tensor: int) -> None:
    """Raises UsageError if a layer cannot be split over `tensor` ranks."""
    dimension = _dimension(module, entry.how)
    if dimension is None:
        raise UsageError(
            f"tensor_plan splits {name}, {type(module).__name__}, by {entry.how!r}: it can split an nn.Linear by "
            "'column', 'column-gathered' or 'row', an nn.Embedding by 'column-gathered' or 'row'"
        )
    size = int(getattr(module, dimension))
    parts = entry.parts or size
    if size % parts:
        raise UsageError(
            f"tensor_plan: {dimension} = {size} of {name} cannot be divided into {parts} equal parts"
        )
    if parts % tensor:
        what = f"{dimension} = {size}" if entry.parts is None else f"the {parts} parts (heads) of {dimension}"
        raise UsageError(f"tensor = {tensor} does not divide {what} of {name}: change one of the two")


def _check_on_parts(module: nn.Module, entry: _Entry, *, name: str) -> None:
    """Raises UsageError if a module cannot be computed on a part of the sequence."""
    what = f"tensor_plan computes {name}, {type(module).__name__}, by {entry.how!r}"
    if any(True for _ in module.children()):
        raise UsageError(f"{what}: name the modules within it instead")
    if isinstance(module, _BatchNorm):
        raise UsageError(
            f"{what}, but its statistics are over whole sequences: use another normalisation, such as nn.LayerNorm"
        )
    if isinstance(module, _DropoutNd) and not isinstance(module, nn.Dropout):
        raise UsageError(f"{what}: use nn.Dropout, which drops each element by itself")


def _check_sequence(model: nn.Module, entries: Mapping[str, _Entry], *, tensor: int) -> None:
    """Raises UsageError if `entries` lack a module that they must name, or if a sequence cannot be divided evenly.

    Each module with parameters and each dropout must be named. For a module without an entry it would be unknown
    whether its gradients are those of the whole sequence or of a part.
    """
    absent = [
        name
        for name, module in model.named_modules()
        if name not in entries
        and (isinstance(module, _DropoutNd) or any(p is not None for p in module._parameters.values()))
    ]
    if absent:
        shown = ", ".join(name or "the model itself" for name in absent[:8])
        raise UsageError(
            f"sequence = true: tensor_plan does not name {shown}{', ...' if len(absent) > 8 else ''}. It must name "
            "each module that has parameters of its own, and each dropout: give the modules that are not split the "
            "style 'sequence', and the last of these modules 'sequence-gathered'"
        )
    if not any(isinstance(model.get_submodule(name), nn.Embedding) for name in entries):
        raise UsageError(
            "sequence = true: sequences are split where an nn.Embedding takes indices, but tensor_plan names none: "
            "leave sequence out"
        )
    for name, entry in entries.items():
        if entry.how in _ON_PARTS and entry.parts is not None and entry.parts % tensor:
            raise UsageError(
                f"sequence = true: tensor = {tensor} does not divide the sequence of {entry.parts} positions of "
                f"{name}: change one of the two, or leave sequence out"
            )


def tensor_styles(model: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """Returns how each module that `plan` splits is split, by name: `column`, `column-gathered` or `row`.

    Raises UsageError for names that the model does not have.
    """
    return {name: entry.how for name, entry in _resolve(model, plan, sequence=False).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """How one module is split.

    parts: for a split layer, the number of parts that must not be cut, such as heads; None if the layer may be cut
    between any features. For a module that is computed on parts of the sequence, the length of the sequence; None if it
    is unknown.
    pattern: the pattern of the plan that matched the module.
    """

    how: str
    parts: int | None
    pattern: str


def _resolve(model: nn.Module, plan: TensorPlan, *, sequence: bool) -> dict[str, _Entry]:
    """Returns the entry of each module that the plan's patterns match, by name. Raises UsageError.

    Modules that are computed on parts of the sequence are included only if `sequence` is True.
    """
    found: dict[str, _Entry] = {}
    modules = [name for name, _ in model.named_modules() if name]
    for pattern, given in plan.items():
        how, parts = (given, None) if isinstance(given, str) else given
        if how not in _STYLES:
            raise UsageError(f"tensor_plan splits {pattern} by {how!r}: choose one of {', '.join(_STYLES)}")
        if parts is not None and parts < 1:
            raise UsageError(
                f"tensor_plan splits {pattern} into {parts} parts: give a number of parts, such as heads, of at least 1"
            )
        matching = [name for name in modules if matches(name, pattern)]
        if not matching:
            shown = ", ".join(modules[:12]) + (", ..." if len(modules) > 12 else "")
            raise UsageError(f"tensor_plan names {pattern!r}, which the model does not have; it has {shown}")
        for name in matching:
            if name in found:
                raise UsageError(
                    f"tensor_plan names {name} twice, by {found[name].pattern!r} and {pattern!r}"
                )
            found[name] = _Entry(how=how, parts=parts, pattern=pattern)
    return {name: entry for name, entry in found.items() if sequence or entry.how not in _ON_PARTS}


def _shared_parameters(model: nn.Module) -> dict[str, str]:
    """Returns a map from each name of a parameter with several names to another name of the same parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: same[name == same[0]] for same in names.values() if len(same) > 1 for name in same}


def _dimension(module: nn.Module, how: str) -> str | None:
    """Returns the name of the module's attribute with the size of the dimension that is split by the style `how`.

    Returns None if the module cannot be split by this style.
    """
    return next(
        (name for (kind, style), name in _DIMENSIONS.items() if style == how and isinstance(module, kind)),
        None,
    )


def _style_of(module: nn.Module, how: str, *, sequence: bool) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    embedding = isinstance(module, nn.Embedding)
    if how in _ON_PARTS:
        # The dimension along which the sequence runs, for a matrix, for indices and for features.
        dimension = 0 if isinstance(module, nn.Linear) else -1 if embedding else -2
        return SequenceParallel(sequence_dim=dimension, use_local_output=True)
    if how == "column":
        return ColwiseParallel()
    if how == "column-gathered":
        return ColwiseParallel(output_layouts=Shard(-2) if embedding and sequence else Replicate())
    if not embedding:
        return RowwiseParallel(output_layouts=Partial()) if sequence else RowwiseParallel()
    # The rows of an embedding are its vocabulary: every rank looks up all indices and finds those that it holds.
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-2) if sequence else Replicate())


def replicated_over_tensor_ranks(tensor: torch.Tensor) -> bool:
    """Returns True if every rank of a tensor group holds the same data of the parameter `tensor`."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
        return True
    placement = tensor.placements[mesh.mesh_dim_names.index("tensor")]  # type: ignore[attr-defined]
    return bool(placement.is_replicate())
