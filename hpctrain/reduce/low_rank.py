"""PowerSGD: a gradient matrix travels as two thin ones (Vogels et al. 2019, arXiv:1905.13727).

A parameter of two dimensions or more is a matrix of shape (n, m) = (outermost dimension, the rest). With M_i a rank's
gradient and what it has not delivered yet, one power iteration from the last step's Q gives

    P = orthonormal(sum_i M_i Q)        (n, rank)
    Q = sum_i M_i^T P                   (m, rank)
    sum_i M_i  ~  P Q^T

Buckets are sums of weighted gradients, and so is what is delivered: nothing is averaged. A rank's share is
P P^T M_i, the projection of its own matrix; the shares add up to P Q^T. What is left, M_i - P P^T M_i, it keeps
for the next step: it is orthogonal to P, so it does not grow by what other ranks bring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.buckets import Bucket, Slot
from hpctrain.reduce.reducer import StateTensor
from hpctrain.reduce.residuals import Residuals
from hpctrain.reduce.ring_bytes import all_reduce_bytes, successor_is_elsewhere
from hpctrain.reduce.same_plan import check_dtypes, check_same_plan
from hpctrain.topology import Topology

FACTORS = "low_rank/factors"
STEPS = "low_rank/steps"
# A matrix is sent as factors if they have at most 1/MIN_SAVING of its elements: for less, the work and the
# error of an approximation buy nothing.
MIN_SAVING = 2


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter that travels as factors, and where they stand in the bucket's two messages."""

    slot: Slot
    rows: int
    columns: int
    p_offset: int
    q_offset: int


@dataclass(slots=True)
class _Planned:
    """A bucket with its memory. `first` holds all P, then what is sent as it is, flags, and a mark; `second` all Q."""

    bucket: Bucket
    memory: torch.Tensor
    matrices: tuple[_Matrix, ...]
    plain: tuple[Slot, ...]
    first: torch.Tensor
    second: torch.Tensor


def matrix_shape(shape: Sequence[int], *, rank: int) -> tuple[int, int] | None:
    """Rows and columns of a parameter that is worth sending as factors of `rank`; None for all others."""
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if MIN_SAVING * rank * (rows + columns) <= rows * columns else None


