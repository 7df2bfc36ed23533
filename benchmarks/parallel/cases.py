"""What the ranks do for the figures of equality, memory and traffic."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel.layouts import LAYOUTS
from benchmarks.parallel.training import Training, make_optimizer
from benchmarks.parallel.workloads import WORKLOADS, Workload
from benchmarks.reduction.timing import Ranks
from hpctrain.comm import all_gather_json
from hpctrain.run import Session

Settings = Mapping[str, Any]
BATCH = 11  # over 2, 4 and 8 ranks unequal parts


def equality(session: Session, settings: Settings) -> dict[str, dict[str, float]]:
    """Trains every workload in every layout in float64, and by plain PyTorch in this process alone. Collective.

    Returns, by workload and layout, the relative difference of the parameters: the largest of any tensor and rank, by
    the norm. settings: `workloads`, `layouts`, `steps`.
    """
    found: dict[str, dict[str, float]] = {}
    for name in settings["workloads"]:
        workload = WORKLOADS[name]
        expected = _alone(workload, steps=settings["steps"])
        found[name] = {}
        for layout in settings["layouts"]:
            training = Training(session, workload, LAYOUTS[layout], batch=BATCH, dtype=torch.float64)
            for number in range(settings["steps"]):
                training.step(number)
            mine = difference(training.parameters(), expected)
            training.close()
            found[name][layout] = max(all_gather_json(session.world, mine))
    return found


def _alone(workload: Workload, *, steps: int) -> dict[str, torch.Tensor]:
    """Returns the parameters after `steps` steps with whole batches, without hpctrain."""
    torch.manual_seed(0)
    task = workload.task
    model = task.build_model().double()
    optimizer = make_optimizer(list(model.parameters()))
    for number in range(steps):
        optimizer.zero_grad()
        task.loss(model, workload.fields(samples=BATCH, seed=number)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Returns the largest relative difference of any tensor, by the norm. Raises ValueError for other names."""
    if found.keys() != expected.keys():
        raise ValueError(f"other parameters: {sorted(found.keys() ^ expected.keys())}")
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


def memory(session: Session, settings: Settings) -> dict[str, Any]:
    """Returns the growth of each rank's memory by a model with gradients and optimizer state. Collective.

    Measured after backward of the second step: parameters, gradients and AdamW's moments are there, activations are
    not. Before it the same is done with a small model, so that what any training needs does not count.
    settings: `layout`, `workload`. Returns `parameters`, their number, and by rank: `held_bytes`, the growth once glibc
    has given back what is free, and `peak_bytes`, the largest resident memory in a step above what was held before.
    """
    layout = LAYOUTS[settings["layout"]]
    tiny = Training(session, WORKLOADS["tiny"], layout, batch=session.num_ranks)
    for number in range(2):
        tiny.step(number)
    tiny.close()
    del tiny
    before = _held_bytes(session)
    training = Training(session, WORKLOADS[settings["workload"]], layout, batch=session.num_ranks)
    training.step(0)
    _held_bytes(session)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loss = training.backward(1)
    held = _held_bytes(session) - before
    training.update(loss)
    mine = [held, _peak_bytes() - before]
    count = sum(parameter.numel() for parameter in training.model.parameters())
    training.close()
    held_bytes, peak_bytes = zip(*all_gather_json(session.world, mine), strict=True)
    return {"parameters": count, "held_bytes": list(held_bytes), "peak_bytes": list(peak_bytes)}


def _held_bytes(session: Session) -> int:
    """Returns this process's memory without pages of files; shared pages are divided among their processes. Collective:
    all ranks have mapped what they share."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    session.world.barrier()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    session.world.barrier()
    return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _peak_bytes() -> int:
    """Returns the largest resident memory of this process, without pages of files."""
    sizes = {
        name: 1024 * int(value.split()[0])
        for name, value in (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        if name in ("VmHWM", "RssFile")
    }
    return sizes["VmHWM"] - sizes["RssFile"]


def traffic(session: Session, settings: Settings) -> dict[str, Any]:
    """Counts the bytes that leave each node in training steps. Collective.

    settings: `workload`; `choices`, pairs of layout and wire; `steps` that count; `pause_s`. Returns the number of
    `parameters`, the `pause`'s `seconds` and `node_bytes`, and the same of the steps by `layout/wire`.
    """
    from mpi4py import MPI

    ranks = Ranks(comm=MPI.COMM_WORLD, firsts=[node[0] for node in session.topology.groups("local")])
    before = ranks.node_bytes()
    time.sleep(settings["pause_s"])
    after = ranks.node_bytes()
    idle = [now - then for now, then in zip(after, before, strict=True)]
    found: dict[str, Any] = {"pause": {"seconds": settings["pause_s"], "node_bytes": idle}}
    for layout, wire in settings["choices"]:
        training = Training(
            session, WORKLOADS[settings["workload"]], LAYOUTS[layout], batch=session.num_ranks, wire=wire
        )
        training.step(0)
        before = ranks.node_bytes()
        began = time.perf_counter()
        for number in range(settings["steps"]):
            training.step(1 + number)
        seconds = time.perf_counter() - began
        after = ranks.node_bytes()
        counted = [now - then for now, then in zip(after, before, strict=True)]
        found[f"{layout}/{wire}"] = {"seconds": seconds, "node_bytes": counted}
        found["parameters"] = sum(parameter.numel() for parameter in training.model.parameters())
        training.close()
    return found
