"""Chooses the device of each rank: every rank proposes one, and all ranks decide on the same proposals."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hpctrain.comm import Collective, all_gather_json
from hpctrain.errors import LaunchError

DEVICE_NAMES = r"auto|cpu|cuda(:[0-9]+)?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The device that one rank could use. index: number of its CUDA device; None with a `reason` if there is none."""

    host: str
    index: int | None
    uuid: str | None = None
    reason: str = ""


def propose(*, host: str, host_rank: int, number: int | None = None) -> Proposal:
    """Returns this rank's CUDA device: the one with its rank on this machine, or the only one that it can see.

    number: the device given in the recipe, to use instead.
    """
    if not torch.cuda.is_available():
        return Proposal(host=host, index=None, reason="torch finds no CUDA device")
    count = torch.cuda.device_count()
    if number is not None:
        if number >= count:
            reason = f"it sees {count} CUDA device(s), none has the number {number}"
            return Proposal(host=host, index=None, reason=reason)
        return Proposal(host=host, index=number, uuid=_identity_of(number))
    # With --gpus-per-task each rank sees only its own device, as number 0.
    index = 0 if count == 1 else host_rank
    if index >= count:
        reason = f"{count} CUDA devices for at least {host_rank + 1} ranks"
        return Proposal(host=host, index=None, reason=reason)
    return Proposal(host=host, index=index, uuid=_identity_of(index))


def _identity_of(index: int) -> str:
    """Returns an identifier that is unique on this machine, even if processes number the devices differently."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return str(uuid)
    # torch before 2.5 does not provide it. CUDA_VISIBLE_DEVICES identifies the device, unless each rank sees its own
    # device as number 0: then the ranks seem to share one device, and run.device = "cuda:0" must be set.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index].strip() if index < len(visible) and visible[index].strip() else str(index)


def numbered(asked: str) -> int | None:
    """Returns the N of `cuda:N`; None for the other names."""
    name, _, number = asked.partition(":")
    return int(number) if name == "cuda" and number else None


def decide(proposals: Sequence[Proposal], *, asked: str) -> str | None:
    """Returns None if every rank has a separate device, or the requested one; else the reason for using the CPU.

    If `cuda` or `cuda:N` was requested, raises LaunchError instead, agreed since all ranks have the same proposals.
    """
    number = numbered(asked)
    reason = None
    owners: dict[tuple[str, str | None], int] = {}
    for rank, proposal in enumerate(proposals):
        first = owners.setdefault((proposal.host, proposal.uuid), rank)
        if proposal.index is None:
            reason = f"rank {rank} on {proposal.host}: {proposal.reason}"
        elif first != rank and number is None:
            reason = f"ranks {first} and {rank} on {proposal.host} have the same GPU"
        if reason is not None:
            break
    if reason is not None and number is not None:
        raise LaunchError(
            f"run.device = {asked!r}, but {reason}: name a device that every rank sees, or set run.device = 'auto'",
            agreed=True,
        )
    if reason is not None and asked == "cuda":
        raise LaunchError(
            f"run.device = 'cuda', but {reason}: start one rank per GPU (--ranks-per-node, --gpus-per-task), or set "
            "run.device = 'auto'; run.device = 'cuda:0' lets the ranks of a machine share its first GPU",
            agreed=True,
        )
    return reason


def choose_device(
    asked: str, *, comm: Collective, host: str, host_rank: int
) -> tuple[torch.device, str | None]:
    """Returns this rank's device, and the reason if it is the CPU although there are GPUs. Collective.

    asked: `cpu`, `cuda`, `cuda:N` (device N on each machine, which its ranks share), or `auto`, which is CUDA if
    every rank has a separate device. NCCL does not work between ranks that share a device; MPI does.
    Raises LaunchError on every rank if one of them does not have the requested device.
    """
    if re.fullmatch(DEVICE_NAMES, asked) is None:
        raise LaunchError(f"device {asked!r}: give auto, cpu, cuda, or a numbered one such as cuda:0")
    if asked == "cpu":
        return torch.device("cpu"), None
    mine = propose(host=host, host_rank=host_rank, number=numbered(asked))
    proposals = [Proposal(**fields) for fields in all_gather_json(comm, asdict(mine))]
    reason = decide(proposals, asked=asked)
    if reason is not None or mine.index is None:
        any_gpu = any(proposal.index is not None for proposal in proposals)
        return torch.device("cpu"), f"all ranks compute on the CPU: {reason}" if any_gpu else None
    # cuBLAS needs a fixed workspace for bit-identical results. It reads the variable at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", mine.index)
    torch.cuda.set_device(device)
    return device, None
