"""What ranks do in test_adasum: trainings of a session with the schedule adasum, against the definition."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hpctrain.comm import World
from tests.sessions import session_over
from tests.unit.reduce.collective_reducers.test_adasum import FIRST_MODEL, loss_of, tree

STEPS = 4


def trainings(world: World) -> dict[str, Any]:
    """For each way, with two ranks per node: the largest difference from the definition, and the parameters."""
    found = {}
    with session_over(world, nodes=[f"n{rank // 2}" for rank in range(world.num_ranks)]) as session:
        for within_node in ("adasum", "mean"):
            model = copy.deepcopy(FIRST_MODEL)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            schedule = {"method": "adasum", "within_node": within_node}
            updater = session.distributed_optimizer(model, optimizer, schedule=schedule, clip_norm=0.5)
            for step in range(STEPS):
                loss = loss_of(model, rank=world.rank, step=step, micro=0)
                updater.backward(loss, weight=1 / world.num_ranks)
                updater.step()
            updater.close()
            parameters = [parameter.detach() for parameter in model.parameters()]
            expected = _by_definition(session.topology.ranks_by_node, whole_nodes=within_node == "mean")
            found[within_node] = {
                "error": max(float((a - b).abs().max()) for a, b in zip(parameters, expected, strict=True)),
                "parameters": [parameter.flatten().tolist() for parameter in parameters],
            }
    return found


def _by_definition(ranks_by_node: Any, *, whole_nodes: bool) -> list[torch.Tensor]:
    model = copy.deepcopy(FIRST_MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parameters = list(model.parameters())
    num_ranks = sum(map(len, ranks_by_node))
    for step in range(STEPS):
        of_rank = [
            torch.autograd.grad(loss_of(model, rank=rank, step=step, micro=0), parameters)
            for rank in range(num_ranks)
        ]
        for index, parameter in enumerate(parameters):
            if whole_nodes:
                sums = [torch.stack([of_rank[r][index] for r in ranks]).sum(0) for ranks in ranks_by_node]
                parameter.grad = tree(sums) * len(ranks_by_node) / num_ranks
            else:
                parameter.grad = tree([gradients[index] for gradients in of_rank])
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
