"""Starts `torch.distributed` on the ranks of a session."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.distributed import open_process_group
from hpctrain.errors import UsageError
from hpctrain.run.session import Session, init


def init_process_group(
    session: Session | None = None,
    *,
    device: str = "cpu",
    timeout_s: float = 600.0,
    watch_folder: str | Path | None = None,
) -> Session:
    """Makes `torch.distributed` use the ranks that mpirun or srun started. Collective; returns their session.

    In place of `torch.distributed.init_process_group(...)`; no address, port or agent is needed. Programs then use
    torch.distributed as before (DDP, FSDP2, DTensor, pipelines, DCP). Groups that they make have communicators of their
    own. An operation that takes longer than the limit ends all ranks with exit code 6.
    `torch.distributed.destroy_process_group()` closes the session if it was made here.

    session: of `hpctrain.init`; None starts one. Its time limit counts, not `timeout_s`.
    device: `cpu`, tensors in host memory over hpctrain's communicators; `cuda`, tensors on the rank's GPU over NCCL,
    and those in host memory over gloo; `auto`, `cuda` if this session chose a GPU.
    watch_folder: a folder that all ranks see; through it that message names the missing ranks, and where they are.
    Sets what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) in the
    environment, where it is not set, for libraries that look there; with tensors in host memory also
    ACCELERATE_USE_CPU, without which Hugging Face accelerate takes each rank for a program of its own.
    Raises UsageError if torch.distributed is initialised already, LaunchError without MPI or if PyTorch is too old.
    """
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialised already: call destroy_process_group before")
    if session is not None and not isinstance(session, Session):
        raise UsageError(
            f"init_process_group({session!r}): it takes a session, or nothing. There is no backend to choose: "
            'device="cuda" takes NCCL'
        )
    if device not in ("cpu", "cuda", "auto"):
        raise UsageError(f"device {device!r}: choose cpu, cuda or auto")
    made_here = session is None
    if session is None:
        session = init(device="cpu" if device == "cpu" else device, timeout_s=timeout_s)
    if watch_folder is not None:
        session.world.publish_in(Path(watch_folder))
    open_process_group(
        session.world, session.topology, timeout_s=session.world.limits.settings.timeout_s,
        device=session.device if device != "cpu" else torch.device("cpu"),
        close=session.close if made_here else None,
    )  # fmt: skip
    return session
