"""PowerSGD: a gradient matrix is sent as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

A parameter with two or more dimensions is a matrix of shape (n, m): n is the size of the outermost dimension, m the
product of the sizes of all other dimensions. With M_i the gradient of rank i plus its residual, one power iteration
from the last step's Q gives

    P = orthonormal(sum_i M_i Q)        (n, rank)
    Q = sum_i M_i^T P                   (m, rank)
    sum_i M_i  ~  P Q^T

The gradients are already weighted, so they are summed over the ranks and not averaged. A rank's share of the result is
P P^T M_i, the projection of its own matrix; the shares add up to P Q^T. The rank keeps the residual M_i - P P^T M_i for
the next step. The residual is orthogonal to P, so it does not grow through other ranks' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.codecs import Residuals
from hpctrain.reduce.collective_reducers.collective_reducer import all_reduce_bytes, successor_is_elsewhere
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor, check_dtypes, check_same_plan
from hpctrain.reduce.contract.step_end import StepEnd
from hpctrain.topology import Topology

# A matrix is sent as factors if they have at most 1/MIN_SAVING of its elements: a smaller saving is not worth the
# computation and the error of the approximation.
MIN_SAVING = 2


def matrix_shape(shape: Sequence[int], *, rank: int) -> tuple[int, int] | None:
    """Returns rows and columns of the matrix if a parameter of `shape` is sent as factors with `rank` columns.

    Returns None if the parameter is sent unchanged.
    """
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if MIN_SAVING * rank * (rows + columns) <= rows * columns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredMatrix:
    """Views for one parameter: its matrix in the bucket's memory, and its factors in the messages.

    m: matrix, shape (rows, columns).
    p: first factor, shape (rows, rank).
    q: second factor, shape (columns, rank).
    """

    slot: Slot
    m: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor


@final
class FactoredBucket:
    """A bucket's memory and its two messages, which are empty if no parameter has factors. Does not communicate.

    first: message with P of every matrix, the gradients that are sent unchanged, the flags, and one element that is NaN
    if this rank's values are not finite, otherwise 0.
    second: message with Q of every matrix.
    """

    def __init__(self, bucket: Bucket, *, rank: int, device: torch.device) -> None:
        self.bucket = bucket
        self.memory = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
        shapes = {slot.parameter: matrix_shape(slot.shape, rank=rank) for slot in bucket.slots}
        self.plain = tuple(slot for slot in bucket.slots if shapes[slot.parameter] is None)
        found = [(slot, shape) for slot in bucket.slots if (shape := shapes[slot.parameter]) is not None]
        self._p_elems = sum(rows for _, (rows, _) in found) * rank
        q_elems = sum(columns for _, (_, columns) in found) * rank
        first = self._p_elems + sum(slot.numel for slot in self.plain) + len(bucket.slots) + 1
        self.first = self.memory.new_zeros(first if found else 0)
        self.second = self.memory.new_zeros(q_elems)
        matrices, p_offset, q_offset = [], 0, 0
        for slot, (rows, columns) in found:
            p_end, q_end = p_offset + rows * rank, q_offset + columns * rank
            matrices.append(FactoredMatrix(
                slot=slot,
                m=self.of(slot).view(rows, columns),
                p=self.first[p_offset:p_end].view(rows, rank),
                q=self.second[q_offset:q_end].view(columns, rank),
            ))  # fmt: skip
            p_offset, q_offset = p_end, q_end
        self.matrices = tuple(matrices)

    def of(self, slot: Slot) -> torch.Tensor:
        """Returns the parameter's part of the bucket's memory, shape (slot.numel,)."""
        return self.memory[slot.offset : slot.offset + slot.numel]

    def pack_plain(self) -> None:
        """Copies the gradients without factors, the flags and the element for NaN into the first message."""
        offset = self._p_elems
        for slot in self.plain:
            self.first[offset : offset + slot.numel] = self.of(slot)
            offset += slot.numel
        self.first[offset:-1] = self.memory[self.bucket.first_flag :]
        # A product with zeros may hide a NaN, depending on the library.
        self.first[-1] = 0.0 if bool(torch.isfinite(self.memory).all()) else torch.nan

    def unpack_plain(self) -> None:
        """Copies the sums of the gradients without factors and of the flags from the first message into the bucket."""
        offset = self._p_elems
        for slot in self.plain:
            self.of(slot).copy_(self.first[offset : offset + slot.numel])
            offset += slot.numel
        self.memory[self.bucket.first_flag :] = self.first[offset:-1]

    def used(self) -> dict[int, bool]:
        """Returns for each parameter whether any rank had a gradient for it. Call it after the flags are summed."""
        flags = self.memory[self.bucket.first_flag :].tolist()
        return {slot.parameter: flag != 0 for slot, flag in zip(self.bucket.slots, flags, strict=True)}


# PowerSGD.


FACTORS = "low_rank/factors"
STEPS = "low_rank/steps"
# Columns of the factors.
FACTOR_COLUMNS = 16


@final
class LowRankReducer(StepEnd):
    """`BucketReducer` that sends matrices as factors, and all other parameters unchanged, with error feedback.

    Each bucket needs two all_reduce operations in the bucket's dtype. These operations block, so buckets are reduced
    one after another. The result is deterministic. The result is bitwise equal on every rank if the ranks' processors
    and libraries are the same, since each rank orthonormalizes P itself. If a bucket is not finite on any rank, the
    result is not finite on all ranks, and the residuals do not change (`end_step`). A parameter that no rank used keeps
    its residual.

    Args:
        comm: Communicator used by this object only.
        rank: Number of columns of the factors.
        start_step: Number of steps at the start of training in which everything is sent unchanged, because gradients
            then change direction too fast for factors that are updated by one iteration per step.
        topology: Placement of the ranks for `bytes_sent`, which is computed for a ring (see `collective_reducer`).

    Raises:
        UsageError: A value is out of range.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        rank: int = FACTOR_COLUMNS,
        start_step: int = 20,
        topology: Topology | None = None,
    ) -> None:
        if rank < 1:
            raise UsageError(f"low-rank reduction with rank {rank}: give at least 1")
        if start_step < 0:
            raise UsageError(f"low-rank reduction from step {start_step}: give 0 or more")
        self._comm = comm
        self._rank = rank
        self._start_step = start_step
        self._elsewhere = successor_is_elsewhere(comm.rank, num_ranks=comm.num_ranks, topology=topology)
        self._residuals = Residuals(rank=comm.rank, num_ranks=comm.num_ranks)
        self._buckets: list[FactoredBucket] = []
        self._factors: dict[int, torch.Tensor] = {}  # parameter -> Q, (columns, rank)
        self._steps = 0
        self._began = False  # True once a bucket of this step was reduced
        self._bytes_sent = 0

    @staticmethod
    def needs(buckets: Sequence[Bucket], *, num_ranks: int) -> tuple[int, int]:
        """Returns what a reducer with default options needs: memory for messages and factors, and bytes sent per step.

        Both are bytes of one rank.
        """
        factored = [FactoredBucket(b, rank=FACTOR_COLUMNS, device=torch.device("meta")) for b in buckets]
        messages = sum(f.first.nbytes + f.second.nbytes for f in factored)
        plain = sum(f.bucket.numel * f.bucket.dtype.itemsize for f in factored if not f.matrices)
        # Second factors are kept for the next step besides.
        held = messages + sum(f.second.nbytes for f in factored)
        return held, 2 * (messages + plain) * (num_ranks - 1) // num_ranks

    @property
    def algorithm(self) -> str:
        return "flat"

    @property
    def wire(self) -> str:
        return "low-rank"

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        how = f"low-rank, rank {self._rank}, from step {self._start_step}"
        check_same_plan(self._comm, buckets, how=how)
        check_dtypes(buckets, what="low-rank")
        self._residuals.plan(buckets, device=device)
        self._buckets = [FactoredBucket(bucket, rank=self._rank, device=device) for bucket in buckets]
        for factored in self._buckets:
            for matrix in factored.matrices:
                if matrix.slot.parameter not in self._factors:
                    self._factors[matrix.slot.parameter] = _first_factor(matrix)
        memory = [factored.memory for factored in self._buckets]
        self._will_finish(buckets, memory)
        return memory

    # ------------------------------------------------------------------ one bucket

    def reduce(self, number: int) -> Iterator[bool]:
        """See `BucketReducer.reduce`. The first `next` runs the whole reduction, since its operations block."""
        factored = self._buckets[number]
        self._began = True
        self._residuals.add_to(factored.memory, factored.bucket)
        if self._steps < self._start_step or not factored.matrices:
            self._all_reduce(factored.memory)
            self._delivered(factored, factored.bucket.slots)
        else:
            self._sum_as_factors(factored)
        yield True

    def _sum_as_factors(self, factored: FactoredBucket) -> None:
        for matrix in factored.matrices:
            torch.mm(matrix.m, self._factors[matrix.slot.parameter], out=matrix.p)
        factored.pack_plain()
        self._all_reduce(factored.first)
        # The sums are bitwise equal on all ranks, so all return here or none does.
        if not bool(torch.isfinite(factored.first).all()):
            factored.memory.fill_(torch.nan)
            return
        # Householder QR: orthonormal columns also for rank-deficient and zero matrices.
        bases = [torch.linalg.qr(matrix.p, mode="reduced").Q for matrix in factored.matrices]
        for matrix, p in zip(factored.matrices, bases, strict=True):
            torch.mm(matrix.m.T, p, out=matrix.q)
        own = [matrix.q.clone() for matrix in factored.matrices]
        self._all_reduce(factored.second)
        if not bool(torch.isfinite(factored.second).all()):
            factored.memory.fill_(torch.nan)
            return
        factored.unpack_plain()
        self._delivered(factored, factored.plain)
        used = factored.used()
        for matrix, p, own_q in zip(factored.matrices, bases, own, strict=True):
            if used[matrix.slot.parameter]:
                self._take(matrix, p=p, own_q=own_q)
            else:
                self._keep(factored, matrix.slot)

    def _take(self, matrix: FactoredMatrix, *, p: torch.Tensor, own_q: torch.Tensor) -> None:
        """Writes the sum into the bucket, and keeps the new residual and the Q of the next step.

        The new residual is the matrix minus this rank's share of the sum.
        """
        left = self._residuals.left(matrix.slot).view_as(matrix.m)
        left.copy_(torch.addmm(matrix.m, p, own_q.T, alpha=-1))
        torch.mm(p, matrix.q.T, out=matrix.m)
        # A zero Q is no start for the next iteration. Only the direction matters; a largest element of 1 keeps the
        # products M Q within the floating-point range for very small and very large gradients.
        if (length := float(matrix.q.abs().max())) > 0:
            torch.div(matrix.q, length, out=self._factors[matrix.slot.parameter])

    def _delivered(self, factored: FactoredBucket, slots: Sequence[Slot]) -> None:
        """Sets the residuals of `slots`, whose gradients were sent unchanged, to zero.

        If no rank used a parameter, its old residual is kept.
        """
        used = factored.used()
        for slot in slots:
            if used[slot.parameter]:
                self._residuals.left(slot).zero_()
            else:
                self._keep(factored, slot)

    def _keep(self, factored: FactoredBucket, slot: Slot) -> None:
        """Keeps the residual of a parameter that no rank used, since the optimizer skips it."""
        factored.of(slot).zero_()
        self._residuals.left(slot).copy_(self._residuals.of(slot))

    def _all_reduce(self, message: torch.Tensor) -> None:
        self._comm.all_reduce(message)
        if self._elsewhere:
            num_bytes = message.numel() * message.element_size()
            self._bytes_sent += all_reduce_bytes(num_bytes, num_ranks=self._comm.num_ranks)

    def end_step(self, *, applied: bool, rescale: float) -> None:
        # The factors of a skipped step are kept too: they only start the next iteration, and any finite ones do.
        self._residuals.end_step(applied=applied and self._began, rescale=rescale)
        self._steps += int(self._began)  # no step if only the loss scale changed
        self._began = False

    # ------------------------------------------------------------------ state

    def bytes_sent(self) -> int:
        return self._bytes_sent

    def state(self) -> list[StateTensor]:
        """Returns the residuals of this rank, the factors and the number of steps.

        Factors and number of steps are the same on every rank.
        """
        factors = self._flat_factors()
        steps = torch.tensor([self._steps], dtype=torch.int64)
        same = {STEPS: steps, FACTORS: factors} if factors.numel() else {STEPS: steps}
        return [
            *self._residuals.state(),
            *(
                StateTensor(name=n, tensor=t, global_shape=tuple(t.shape), offset=(0,))
                for n, t in same.items()
            ),
        ]

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return self._residuals.rows_to_load(shapes)

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """See `BucketReducer.load_state`. Factors of another shape, saved with another `rank`, are ignored."""
        self._residuals.load_state(tensors, shapes)
        self._steps = int(tensors[STEPS]) if STEPS in tensors else 0
        saved = tensors.get(FACTORS)
        if saved is None or saved.shape != self._flat_factors().shape:
            return
        offset = 0
        for parameter in sorted(self._factors):
            factor = self._factors[parameter]
            factor.copy_(saved[offset : offset + factor.numel()].view_as(factor))
            offset += factor.numel()

    def _flat_factors(self) -> torch.Tensor:
        """Returns all Q flattened and concatenated in the order of the parameters."""
        factors = [self._factors[parameter].reshape(-1) for parameter in sorted(self._factors)]
        return torch.cat(factors) if factors else torch.zeros(0)

    def close(self) -> None:
        self._buckets = []


def _first_factor(matrix: FactoredMatrix) -> torch.Tensor:
    """Returns the first Q: random numbers that depend only on the parameter's index, not on rank, device or buckets."""
    generator = torch.Generator().manual_seed(matrix.slot.parameter)
    return torch.randn(tuple(matrix.q.shape), generator=generator, dtype=torch.float32).to(matrix.q)
