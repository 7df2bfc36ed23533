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
    """Initialises `torch.distributed` on the ranks that mpirun or srun started. Collective.

    Replaces `torch.distributed.init_process_group(...)`, and needs no address, port or agent. Programs then use
    torch.distributed as before (DDP, FSDP2, DTensor, pipelines, DCP). Groups that they create have communicators of
    their own. An operation that exceeds the time limit ends all ranks with exit code 6.
    `torch.distributed.destroy_process_group()` also closes the session if this function has started it.

    Sets the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
    where they are not set yet, for libraries that read them. With tensors in host memory, also sets ACCELERATE_USE_CPU,
    without which Hugging Face accelerate takes each rank for a separate program.

    Args:
        session: A session of `hpctrain.init`; None: this function starts a session.
        device: The memory of the tensors and the library that moves them. "cpu": host memory, hpctrain's communicators.
            "cuda": the rank's GPU, NCCL, with gloo for tensors in host memory. "auto": "cuda" if the session uses a
            GPU, else "cpu".
        timeout_s: The time limit of an operation in seconds. If `session` is given, the limit of that session counts.
        watch_folder: A folder on a filesystem that all nodes share. With it, the message at the time limit names the
            missing ranks, and where in the program each missing rank is.

    Returns:
        The session.

    Raises:
        UsageError: If torch.distributed is initialised already, or an argument is invalid.
        LaunchError: If there is no MPI, or PyTorch is too old.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is initialised already: call torch.distributed.destroy_process_group() first"
        )
    if session is not None and not isinstance(session, Session):
        raise UsageError(
            f"init_process_group({session!r}): pass a session, or nothing. The backend follows from the device: "
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
