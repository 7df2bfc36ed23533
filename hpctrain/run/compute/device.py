"""Chooses the device of each rank, and the precision in which it computes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import xxhash

from hpctrain.comm import Collective, ReduceOp, broadcast_json, raise_together
from hpctrain.errors import LaunchError, RecipeError
from hpctrain.reduce import LossScale
from hpctrain.run.compute.device_names import DEVICE_NAMES

# Chooses the device of each rank: every rank proposes one, and all ranks agree whether these are used.
#
# Each rank receives 8 bytes from every rank of its machine and takes part in two small all-reduces,
# whatever the number of ranks. Texts are exchanged only if the proposals cannot be used.


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The CUDA device that a rank could use.

    Attributes:
        index: The index of the device in this process; None if the rank can use no device.
        uuid: An identifier of the device, unique on its machine.
        problem: Why the rank can use no device; empty otherwise.
    """

    index: int | None
    uuid: str = ""
    problem: str = ""


def propose(*, host_rank: int, number: int | None = None) -> Proposal:
    """Returns the CUDA device that this rank could use: the only visible device, else the device `host_rank`.

    host_rank: the index of this rank among the ranks of its machine.
    number: the device index that the recipe gives, which takes precedence.
    """
    if not torch.cuda.is_available():
        return Proposal(index=None, problem="torch finds no CUDA device")
    count = torch.cuda.device_count()
    if number is not None:
        if number >= count:
            problem = f"torch finds {count} CUDA device(s), none has the number {number}"
            return Proposal(index=None, problem=problem)
        return Proposal(index=number, uuid=_identity_of(number))
    # With --gpus-per-task each rank sees only its own device, as number 0.
    index = 0 if count == 1 else host_rank
    if index >= count:
        return Proposal(index=None, problem=f"its machine has {count} CUDA devices and more ranks than that")
    return Proposal(index=index, uuid=_identity_of(index))


def _identity_of(index: int) -> str:
    """Returns an identifier of the device that is unique on this machine.

    The identifier is the same in processes that number the devices differently.
    """
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return str(uuid)
    # torch before 2.5 does not provide it. CUDA_VISIBLE_DEVICES identifies the device, unless each rank sees its own
    # device as number 0: then the ranks seem to share one device, and run.device = "cuda:0" must be set.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index].strip() if index < len(visible) and visible[index].strip() else str(index)


def numbered(asked: str) -> int | None:
    """Returns N for the device name `cuda:N`; None for other names."""
    name, _, number = asked.partition(":")
    return int(number) if name == "cuda" and number else None


def has_own_gpu(uuid: str, *, comm: Collective, host_ranks: Sequence[int]) -> bool:
    """Returns True if no other rank of this machine proposes the device `uuid`. Collective.

    host_ranks: the ranks of this machine. Each of these ranks receives 8 bytes from every other rank of the machine.
    """
    counts = [0] * comm.num_ranks
    for rank in host_ranks:
        counts[rank] = 1
    mine = xxhash.xxh3_64_intdigest(uuid.encode()) >> 1  # torch has no unsigned 64-bit integers
    found = comm.all_to_all(
        torch.full((len(host_ranks),), mine, dtype=torch.int64), send_counts=counts, receive_counts=counts
    )
    return found.tolist().count(mine) == 1


def _lowest_with_problem(comm: Collective, problem: str) -> int | None:
    """Returns the lowest rank that has a problem; None if no rank has one. Collective."""
    lowest = torch.tensor([-comm.rank if problem else -comm.num_ranks], dtype=torch.int64)
    comm.all_reduce(lowest, op=ReduceOp.MAX)
    return None if -int(lowest) == comm.num_ranks else -int(lowest)