@final
class LowRankReducer:
    """`BucketReducer` that sends matrices as factors, and all other parameters as they are, with error feedback.

    comm: a message space of its own; its all_reduce carries two messages a bucket, in the bucket's own
        precision. They block, so a bucket is reduced in one go: nothing else goes on meanwhile.
    rank: columns of the factors. start_step: steps in which everything is sent as it is, while gradients
        change their direction too fast for factors that follow them by one iteration a step.
    topology: for `bytes_sent`, by the ring's bound (see `ring_bytes`).
    Deterministic; the same bits on every rank where the ranks' processors and libraries are the same, since
    each rank makes P orthonormal for itself. A bucket that is not finite on any rank comes out not finite on
    all, and residuals are then as before (`settle`); a parameter that no rank used keeps its residual.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        rank: int = 4,
        start_step: int = 10,
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
        self._planned: list[_Planned] = []
        self._factors: dict[int, torch.Tensor] = {}  # parameter -> Q, (columns, rank)
        self._steps = 0
        self._began = False  # whether anything of this step was reduced
        self._bytes_sent = 0

    @property
    def algorithm(self) -> str:
        return "flat"

    @property
    def wire(self) -> str:
        return "low-rank"

    # ------------------------------------------------------------------ planning

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        how = f"low-rank, rank {self._rank}, from step {self._start_step}"
        check_same_plan(self._comm, buckets, how=how)
        check_dtypes(buckets, what="low-rank")
        self._residuals.plan(buckets, device=device)
        self._planned = [self._lay_out(bucket, device=device) for bucket in buckets]
        for planned in self._planned:
            for matrix in planned.matrices:
                if matrix.slot.parameter not in self._factors:
                    self._factors[matrix.slot.parameter] = self._first_factor(matrix, planned.memory)
        return [planned.memory for planned in self._planned]

    def _lay_out(self, bucket: Bucket, *, device: torch.device) -> _Planned:
        matrices, plain = [], []
        p_elems = q_elems = 0
        for slot in bucket.slots:
            shape = matrix_shape(slot.shape, rank=self._rank)
            if shape is None:
                plain.append(slot)
                continue
            matrices.append(_Matrix(slot, *shape, p_offset=p_elems, q_offset=q_elems))
            p_elems += shape[0] * self._rank
            q_elems += shape[1] * self._rank
        first = p_elems + sum(slot.numel for slot in plain) + len(bucket.slots) + 1
        return _Planned(
            bucket=bucket,
            memory=torch.zeros(bucket.numel, dtype=bucket.dtype, device=device),
            matrices=tuple(matrices),
            plain=tuple(plain),
            first=torch.zeros(first if matrices else 0, dtype=bucket.dtype, device=device),
            second=torch.zeros(q_elems, dtype=bucket.dtype, device=device),
        )

    def _first_factor(self, matrix: _Matrix, like: torch.Tensor) -> torch.Tensor:
        # On the CPU, and of the parameter alone: the same on every rank, on any device, whatever the buckets.
        generator = torch.Generator().manual_seed(matrix.slot.parameter)
        drawn = torch.randn(matrix.columns, self._rank, generator=generator, dtype=torch.float32)
        return drawn.to(like)

    # ------------------------------------------------------------------ one bucket

    def reduce(self, number: int) -> Iterator[bool]:
        planned = self._planned[number]
        self._began = True
        self._residuals.add_to(planned.memory, planned.bucket)
        if self._steps < self._start_step or not planned.matrices:
            self._sum_as_it_is(planned)
        else:
            self._sum_as_factors(planned)
        # The collective operations block, and must follow each other alike on every rank: never give way.
        yield from ()

    def _sum_as_it_is(self, planned: _Planned) -> None:
        memory, bucket = planned.memory, planned.bucket
        self._all_reduce(memory)
        self._delivered(planned, bucket.slots)

    def _sum_as_factors(self, planned: _Planned) -> None:
        first, second = planned.first, planned.second
        self._project(planned)
        self._all_reduce(first)
        finite = bool(torch.isfinite(first).all())
        bases = {}
        for matrix in planned.matrices:
            p = self._p(planned, matrix)
            if finite:
                # Householder: orthonormal columns also for matrices of a lower rank, and for zeros.
                bases[matrix.slot.parameter] = torch.linalg.qr(p, mode="reduced").Q
                torch.mm(
                    self._m(planned, matrix).T, bases[matrix.slot.parameter], out=self._q(planned, matrix)
                )
        # Ranks decide alike, on sums that are the same bits on all: none is left alone in the second sum.
        own = second.clone() if finite else second
        if finite:
            self._all_reduce(second)
            finite = bool(torch.isfinite(second).all())
        if not finite:
            planned.memory.fill_(torch.nan)
            return
        self._take_plain(planned)
        self._take_matrices(planned, bases=bases, own=own)

    def _project(self, planned: _Planned) -> None:
        """The first message: M Q of every matrix, all else as it is, and 0 or NaN: whether this rank is finite."""
        memory, first, bucket = planned.memory, planned.first, planned.bucket
        for matrix in planned.matrices:
            q = self._factors[matrix.slot.parameter]
            torch.mm(self._m(planned, matrix), q, out=self._p(planned, matrix))
        offset = sum(matrix.rows for matrix in planned.matrices) * self._rank
        for slot in planned.plain:
            first[offset : offset + slot.numel] = memory[slot.offset : slot.offset + slot.numel]
            offset += slot.numel
        first[offset:-1] = memory[bucket.first_flag :]
        # A product with zeros may hide a NaN, depending on the library.
        first[-1] = 0.0 if bool(torch.isfinite(memory).all()) else torch.nan

    def _take_plain(self, planned: _Planned) -> None:
        """The sums of what was sent as it is, and of the flags."""
        memory, first, bucket = planned.memory, planned.first, planned.bucket
        offset = sum(matrix.rows for matrix in planned.matrices) * self._rank
        for slot in planned.plain:
            memory[slot.offset : slot.offset + slot.numel] = first[offset : offset + slot.numel]
            offset += slot.numel
        memory[bucket.first_flag :] = first[offset:-1]
        self._delivered(planned, planned.plain)

    def _take_matrices(self, planned: _Planned, *, bases: dict[int, torch.Tensor], own: torch.Tensor) -> None:
        """Residual: the matrix less this rank's share. Bucket: the sum of all shares. Factors: the new Q."""
        used = self._used(planned)
        for matrix in planned.matrices:
            slot, p, m = matrix.slot, bases[matrix.slot.parameter], self._m(planned, matrix)
            if not used[slot.parameter]:
                self._keep(planned, slot)
                continue
            end = matrix.q_offset + matrix.columns * self._rank
            own_q = own[matrix.q_offset : end].view(matrix.columns, self._rank)
            left = self._residuals.left(slot).view(matrix.rows, matrix.columns)
            left.copy_(torch.addmm(m, p, own_q.T, alpha=-1))
            q = self._q(planned, matrix)
            torch.mm(p, q.T, out=m)
            # A sum of nothing says nothing of the direction to look in next.
            if bool(q.any()):
                self._factors[slot.parameter].copy_(q)

    def _delivered(self, planned: _Planned, slots: Sequence[Slot]) -> None:
        """Sent as it is: nothing is left, unless no rank used the parameter."""
        used = self._used(planned)
        for slot in slots:
            if used[slot.parameter]:
                self._residuals.left(slot).zero_()
            else:
                self._keep(planned, slot)

    def _keep(self, planned: _Planned, slot: Slot) -> None:
        """No rank used the parameter, so the optimizer leaves it alone: what there is of it waits."""
        planned.memory[slot.offset : slot.offset + slot.numel].zero_()
        self._residuals.left(slot).copy_(self._residuals.of(slot))

    def _used(self, planned: _Planned) -> dict[int, bool]:
        """Parameter -> whether any rank had a gradient for it: from the summed flags."""
        flags = planned.memory[planned.bucket.first_flag :].tolist()
        return {slot.parameter: flag != 0 for slot, flag in zip(planned.bucket.slots, flags, strict=True)}

    def _m(self, planned: _Planned, matrix: _Matrix) -> torch.Tensor:
        """The parameter's part of the bucket's memory as a matrix, (rows, columns)."""
        begin = matrix.slot.offset
        return planned.memory[begin : begin + matrix.slot.numel].view(matrix.rows, matrix.columns)

    def _p(self, planned: _Planned, matrix: _Matrix) -> torch.Tensor:
        """Its P in the first message, (rows, rank)."""
        end = matrix.p_offset + matrix.rows * self._rank
        return planned.first[matrix.p_offset : end].view(matrix.rows, self._rank)

    def _q(self, planned: _Planned, matrix: _Matrix) -> torch.Tensor:
        """Its Q in the second message, (columns, rank)."""
        end = matrix.q_offset + matrix.columns * self._rank
        return planned.second[matrix.q_offset : end].view(matrix.columns, self._rank)

    def _all_reduce(self, message: torch.Tensor) -> None:
        self._comm.all_reduce(message)
        if self._elsewhere:
            num_bytes = message.numel() * message.element_size()
            self._bytes_sent += all_reduce_bytes(num_bytes, num_ranks=self._comm.num_ranks)

    def settle(self, *, applied: bool, rescale: float) -> None:
        # The factors stay, also of a skipped step: they are where to look next, and any finite ones will do.
        self._residuals.settle(applied=applied and self._began, rescale=rescale)
        self._steps += 1
        self._began = False

    # ------------------------------------------------------------------ state

    def bytes_sent(self) -> int:
        return self._bytes_sent

    def state(self) -> list[StateTensor]:
        """Residuals by rank; factors and the number of steps, which are the same on every rank."""
        factors = self._flat_factors()
        steps = torch.tensor([self._steps], dtype=torch.int64)
        return [
            *self._residuals.state(),
            StateTensor(name=FACTORS, tensor=factors, global_shape=tuple(factors.shape), offset=(0,)),
            StateTensor(name=STEPS, tensor=steps, global_shape=(1,), offset=(0,)),
        ]

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Factors of another `rank` are left: the run begins with its own. What is not there begins anew."""
        self._residuals.load_state(tensors)
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
        """All Q one behind another in the order of the parameters."""
        factors = [self._factors[parameter].reshape(-1) for parameter in sorted(self._factors)]
        return torch.cat(factors) if factors else torch.zeros(0)

    def close(self) -> None:
        self._planned = []
