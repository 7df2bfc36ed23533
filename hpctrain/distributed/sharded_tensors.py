"""Describes sharded tensors (DTensor) as boxes (offset and shape) of global tensors.

Does not import PyTorch's DTensor in programs that do not use it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hpctrain.distributed.plan import ShardKind
from hpctrain.distributed.tensor_parallel import split_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Stored, not derived from the parameters: after a forward without backward FSDP2 holds some of them whole.
_SHARD = "_hpctrain_shard"
_MESH = "_hpctrain_shard_mesh"
# The axis of a mesh along which ranks hold different tensors: the stages of a pipeline.
PIPELINE_AXIS = "pipeline"
# The meshes over which models are split, the newest last. With several trainings in a process the last one counts.
_MESHES: list[DeviceMesh] = []
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape)


def is_sharded_tensor(tensor: Any) -> bool:
    """Returns True for a DTensor, of which each rank holds a part."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh")


def is_sharded(model: torch.nn.Module) -> bool:
    """Returns True if `parallelize` has sharded the model's parameters or split its layers.

    Every forward and backward of such a model is collective.
    """
    return shard_of(model) == "parameters" or split_of(model) is not None


def shard_of(model: torch.nn.Module) -> ShardKind:
    """Returns what `parallelize` has sharded: `none`, `optimizer`, `gradients` or `parameters` (see `ParallelPlan`)."""
    shard: ShardKind = getattr(model, _SHARD, "none")
    return shard


def mark_sharded(model: torch.nn.Module, shard: ShardKind, *, mesh: DeviceMesh | None = None) -> None:
    """Stores on the model what was sharded, and over which mesh: `shard_of` and `shard_mesh_of` then return it."""
    setattr(model, _SHARD, shard)
    setattr(model, _MESH, mesh)


def shard_mesh_of(model: torch.nn.Module) -> DeviceMesh | None:
    """Returns the mesh over which `parallelize` has sharded the model's parameters; None if they are not sharded.

    The mesh of a parameter may be another object with the same ranks, since PyTorch reuses the mesh of an earlier
    model.
    """
    mesh: DeviceMesh | None = getattr(model, _MESH, None)
    return mesh


def note_mesh(mesh: DeviceMesh) -> None:
    """Records `mesh`, the mesh of all ranks over which a model will be split; `is_first_replica` needs it."""
    if mesh in _MESHES:
        _MESHES.remove(mesh)
    _MESHES.append(mesh)
    _is_first_along_others.cache_clear()


def local_part(tensor: Any) -> torch.Tensor:
    """Returns this rank's part of a DTensor, without a copy. Other tensors are returned unchanged."""
    part: torch.Tensor = tensor.to_local() if is_sharded_tensor(tensor) else tensor
    return part


def device_of(model: torch.nn.Module) -> torch.device:
    """Returns the device on which the model computes. The parameters may be kept in host memory (`offload`)."""
    for parameter in model.parameters():
        if is_sharded_tensor(parameter) and parameter.device_mesh.device_type == "cuda":  # type: ignore[attr-defined]
            return torch.device("cuda", torch.cuda.current_device())
        return parameter.device
    return torch.device("cpu")


def box_of(tensor: Any) -> Box:
    """Returns the box of a DTensor, as (offset, shape) in the whole tensor, that this rank holds.

    The box may be empty if the tensor is small.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def is_first_replica(tensor: Any) -> bool:
    """Returns True on exactly one of the ranks that hold the same part of a DTensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not all(
        index == 0
        or not placement.is_replicate()  # not is_shard: FSDP2 places parts of parts by _StridedShard
        for index, placement in zip(coordinate, tensor.placements, strict=True)
    ):
        return False
    return _is_first_along_others(mesh)


@functools.lru_cache(maxsize=64)
def _is_first_along_others(mesh: DeviceMesh) -> bool:
    """Returns True if this rank has index 0 on all axes of the whole mesh that `mesh` lacks, except the pipeline axis.

    A DTensor on some axes of a larger mesh has equal replicas along the other axes.
    """
    whole = next((noted for noted in reversed(_MESHES) if _has_part(noted, mesh)), None)
    if whole is None:  # the program's own
        whole = _root_of(mesh)
    if whole.mesh_dim_names is None:
        return True  # `mesh` is the whole, since PyTorch cuts axes out by name
    others = set(whole.mesh_dim_names) - set(mesh.mesh_dim_names or ()) - {PIPELINE_AXIS}
    places = zip(whole.mesh_dim_names, whole.get_coordinate() or (), strict=True)
    return not any(index for name, index in places if name in others)


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh from which `mesh` was sliced, or `mesh` itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # of PyTorch 2.8

    root: DeviceMesh = _mesh_resources.get_root_mesh(mesh)
    return root


