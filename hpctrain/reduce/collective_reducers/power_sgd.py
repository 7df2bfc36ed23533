"""PowerSGD: a gradient matrix travels as two thin ones (Vogels et al. 2019, arXiv:1905.13727).

A parameter of two dimensions or more is a matrix of shape (n, m) = (outermost dimension, the rest). With M_i a
rank's gradient and what it has not delivered yet, one power iteration from the last step's Q gives

    P = orthonormal(sum_i M_i Q)        (n, rank)
    Q = sum_i M_i^T P                   (m, rank)
    sum_i M_i  ~  P Q^T

Buckets are sums of weighted gradients, and so is what is delivered: nothing is averaged. A rank's share is
P P^T M_i, the projection of its own matrix; the shares add up to P Q^T. What is left, M_i - P P^T M_i, it keeps
for the next step: it is orthogonal to P, so it does not grow by what other ranks bring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.codecs.error_feedback import Residuals
from hpctrain.reduce.collective_reducers.power_sgd_factors import FactoredBucket, FactoredMatrix
from hpctrain.reduce.collective_reducers.traffic_bounds import all_reduce_bytes, successor_is_elsewhere
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import StateTensor
from hpctrain.reduce.contract.plan_agreement import check_dtypes, check_same_plan
from hpctrain.topology import Topology

FACTORS = "low_rank/factors"
STEPS = "low_rank/steps"


@final
class LowRankReducer:
    """`BucketReducer` that sends matrices as factors, and all other parameters as they are, with error feedback.

    comm: a message space of its own; its all_reduce carries two messages a bucket, in the bucket's own
        precision. They block, so a bucket is reduced in one go: nothing else goes on meanwhile.
    rank: columns of the factors. start_step: steps in which everything is sent as it is, while gradients
        change their direction too fast for factors that follow them by one iteration a step.
    topology: for `bytes_sent`, by the ring's bound (see `traffic_bounds`).
    Deterministic; the same bits on every rank where the ranks' processors and libraries are the same, since
    each rank makes P orthonormal for itself. A bucket that is not finite on any rank comes out not finite on
    all, and residuals are then as before (`settle`); a parameter that no rank used keeps its residual.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        rank: int = 16,
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
        self._began = False  # whether anything of this step was reduced
        self._bytes_sent = 0

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
        return [factored.memory for factored in self._buckets]

    # ------------------------------------------------------------------ one bucket

    def reduce(self, number: int) -> Iterator[bool]:
        """All of it in the first `next`: the collective operations block."""
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
        # The sums are the same bits on all ranks, so all leave here or none: nobody waits in the second sum.
        if not bool(torch.isfinite(factored.first).all()):
            factored.memory.fill_(torch.nan)
            return
        # Householder: orthonormal columns also for matrices of a lower rank, and for zeros.
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
        """Left: the matrix less this rank's share. Bucket: the sum of all shares. Next step's factor: the new Q."""
        left = self._residuals.left(matrix.slot).view_as(matrix.m)
        left.copy_(torch.addmm(matrix.m, p, own_q.T, alpha=-1))
        torch.mm(p, matrix.q.T, out=matrix.m)
        # Zeros say nothing of where to look next. Only the direction counts, and a length of about 1 keeps the
        # products M Q of very small and very large gradients within the range of the numbers.
        if (length := float(matrix.q.abs().max())) > 0:
            torch.div(matrix.q, length, out=self._factors[matrix.slot.parameter])

    def _delivered(self, factored: FactoredBucket, slots: Sequence[Slot]) -> None:
        """Sent as it is: nothing is left, unless no rank used the parameter."""
        used = factored.used()
        for slot in slots:
            if used[slot.parameter]:
                self._residuals.left(slot).zero_()
            else:
                self._keep(factored, slot)

    def _keep(self, factored: FactoredBucket, slot: Slot) -> None:
        """No rank used the parameter, so the optimizer leaves it alone: what there is of it waits."""
        factored.of(slot).zero_()
        self._residuals.left(slot).copy_(self._residuals.of(slot))

    def _all_reduce(self, message: torch.Tensor) -> None:
        self._comm.all_reduce(message)
        if self._elsewhere:
            num_bytes = message.numel() * message.element_size()
            self._bytes_sent += all_reduce_bytes(num_bytes, num_ranks=self._comm.num_ranks)

    def settle(self, *, applied: bool, rescale: float) -> None:
        # The factors stay, also of a skipped step: they are where to look next, and any finite ones will do.
        self._residuals.settle(applied=applied and self._began, rescale=rescale)
        self._steps += int(self._began)  # none where only the scale changed
        self._began = False

    # ------------------------------------------------------------------ state

    def bytes_sent(self) -> int:
        return self._bytes_sent

    def state(self) -> list[StateTensor]:
        """Residuals by rank; factors and the number of steps, which are the same on every rank."""
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
        self._buckets = []


def _first_factor(matrix: FactoredMatrix) -> torch.Tensor:
    """Random numbers that depend on the parameter's place alone, not on rank, device or buckets."""
    generator = torch.Generator().manual_seed(matrix.slot.parameter)
    return torch.randn(tuple(matrix.q.shape), generator=generator, dtype=torch.float32).to(matrix.q)