def agree_on_gpus(
    mine: Proposal, *, asked: str, comm: Collective, host: str, host_ranks: Sequence[int]
) -> str | None:
    """Returns None if each rank uses the GPU that it proposes, else why all ranks use the CPU. Collective.

    The returned text is empty if no rank has a GPU.

    mine: this rank's proposal.
    asked: `auto`, `cuda` or `cuda:N`.
    host: name of this machine.
    host_ranks: the ranks of this machine.

    Raises LaunchError on every rank, naming all ranks that have a problem, if `cuda` or `cuda:N` cannot be used.
    """
    problem = mine.problem
    lowest = _lowest_with_problem(comm, problem)
    if lowest is None and numbered(asked) is None:
        if not has_own_gpu(mine.uuid, comm=comm, host_ranks=host_ranks):
            problem = "another rank of its machine has the same GPU"
        lowest = _lowest_with_problem(comm, problem)
    if lowest is None:
        return None
    if asked != "auto":
        raise_together(comm, _refusal(asked, problem) if problem else None)
    any_gpu = torch.tensor([int(mine.index is not None)])
    comm.all_reduce(any_gpu, op=ReduceOp.MAX)
    if not int(any_gpu):
        return ""
    reason = broadcast_json(comm, f"rank {comm.rank} on {host}: {problem}", root=lowest)
    return f"all ranks compute on the CPU: {reason}"


def choose_device(asked: str, *, comm: Collective, hosts: Sequence[str]) -> tuple[torch.device, str | None]:
    """Returns this rank's device, and a reason if the device is the CPU although there are GPUs, else None. Collective.

    asked: `cpu`; `cuda`; `cuda:N`, device N of each machine, which all ranks of the machine share; or `auto`, which
    takes CUDA if every rank has a GPU of its own. NCCL does not work between ranks that share a device; MPI does.
    hosts: the machine of each rank.

    Raises LaunchError on every rank, naming all ranks that lack the requested device.
    """
    if re.fullmatch(DEVICE_NAMES, asked) is None:
        raise LaunchError(f"device {asked!r}: give auto, cpu, cuda, or a numbered one such as cuda:0")
    if asked == "cpu":
        return torch.device("cpu"), None
    host = hosts[comm.rank]
    host_ranks = [rank for rank, other in enumerate(hosts) if other == host]
    mine = propose(host_rank=host_ranks.index(comm.rank), number=numbered(asked))
    reason = agree_on_gpus(mine, asked=asked, comm=comm, host=host, host_ranks=host_ranks)
    if reason is not None or mine.index is None:
        return torch.device("cpu"), reason or None
    # cuBLAS needs a fixed workspace for bit-identical results. It reads the variable at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", mine.index)
    torch.cuda.set_device(device)
    return device, None


def _refusal(asked: str, problem: str) -> LaunchError:
    cure = "name a device that every rank sees, or set run.device = 'auto'"
    if asked == "cuda":
        cure = (
            "start one rank per GPU (--ranks-per-node, --gpus-per-task), or set run.device = 'auto'; run.device = "
            "'cuda:0' lets the ranks of a machine share its first GPU"
        )
    return LaunchError(f"run.device = {asked!r}, but {problem}: {cure}")


# Dtypes, autocast and loss scale for the recipe's `precision`.


MODEL_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(precision: str, *, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Returns a function that creates the context in which forward runs: autocast for `bf16` and `fp16`.

    Raises RecipeError if the device does not support `precision`.
    """
    dtype = AUTOCAST_DTYPE.get(precision)
    if dtype is None:
        return nullcontext
    if device.type == "cuda" and dtype is torch.bfloat16 and not _has_bf16(device):
        raise RecipeError("run.precision = 'bf16': this GPU has no bfloat16 arithmetic; use 'fp16'")
    return lambda: torch.autocast(device.type, dtype=dtype)


def _has_bf16(device: torch.device) -> bool:
    """Returns True if the GPU computes in bfloat16 in hardware.

    `torch.cuda.is_bf16_supported` is also True (since torch 2.4) if bfloat16 is emulated, which is slower than float32,
    and it checks the current device only.
    """
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def loss_scale_for(precision: str, *, wire: str, max_skipped_in_row: int) -> LossScale:
    """Returns a dynamic loss scale for the precision `fp16`, else the loss scale that the wire format needs."""
    if precision == "fp16":
        return LossScale(value=2.0**16, dynamic=True, max_skipped_in_row=max_skipped_in_row)
    return LossScale.for_wire(wire, max_skipped_in_row=max_skipped_in_row)