def _has_part(whole: DeviceMesh, mesh: DeviceMesh) -> bool:
    """Returns True if `mesh` is the slice of `whole` through this rank along some axes.

    The root mesh of `mesh` does not tell this. PyTorch replaces a mesh with the first equal mesh that DTensor
    operations have used, so that a DTensor of the second model that a process splits may have a mesh of the first.
    """
    names, own = whole.mesh_dim_names or (), mesh.mesh_dim_names or ()
    coordinate = whole.get_coordinate()
    if coordinate is None or not own or not set(own) <= set(names):
        return False
    along = tuple(
        slice(None) if name in own else index for name, index in zip(names, coordinate, strict=True)
    )
    return torch.equal(whole.mesh[along], mesh.mesh)


def sharded_as(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns the DTensor whose part on this rank is `part`, with the shape and placement of the DTensor `like`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `whole` as a DTensor with the placement of `like`, or unchanged if `like` is no DTensor.

    Does not communicate.
    """
    if not is_sharded_tensor(like):
        return whole
    offset, shape = box_of(like)
    box = tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))
    return sharded_as(whole[box].clone(), like)


# Parameters that every rank holds whole, with the elements whose optimizer state this rank keeps.


_HELD = "_hpctrain_elements"


@dataclass(frozen=True, slots=True, eq=False)
class ElementShard:
    """This rank's elements of a parameter: from `begin` to before `end` in memory order. The range may be empty.

    Attributes:
        shape: The shape of the parameter.
        dims: The dimensions of the parameter, outermost in memory first.
        part: The optimizer's parameter, which shares these elements with the model's parameter, or has a copy of them.
            Its shape is (end - begin,), or () if the parameter has no dimensions.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    begin: int
    end: int
    part: torch.nn.Parameter

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape of the parameter, outermost dimension in memory first."""
        return tuple(self.shape[dim] for dim in self.dims)

    def box_to_read(self) -> Box:
        """Returns the smallest box (offset, shape) of whole rows of the parameter that contains the elements.

        `cut` extracts the elements from the content of this box.
        """
        if not self.shape or (self.dims[0] != 0 and self.end > self.begin):
            return (0,) * len(self.shape), self.shape
        first, stop = self._rows()
        return (first, *(0 for _ in self.shape[1:])), (stop - first, *self.shape[1:])

    def cut(self, box: torch.Tensor) -> torch.Tensor:
        """Returns this rank's elements, in the shape of `part`. `box`: the content of the region `box_to_read()`."""
        first = self._rows()[0] * self._row_elems() if self.shape and self.dims[0] == 0 else 0
        return self._cut(box, first=first)

    def cut_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's elements, in the shape of `part`. `tensor` has the shape of the whole parameter."""
        return self._cut(tensor, first=0)

    def _cut(self, tensor: torch.Tensor, *, first: int) -> torch.Tensor:
        flat = tensor.permute(self.dims).reshape(-1)
        return flat[self.begin - first : self.end - first].reshape(self.part.shape).clone()

    def _row_elems(self) -> int:
        return math.prod(self.shape[1:])

    def _rows(self) -> tuple[int, int]:
        if self.end == self.begin:
            return 0, 0
        return self.begin // self._row_elems(), -(-self.end // self._row_elems())


def hold_elements(
    parameter: torch.nn.Parameter, *, begin: int, end: int, copied: bool = False
) -> ElementShard:
    """Makes this rank hold the optimizer state of some elements of `parameter`; stores and returns the `ElementShard`.

    begin, end: the elements, from `begin` to before `end` in memory order.
    copied: True if the part has memory of its own.

    The shard is stored as an attribute of `parameter`. The memory of the parameter must have no gaps.
    """
    flat = flat_view(parameter)[begin:end]
    flat = flat.clone() if copied else flat
    part = torch.nn.Parameter(flat if parameter.dim() or begin == end else flat.view(()))
    shard = ElementShard(tuple(parameter.shape), tuple(memory_order(parameter)), begin, end, part)
    setattr(parameter, _HELD, shard)
    return shard


def element_shard(parameter: torch.Tensor) -> ElementShard | None:
    """Returns the elements of `parameter` whose optimizer state this rank holds; None if the state is not divided."""
    return getattr(parameter, _HELD, None)


def forget_elements(parameter: torch.nn.Parameter) -> None:
    """Removes the `ElementShard` that `hold_elements` has stored on `parameter`."""
    if hasattr(parameter, _HELD):
        delattr(parameter, _HELD)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the tensor's dimensions, outermost in memory first.

    A layout with gaps keeps the order of the dimensions.
    """
    dims = list(range(tensor.dim()))
    if tensor.is_contiguous():
        return dims
    strides = tensor.stride()
    order = sorted(dims, key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else dims


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor's memory has no gaps."""
    return tensor.permute(memory_order(tensor)).is_contiguous()


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the elements in memory order, shape (n,). The memory of the tensor must have no gaps."""
    return tensor.detach().permute(memory_order(tensor)).view(-1)
