"""Which device the ranks compute on: what they agree on, who is named, and what they receive for it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import final

import pytest
import torch

from hpctrain.comm import ReduceOp, SerialWorld, World, run_threads
from hpctrain.comm.interface.communicator import Forwarding
from hpctrain.errors import LaunchError
from hpctrain.run.compute.device import Proposal, agree_on_gpus, choose_device, propose


def gpu(index: int, uuid: str) -> Proposal:
    return Proposal(index=index, uuid=uuid)


NO_GPU = Proposal(index=None, problem="no CUDA")
SAME_GPU = "another rank of its machine has the same GPU"


def agreed_device(hosts: str, proposals: list[Proposal], *, asked: str) -> set[str | None]:
    """What ranks on these hosts, one letter each, agree on; the message of the error if they raise one."""

    def rank(world: World) -> str | None:
        host = hosts[world.rank]
        try:
            return agree_on_gpus(
                proposals[world.rank], asked=asked, comm=world, host=host,
                host_ranks=[rank for rank, other in enumerate(hosts) if other == host],
            )  # fmt: skip
        except LaunchError as error:
            return str(error) if error.agreed else "not agreed"

    return set(run_threads(len(hosts), rank))


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_every_rank_with_a_gpu_of_its_own_uses_it(asked: str) -> None:
    assert agreed_device("aab", [gpu(0, "u0"), gpu(1, "u1"), gpu(0, "u0")], asked=asked) == {None}


@pytest.mark.parametrize(
    ("hosts", "proposals", "text", "named"),
    [
        ("abb", [gpu(0, "u0"), gpu(0, "u1"), gpu(0, "u1")], SAME_GPU, "ranks 1-2"),
        ("abb", [gpu(0, "u0"), NO_GPU, NO_GPU], "no CUDA", "ranks 1-2"),
        ("aba", [gpu(0, "u0"), gpu(0, "u0"), NO_GPU], "no CUDA", "rank 2"),
    ],
)  # fmt: skip
def test_otherwise_all_ranks_use_the_cpu_or_the_run_is_refused_and_all_ranks_with_a_problem_are_named(
    hosts: str, proposals: list[Proposal], text: str, named: str
) -> None:
    lowest = int(named.split()[1].split("-")[0])
    expected = f"all ranks compute on the CPU: rank {lowest} on {hosts[lowest]}: {text}"
    assert agreed_device(hosts, proposals, asked="auto") == {expected}
    (refused,) = agreed_device(hosts, proposals, asked="cuda")
    assert refused is not None
    assert refused.startswith(f"{named} ({socket.gethostname()}): run.device = 'cuda', but {text}: start one")


def test_a_named_gpu_is_shared_by_the_ranks_of_a_machine_and_must_be_there_on_all() -> None:
    assert agreed_device("aa", [gpu(0, "u0"), gpu(0, "u0")], asked="cuda:0") == {None}
    (refused,) = agreed_device("ab", [gpu(1, "u1"), NO_GPU], asked="cuda:1")
    assert refused is not None
    assert "rank 1 (" in refused
    assert "run.device = 'cuda:1', but no CUDA: name a device that every rank sees" in refused


@final
class CountingWorld(Forwarding):
    """Counts the bytes that a rank receives."""

    def __init__(self, world: World) -> None:
        self._group = self._inner = world
        self.received = 0

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        self.received += buffer.nbytes
        self._inner.all_reduce(buffer, op=op)

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.received += sum(counts) * part.itemsize
        return self._inner.all_gather(part, counts=counts, out=out)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        self.received += sum(receive_counts) * buffer.itemsize
        return self._inner.all_to_all(buffer, send_counts=send_counts, receive_counts=receive_counts)


def test_what_a_rank_receives_to_choose_devices_does_not_grow_with_the_number_of_machines() -> None:
    def received(world: World) -> int:
        counting = CountingWorld(world)
        first = world.rank - world.rank % 2
        reason = agree_on_gpus(
            gpu(world.rank % 2, f"u{world.rank % 2}"), asked="cuda", comm=counting, host=f"h{first}",
            host_ranks=[first, first + 1],
        )  # fmt: skip
        assert reason is None
        return counting.received

    assert set(run_threads(4, received)) == set(run_threads(16, received)) == {2 * 8 + 2 * 8}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("asked", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused(asked: str) -> None:
    with pytest.raises(LaunchError, match=rf"run\.device = '{asked}', but torch finds no CUDA device"):
        choose_device(asked, comm=SerialWorld(), hosts=["here"])
    with pytest.raises(LaunchError, match="device 'gpu': give auto, cpu, cuda"):
        choose_device("gpu", comm=SerialWorld(), hosts=["here"])


class _OldProperties:
    """What torch before 2.5 says of a device: no uuid."""


def test_a_gpu_is_told_apart_also_by_a_torch_that_gives_no_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _OldProperties())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 7")
    assert [propose(host_rank=rank).uuid for rank in (0, 1)] == ["3", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [propose(host_rank=rank).uuid for rank in (0, 1)] == ["0", "1"]
    assert propose(host_rank=2).problem == "its machine has 2 CUDA devices and more ranks than that"
    assert propose(host_rank=1, number=0) == gpu(0, "0")
    assert propose(host_rank=0, number=2).index is None
