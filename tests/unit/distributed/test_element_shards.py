"""A rank's elements of a parameter: what the optimizer updates, and which boxes of the whole a checkpoint holds."""

from __future__ import annotations

import pytest
import torch

from hpctrain.checkpoint import TensorShard, element_items
from hpctrain.distributed import element_shard, forget_elements, hold_elements


def parameters() -> dict[str, torch.nn.Parameter]:
    image = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    return {
        "scalar": torch.nn.Parameter(torch.tensor(3.0)),
        "vector": torch.nn.Parameter(torch.arange(11.0)),
        "matrix": torch.nn.Parameter(torch.arange(35.0).view(5, 7)),
        "transposed": torch.nn.Parameter(torch.arange(35.0).view(5, 7).t()),
        "cube": torch.nn.Parameter(torch.arange(60.0).view(3, 4, 5)),
        "channels last": torch.nn.Parameter(image.to(memory_format=torch.channels_last)),
        "empty": torch.nn.Parameter(torch.zeros(0, 5)),
    }


@pytest.mark.parametrize("name", parameters())
def test_saved_boxes_are_the_whole_and_each_rank_reads_its_part_of_it(name: str) -> None:
    numel = parameters()[name].numel()
    cuts = sorted({*range(0, numel, 1 if numel < 40 else 7), numel})
    for first in cuts:
        for second in (cut for cut in cuts if cut >= first):
            parameter = parameters()[name]
            whole = torch.full(parameter.shape, torch.nan)
            for begin, end in ((0, first), (first, second), (second, numel)):
                shard = hold_elements(parameter, begin=begin, end=end)
                items = element_items("moment", shard.part.detach().clone(), shard=shard)
                for item in items if end > begin else []:
                    assert isinstance(item, TensorShard)
                    assert item.global_shape == parameter.shape
                    box = tuple(slice(o, o + n) for o, n in zip(item.offset, item.tensor.shape, strict=True))
                    assert whole[box].isnan().all()
                    whole[box] = item.tensor
                offset, shape = shard.box_to_read()
                read = parameter.detach()[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                assert torch.equal(shard.cut(read.contiguous()), shard.part)
                assert torch.equal(shard.cut_whole(parameter.detach()), shard.part)
            assert torch.equal(whole, parameter)


def test_a_part_shares_the_memory_of_the_parameter() -> None:
    parameter = parameters()["channels last"]
    shard = hold_elements(parameter, begin=10, end=20)
    with torch.no_grad():
        shard.part.fill_(-1)
    assert (parameter == -1).sum() == 10
    assert element_shard(parameter) is shard
    forget_elements(parameter)
    assert element_shard(parameter) is None


def test_what_belongs_to_the_parameter_as_a_whole_is_saved_by_the_first_owner() -> None:
    parameter = parameters()["matrix"]
    step = torch.tensor(4.0)
    first, second = hold_elements(parameter, begin=0, end=9), hold_elements(parameter, begin=9, end=35)
    (item,) = element_items("step", step, shard=first)
    assert isinstance(item, TensorShard)
    assert item.global_shape == ()
    assert element_items("step", step, shard=second) == []
