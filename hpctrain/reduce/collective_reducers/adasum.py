"""Adasum: combines the gradients of the ranks by a rule that adds what differs, and averages what is equal.

Source: Maleki et al. 2020, arXiv:2006.02924.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import final

import torch

from hpctrain.comm import Collective, Traffic, TwoLevel
from hpctrain.distributed import all_gather, exchange
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor, check_same_plan
from hpctrain.reduce.contract.step_end import StepEnd
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology


def adasum(comm: Collective, flat: torch.Tensor, *, sizes: Sequence[int]) -> None:
    """Combines the ranks' tensors by Adasum, in place. Collective over `comm`.

    Two tensors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum if they are orthogonal, their mean
    if they are equal. A tensor of zeros leaves the other tensor unchanged. Ranks 0 and 1, 2 and 3, ... are combined
    first, then neighbouring results. If a round has an odd number of results, the last result waits for the next
    round, so that any number of ranks works.

    Each rank combines one slice of the tensors of all ranks; in each round, a small sum adds up the dot products of the
    slices. Half types are computed in float32, dot products in float64. As many bytes are sent as for a sum. The
    result has the same bits on every rank.

    Args:
        comm: The ranks.
        flat: Floating-point tensors, one after another: shape (sum(sizes),).
        sizes: Number of elements of each tensor; the rule is applied to each tensor by itself.

    Raises:
        UsageError: `flat` has integers.
    """
    if not flat.dtype.is_floating_point:
        raise UsageError(f"Adasum combines floating-point tensors, not {flat.dtype}")
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    counts = split_evenly(flat.numel(), num_parts=comm.num_ranks)
    mine = _exchanged(comm, wide, counts=counts)
    first = sum(counts[: comm.rank])
    lengths = _lengths_within(sizes, first=first, end=first + counts[comm.rank])
    combined = _tree(mine, lengths=lengths, add_up=comm.all_reduce)
    flat.copy_(all_gather(comm, combined, counts=counts))


def adasum_of_nodes(
    comm: Collective, levels: TwoLevel, flat: torch.Tensor, *, sizes: Sequence[int], num_nodes: int
) -> None:
    """Sums the ranks' tensors within each node, and combines the sums of the nodes by Adasum, in place. Collective.

    Each rank of a node sends a slice of the node's sum, so that a node sends as many bytes as in a sum in two levels.
    The tree is over the nodes in their order.

    Args:
        comm: All ranks.
        levels: The two communicators of this rank.
        flat: float32 or float64 tensors, one after another: shape (sum(sizes),).
        sizes: Number of elements of each tensor.
        num_nodes: Number of nodes.
    """
    local, cross = levels.local, levels.cross
    # Only ranks with a counterpart on every node have a slice.
    slices = split_evenly(flat.numel(), num_parts=levels.num_slices)
    slices += [0] * (local.num_ranks - levels.num_slices)
    of_node = local.reduce_scatter(flat, counts=slices) if local.num_ranks > 1 else flat
    first = sum(slices[: local.rank])
    if cross is None:
        mine, end = [of_node.new_empty(0)] * num_nodes, first
    else:
        counts = split_evenly(of_node.numel(), num_parts=cross.num_ranks)
        mine = _exchanged(cross, of_node, counts=counts)
        first += sum(counts[: cross.rank])
        end = first + counts[cross.rank]
    lengths = _lengths_within(sizes, first=first, end=end)
    combined = _tree(mine, lengths=lengths, add_up=comm.all_reduce)
    if cross is not None:
        of_node = all_gather(cross, combined, counts=counts)
    flat.copy_(all_gather(local, of_node, counts=slices) if local.num_ranks > 1 else of_node)


def _exchanged(comm: Collective, flat: torch.Tensor, *, counts: Sequence[int]) -> list[torch.Tensor]:
    """Returns every rank's values of this rank's slice of `flat`, in rank order. Collective."""
    mine = counts[comm.rank]
    received = exchange(comm, flat, send_counts=counts, receive_counts=[mine] * comm.num_ranks)
    return list(received.view(comm.num_ranks, mine).unbind())


def _tree(
    parts: list[torch.Tensor], *, lengths: Sequence[int], add_up: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Combines slices of tensors pair by pair until one is left. Collective, as `add_up` is.

    lengths: how many elements of each tensor are in the slice. add_up: sums dot products over the slices, in place.
    """
    while len(parts) > 1:
        pairs = list(zip(parts[::2], parts[1::2], strict=False))
        products = torch.stack([_products(a, b, lengths) for a, b in pairs])
        add_up(products.view(-1))
        combined = [
            _combined(a, b, of_pair, lengths) for (a, b), of_pair in zip(pairs, products, strict=True)
        ]
        parts = combined + parts[2 * len(pairs) :]
    return parts[0].contiguous()


