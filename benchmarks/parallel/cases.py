"""What the ranks do for the figures of equality, memory and traffic."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel.layouts import LAYOUTS, SAME_BITS
from benchmarks.parallel.training import Training, make_optimizer
from benchmarks.parallel.workloads import WORKLOADS, Language, Workload
from benchmarks.reduction.ranks import Ranks
from hpctrain.comm import all_gather_json
from hpctrain.run import Session

Settings = Mapping[str, Any]
BATCH = 11  # over 2, 4 and 8 ranks unequal parts
MEMORY_BATCH = 8
PIPELINE_SAMPLES = 32  # of a rank, for the traffic of pipelines: so many that their activations weigh


def equality(session: Session, settings: Settings) -> dict[str, dict[str, dict[str, float]]]:
    """Trains every workload in every layout, and by plain PyTorch in this process alone. Collective.

    Returns, by workload and layout, `relative`: the relative difference of the parameters in float64, the largest of
    any tensor and rank, by the norm; `bits`, of the layouts in `SAME_BITS`: how many parameters have other bits than
    those of whole copies in float32, on the rank where most have. settings: `workloads`, `layouts`, `steps`.
    """
    relative: dict[str, dict[str, float]] = {}
    bits: dict[str, dict[str, float]] = {}
    for name in settings["workloads"]:
        workload, steps = WORKLOADS[name], settings["steps"]
        expected = _alone(workload, steps=steps)
        relative[name], bits[name] = {}, {}
        layouts = [layout for layout in settings["layouts"] if _can_train(workload, layout)]
        for layout in layouts:
            found = _trained(session, workload, layout, steps=steps, dtype=torch.float64)
            _check_complete(session, found, expected)
            relative[name][layout] = max(all_gather_json(session.world, difference(found, expected)))
        same = [layout for layout in layouts if layout in SAME_BITS]
        if same:
            whole = _trained(session, workload, "none", steps=steps, dtype=torch.float32)
        for layout in same:
            found = _trained(session, workload, layout, steps=steps, dtype=torch.float32)
            differ = sum(not torch.equal(found[key], tensor) for key, tensor in whole.items())
            bits[name][layout] = max(all_gather_json(session.world, differ))
    return {"relative": relative, "bits": bits}


def _can_train(workload: Workload, layout: str) -> bool:
    options = LAYOUTS[layout].options
    return isinstance(workload, Language) or not options.keys() & {"pipeline", "sequence"}


def _trained(
    session: Session, workload: Workload, layout: str, *, steps: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns the parameters after `steps` steps, in a pipeline those of this rank's stages. Collective."""
    training = Training(session, workload, LAYOUTS[layout], batch=BATCH, dtype=dtype)
    for number in range(steps):
        training.step(number)
    found = training.parameters()
    training.close()
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


def _check_complete(
    session: Session, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """Raises ValueError unless the ranks together have found the parameters that are expected. Collective."""
    names = {name for of_rank in all_gather_json(session.world, list(found)) for name in of_rank}
    if names != expected.keys():
        raise ValueError(f"other parameters: {sorted(names ^ expected.keys())}")


def difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Returns the largest relative difference of any tensor that was found, by the norm."""
    return max(
        float((tensor - expected[name]).norm() / expected[name].norm()) for name, tensor in found.items()
    )


def memory(session: Session, settings: Settings) -> dict[str, Any]:
    """Returns the growth of each rank's memory by a model with gradients and optimizer state. Collective.

    Measured after backward of the second step: parameters, gradients and AdamW's moments are there, activations are
    not. Before it the same is done with a small model, so that what any training needs does not count.
    settings: `layout`, `workload`. Returns `parameters` and `split`, see `Counts`, and by rank: `held_bytes`, the
    growth once glibc has given back what is free, and `peak_bytes`, the largest resident memory in a step above what
    was held before.
    """
    layout = LAYOUTS[settings["layout"]]
    tiny = Training(session, WORKLOADS["tiny"], layout, batch=MEMORY_BATCH)
    for number in range(2):
        tiny.step(number)
    tiny.close()
    del tiny
    before = _held_bytes(session)
    training = Training(session, WORKLOADS[settings["workload"]], layout, batch=MEMORY_BATCH)
    training.step(0)
    _held_bytes(session)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loss = training.backward(1)
    held = _held_bytes(session) - before
    training.update(loss)
    mine = [held, _peak_bytes() - before]
    counts = asdict(training.counts)
    training.close()
    held_bytes, peak_bytes = zip(*all_gather_json(session.world, mine), strict=True)
    return {**counts, "held_bytes": list(held_bytes), "peak_bytes": list(peak_bytes)}


def _held_bytes(session: Session) -> int:
    """Returns this process's memory without pages of files. Collective.

    What the ranks share is divided among all of them, which are on one host: the kernel divides a page among those
    that have touched it.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    session.world.barrier()
    rollup = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if ":" in line
    )
    own, shared = (1024 * int(rollup[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    session.world.barrier()
    return own + sum(all_gather_json(session.world, shared)) // session.num_ranks


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

    settings: `workload`; `choices`, pairs of layout and wire; `steps` that count; `pause_s`. Returns the `pause`'s
    `seconds` and `node_bytes`, and by `layout/wire` the same of the steps, with the model's `counts`.
    """
    ranks = Ranks.of(session)
    before = ranks.node_bytes()
    time.sleep(settings["pause_s"])
    after = ranks.node_bytes()
    idle = [now - then for now, then in zip(after, before, strict=True)]
    found: dict[str, Any] = {"pause": {"seconds": settings["pause_s"], "node_bytes": idle}}
    for layout, wire in settings["choices"]:
        samples = PIPELINE_SAMPLES if LAYOUTS[layout].pipeline > 1 else 1
        training = Training(
            session, WORKLOADS[settings["workload"]], LAYOUTS[layout], batch=samples * session.num_ranks,
            wire=wire,
        )  # fmt: skip
        training.step(0)
        training.finish()
        before = ranks.node_bytes()
        began = time.perf_counter()
        for number in range(settings["steps"]):
            training.step(1 + number)
        training.finish()
        seconds = time.perf_counter() - began
        after = ranks.node_bytes()
        counted = [now - then for now, then in zip(after, before, strict=True)]
        counts = asdict(training.counts)
        found[f"{layout}/{wire}"] = {"seconds": seconds, "node_bytes": counted, "counts": counts}
        training.close()
    return found
