"""What ranks do in test_bench_reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from benchmarks.reduction.steps import Workload, mpi_stepper, our_stepper
from hpctrain.comm import World
from tests.sessions import session_over

SEED = 7
WORKLOAD = Workload(
    make=lambda: torch.nn.Linear(5, 3),
    batches=lambda generator: [
        (torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator))
    ],
    loss=functional.mse_loss,
)


class Recording:
    """A communicator that keeps what this rank hands to MPI_Allreduce."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.sent: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Allreduce(self, place: Any, buffer: Any, op: Any) -> None:  # noqa: N802  (MPI's name)
        self.sent.append(torch.from_numpy(buffer.copy()))
        self._comm.Allreduce(place, buffer, op=op)


def plain_mpi_and_ours(world: World) -> dict[str, float]:
    """One step of each with a batch of this rank's own; largest differences."""
    from mpi4py import MPI

    session, comm = session_over(world), Recording(MPI.COMM_WORLD)
    (batch,) = WORKLOAD.batches(torch.Generator().manual_seed(world.rank))
    torch.manual_seed(SEED)
    alone = WORKLOAD.make()
    WORKLOAD.loss(alone(batch[0]), batch[1]).backward()
    gradients = torch.cat([p.grad.reshape(-1) for p in alone.parameters() if p.grad is not None])
    plain = mpi_stepper(comm, WORKLOAD, seed=SEED)
    ours = our_stepper(session, WORKLOAD, seed=SEED, wire="fp32")
    for stepper in (plain, ours):
        stepper.step(batch)
    both = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    found = {
        "largest gradient": float(gradients.abs().max()),
        "sent off its part of the mean": float((comm.sent[0] - gradients / world.num_ranks).abs().max()),
        "parameters apart": max(float((a - b).detach().abs().max()) for a, b in both),
    }
    for stepper in (plain, ours):
        stepper.close()
    return found