def _lengths_within(sizes: Sequence[int], *, first: int, end: int) -> list[int]:
    """Returns how many elements of each tensor lie between the positions `first` and `end` of their concatenation."""
    offsets = list(accumulate(sizes, initial=0))
    return [max(0, min(end, after) - max(first, before)) for before, after in pairwise(offsets)]


def _products(a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Returns the dot products a.a, b.b and a.b per tensor: float64, shape (3, number of tensors)."""
    pieces = zip(a.double().split(list(lengths)), b.double().split(list(lengths)), strict=True)
    return torch.stack([torch.stack([x @ x, y @ y, x @ y]) for x, y in pieces], dim=1)


def _combined(
    a: torch.Tensor, b: torch.Tensor, products: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    of_a, of_b, of_both = products
    repeats = torch.tensor(lengths, device=a.device)

    def share(squared: torch.Tensor) -> torch.Tensor:
        factors = torch.where(squared > 0, 1 - of_both / (2 * squared), 1.0)
        return factors.repeat_interleave(repeats).to(a.dtype)

    return a * share(of_a) + b * share(of_b)


@final
class AdasumReducer(StepEnd):
    """`BucketReducer` that combines the gradients of each parameter by Adasum instead of summing them.

    A rank's gradients arrive weighted: with equal numbers of samples, a rank's gradients are its mean gradient divided
    by the number of ranks. The results are therefore multiplied by the number of combined gradients, so that the
    result for equal gradients is their mean. A rank with more samples than others has a larger part.

    A gradient that is not finite makes the result not finite, so that the step is dropped on every rank.

    comm: communicator of all ranks, for this reducer only.
    levels: the communicators of `comm` in two levels: gradients are then averaged within a node, and combined by Adasum
    between nodes. None: the gradients of all ranks are combined by Adasum.
    """

    def __init__(self, comm: Collective, *, topology: Topology, levels: TwoLevel | None = None) -> None:
        self._traffic = Traffic(topology)
        self._comm = self._traffic.counted(comm)
        self._levels = None if levels is None else self._traffic.counted_levels(levels)
        self._num_combined = comm.num_ranks if levels is None else topology.num_nodes
        self._buckets: Sequence[Bucket] = ()
        self._memory: list[torch.Tensor] = []

    @property
    def algorithm(self) -> str:
        return "adasum" if self._levels is None else "adasum-of-nodes"

    @property
    def wire(self) -> str:
        return "fp32"

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        check_same_plan(self._comm, buckets, how=self.algorithm)
        self._buckets = buckets
        self._memory = [torch.zeros(bucket.numel, dtype=bucket.dtype, device=device) for bucket in buckets]
        self._will_finish(buckets, self._memory)
        return list(self._memory)

    def reduce(self, number: int) -> Iterator[bool]:
        if not 0 <= number < len(self._memory):
            raise UsageError(f"no bucket {number} to reduce: {len(self._memory)} are planned")
        return self._reduce(number)

    def _reduce(self, number: int) -> Iterator[bool]:
        """Calls all blocking operations in the first `next`: only these have the same order on every rank."""
        bucket, memory = self._buckets[number], self._memory[number]
        gradients, sizes = memory[: bucket.num_gradients], [slot.numel for slot in bucket.slots]
        if self._levels is None:
            adasum(self._comm, gradients, sizes=sizes)
        else:
            adasum_of_nodes(self._comm, self._levels, gradients, sizes=sizes, num_nodes=self._num_combined)
        gradients.mul_(self._num_combined)
        self._comm.all_reduce(memory[bucket.first_flag :])
        yield True

    def end_step(self, *, applied: bool, rescale: float) -> None: ...

    def bytes_sent(self) -> int:
        return self._traffic.num_bytes()

    def state(self) -> list[StateTensor]:
        return []

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return {}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None: ...

    def close(self) -> None:
        """Frees the memory. Collective; a second call does nothing."""
        self._memory = []
