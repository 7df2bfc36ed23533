"""Comparison of what ranks call, join, and Adasum, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import BufferMismatch
from hpctrain.hvd.asynchronous import start_all_reduce
from hpctrain.hvd.errors import HorovodInternalError
from hpctrain.hvd.group import Group, join_all
from hpctrain.hvd.reductions import Adasum, Average, Max, Sum


def make_group(world: World) -> Group:
    return Group(world.duplicate(), name="all ranks")


@pytest.mark.parametrize(
    ("steps", "last"), [([0, 0, 0], 2), ([2, 0, 1], 0), ([1, 3, 3], 2), ([5, 4, 0], 0), ([0, 1, 0], 1)]
)
def test_ranks_that_have_joined_add_zeros_until_all_have(steps: list[int], last: int) -> None:
    def rank_main(world: World) -> tuple[list[float], int, int]:
        group, gradients, found = make_group(world), make_group(world), []
        for step in range(steps[world.rank]):
            tensors = [torch.full((3,), 6.0), torch.ones(2, 2, dtype=torch.float64)]
            start_all_reduce(group, tensors, name=f"step {step}", op=Average if step % 2 else Sum).wait()
            start_all_reduce(gradients, [torch.ones(5)], name="small", op=Adasum, behind=False)
            found.append(float(tensors[0][2]))
        joined = join_all([group, gradients])
        again = torch.ones(1)
        start_all_reduce(group, [again], name="after", op=Max, behind=False)
        group.close()
        gradients.close()
        return found, joined, int(again)

    for rank, (found, joined, again) in enumerate(run_threads(3, rank_main)):
        active = [sum(step < count for count in steps) for step in range(steps[rank])]
        assert found == [6.0 * count / (3 if step % 2 else 1) for step, count in enumerate(active)]
        assert (joined, again) == (last, 1)


def test_what_each_rank_called_is_in_the_error_of_all_who_may_continue() -> None:
    def rank_main(world: World) -> list[str]:
        group = make_group(world)
        names = ["first", "second"] if world.rank != 1 else ["second", "first"]
        works = [start_all_reduce(group, [torch.ones(2)], name=name, op=Sum) for name in names]
        messages = []
        for work in works:
            with pytest.raises(BufferMismatch) as raised:
                work.wait()
            messages.append(str(raised.value))
        total = torch.ones(2)
        start_all_reduce(group, [total], name="first", op=Sum, behind=False)
        assert total.tolist() == [3.0, 3.0]
        group.close()
        return messages

    found = run_threads(3, rank_main)
    assert found[1:] == found[:1] * 2
    first, second = found[0]
    assert "operation 1 of all ranks" in first
    assert "ranks 0, 2 \"allreduce 'first' float32 (2,) sum\"" in first
    assert "rank 1 \"allreduce 'second' float32 (2,) sum\"" in first
    assert second == first  # it was asked for before the first one was waited for


def test_only_sums_continue_without_ranks_that_have_joined() -> None:
    def rank_main(world: World) -> int:
        group, gradients = make_group(world), make_group(world)
        if world.rank < 2:
            with pytest.raises(HorovodInternalError) as found:
                start_all_reduce(group, [torch.ones(2)], name="best", op=Max, behind=False)
            assert found.value.agreed
            assert str(found.value).startswith("allreduce 'best' float32 (2,) max: rank 2 has called join")
            with pytest.raises(HorovodInternalError, match=f"'of rank {1 - world.rank}'"):
                start_all_reduce(group, [torch.ones(2)], name=f"of rank {world.rank}", op=Sum, behind=False)
            total = torch.ones(2)
            start_all_reduce(group, [total], name="sum", op=Sum, behind=False)
            assert total.tolist() == [2.0, 2.0]
        last = join_all([group, gradients])
        group.close()
        gradients.close()
        return last

    assert run_threads(3, rank_main) == [1, 1, 1]
