"""Which device each rank computes on: proposed by the rank, decided for all alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hpctrain.comm import Collective, all_gather_json
from hpctrain.errors import LaunchError


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What one rank could use. index: its CUDA device, or None with the reason why there is none."""

    host: str
    index: int | None
    uuid: str | None = None
    reason: str = ""


def propose(*, host: str, host_rank: int) -> Proposal:
    """This rank's CUDA device: the one of its number on this machine, or the only one that it may see."""
    if not torch.cuda.is_available():
        return Proposal(host=host, index=None, reason="torch finds no CUDA device")
    count = torch.cuda.device_count()
    # One visible device: with --gpus-per-task each rank sees just its own, as number 0.
    index = 0 if count == 1 else host_rank
    if index >= count:
        reason = f"{count} CUDA devices for at least {host_rank + 1} ranks"
        return Proposal(host=host, index=None, reason=reason)
    return Proposal(host=host, index=index, uuid=str(torch.cuda.get_device_properties(index).uuid))


def decide(proposals: Sequence[Proposal], *, asked: str) -> str | None:
    """None: every rank has a device of its own. Else the reason why all ranks use the CPU. Pure.

    Raises LaunchError, agreed since all ranks decide on the same proposals, where `cuda` was asked for.
    """
    reason = None
    owners: dict[tuple[str, str | None], int] = {}
    for rank, proposal in enumerate(proposals):
        first = owners.setdefault((proposal.host, proposal.uuid), rank)
        if proposal.index is None:
            reason = f"rank {rank} on {proposal.host}: {proposal.reason}"
        elif first != rank:
            reason = f"ranks {first} and {rank} on {proposal.host} have the same GPU"
        if reason is not None:
            break
    if reason is not None and asked == "cuda":
        raise LaunchError(
            f"run.device = 'cuda', but {reason}: start one rank per GPU (--ranks-per-node, --gpus-per-task), or set "
            "run.device = 'auto'",
            agreed=True,
        )
    return reason


def choose_device(
    asked: str, *, comm: Collective, host: str, host_rank: int
) -> tuple[torch.device, str | None]:
    """The device of this rank, and why it is not a GPU though there are some. Collective.

    asked: `cpu`, `cuda`, or `auto`, which is CUDA where every rank has a device of its own.
    """
    if asked == "cpu":
        return torch.device("cpu"), None
    mine = propose(host=host, host_rank=host_rank)
    proposals = [Proposal(**fields) for fields in all_gather_json(comm, asdict(mine))]
    reason = decide(proposals, asked=asked)
    if reason is not None or mine.index is None:
        any_gpu = any(proposal.index is not None for proposal in proposals)
        return torch.device("cpu"), f"all ranks compute on the CPU: {reason}" if any_gpu else None
    # The library wants its workspace fixed for results that repeat to the bit; read when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", mine.index)
    torch.cuda.set_device(device)
    return device, None
