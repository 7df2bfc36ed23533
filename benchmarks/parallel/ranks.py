"""What the ranks do for the figures that no time decides (equality, memory, traffic, checkpoints), and for bubbles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import hpctrain
from benchmarks.memory import give_back_free, own_and_shared_bytes, reset_peak, status_bytes
from benchmarks.parallel.layouts import LAYOUTS, SAME_BITS
from benchmarks.parallel.training import WORKLOADS, Language, Training, Workload, make_optimizer
from benchmarks.ranks import Case, Settings
from benchmarks.reduction.ranks import Ranks
from hpctrain.checkpoint import export_dcp, finished_newest_first, import_dcp, open_checkpoint
from hpctrain.comm import SerialWorld, all_gather_json, broadcast_json
from hpctrain.run import Session

THREADS = 1
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
    reset_peak()
    loss = training.backward(1)
    held = _held_bytes(session) - before
    training.update(loss)
    mine = [held, status_bytes("VmHWM") - status_bytes("RssFile") - before]
    counts = asdict(training.counts)
    training.close()
    held_bytes, peak_bytes = zip(*all_gather_json(session.world, mine), strict=True)
    return {**counts, "held_bytes": list(held_bytes), "peak_bytes": list(peak_bytes)}


def _held_bytes(session: Session) -> int:
    """Returns this process's memory without pages of files. Collective.

    What the ranks share is divided among all of them, which are on one host: the kernel divides a page among those
    that have touched it.
    """
    give_back_free()
    session.world.barrier()
    own, shared = own_and_shared_bytes()
    session.world.barrier()
    return own + sum(all_gather_json(session.world, shared)) // session.world_size


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
            session, WORKLOADS[settings["workload"]], LAYOUTS[layout], batch=samples * session.world_size,
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


# ---------------------------------------------------------------------- checkpoints

Tensors = dict[str, torch.Tensor]
STEPS = 3  # before the checkpoint
NEXT = 2  # after it: the first loss depends on the parameters, the second one on the optimizer's moments too
FROM = "parameters"  # the layout that DCP saves: FSDP2


def save(session: Session, settings: Settings) -> dict[str, list[float]]:
    """Trains and saves each layout; returns the losses of the next steps. Collective. settings: `layouts`, `folder`."""
    found = {}
    for name in settings["layouts"]:
        training = _made(session, name)
        for number in range(STEPS):
            training.step(number)
        training.save(Path(settings["folder"]) / name, step=STEPS)
        found[name] = _next_losses(training)
        training.close()
    return found


def load(session: Session, settings: Settings) -> dict[str, dict[str, Any]]:
    """Loads what each of `settings["saved"]` has saved in each of `settings["layouts"]`. Collective.

    Returns by `SAVED/LOADED`: `different`, the number of tensors of model and optimizer whose bits differ in a
    checkpoint that the loading layout saves at once, and the `losses` of the next steps.
    """
    folder = Path(settings["folder"])
    found = {}
    for saved in settings["saved"]:
        for loaded in settings["layouts"]:
            training = _made(session, loaded, model_seed=1)
            if training.load(folder / saved) != STEPS:
                raise RuntimeError(f"{loaded} did not begin where {saved} has ended")
            again = training.save(folder / f"{saved}-{loaded}-{session.world_size}", step=STEPS)
            differ = _on_rank_0(
                session, lambda again=again, saved=saved: _differ(again, _newest(folder / saved))
            )
            found[f"{saved}/{loaded}"] = {"different": differ, "losses": _next_losses(training)}
            training.close()
    return found


def dcp(session: Session, settings: Settings) -> dict[str, int]:
    """Exports each layout's checkpoint to DCP, where `dcp.load` reads it; imports what `dcp.save` wrote. Collective.

    Returns the number of tensors whose bits differ, by `to/LAYOUT` and `from/LAYOUT`.
    """
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    folder = Path(settings["folder"])
    training = _made(session, FROM)  # opens torch.distributed
    found = {}
    for name in settings["layouts"]:
        checkpoint, exported = _newest(folder / name), folder / f"dcp-{name}"
        export_dcp(checkpoint, exported, comm=session.world)
        expected = _tensors(checkpoint)
        state = _state_dict({key: torch.full_like(tensor, -1) for key, tensor in expected.items()})
        torch_dcp.load(state, checkpoint_id=exported)
        found[f"to/{name}"] = _count_different(_flat(state), expected)

    training.load(folder / FROM)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    torch_dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder / "from-dcp")
    import_dcp(folder / "from-dcp", folder / "imported", comm=session.world, step=STEPS)
    found[f"from/{FROM}"] = _on_rank_0(
        session, lambda: _differ(_newest(folder / "imported"), _newest(folder / FROM))
    )
    training.close()
    return found


def _made(session: Session, layout: str, *, model_seed: int = 0) -> Training:
    return Training(
        session, WORKLOADS["saved"], LAYOUTS[layout], batch=BATCH, dtype=torch.float64, model_seed=model_seed
    )


def _next_losses(training: Training) -> list[float]:
    return [training.step(STEPS + number) for number in range(NEXT)]


def _newest(directory: Path) -> Path:
    return finished_newest_first(directory)[0]


def _tensors(checkpoint: Path) -> Tensors:
    """Returns the tensors of model and optimizer, whole."""
    every = open_checkpoint(checkpoint, comm=SerialWorld()).read_all()
    return {name: tensor for name, tensor in every.items() if name.startswith(("model/", "optimizer/"))}


def _differ(one: Path, other: Path) -> int:
    return _count_different(_tensors(one), _tensors(other))


def _count_different(found: Tensors, expected: Tensors) -> int:
    """Returns the number of tensors that only one of both has, or whose bits differ."""
    return len(found.keys() ^ expected.keys()) + sum(
        not torch.equal(found[name], tensor) for name, tensor in expected.items() if name in found
    )


def _on_rank_0(session: Session, count: Any) -> int:
    """Returns what `count` returns on rank 0. Collective."""
    found: int = broadcast_json(session.world, count() if session.rank == 0 else None)
    return found


def _state_dict(tensors: Tensors) -> dict[str, Any]:
    """Returns the state dict of DCP for tensors by the names of our checkpoints."""
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            state["model"][rest] = tensor
        else:
            parameter, _, key = rest.rpartition("::")
            state["optim"]["state"].setdefault(parameter, {})[key] = tensor
    return state


def _flat(state: dict[str, Any]) -> Tensors:
    """Returns the tensors of a state dict of `_state_dict` by our names."""
    moments = state["optim"]["state"]
    return {
        **{f"model/{name}": tensor for name, tensor in state["model"].items()},
        **{f"optimizer/{name}::{key}": tensor for name, of in moments.items() for key, tensor in of.items()},
    }


# ---------------------------------------------------------------------- bubbles

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
OF_TWO_STAGES = ("interleaved", "zero-bubble")


class _Sleep(torch.autograd.Function):
    """Returns its input; sleeps for `forward_s` then, and for `backward_s` in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class SleepingStage(torch.nn.Module):
    """Multiplies by a weight, and sleeps so long in forward and in backward of a micro-batch.

    Half of the backward is for the gradients of the input, half for those of the weights. With two stages per rank each
    sleeps half as long.
    """

    def __init__(self, width: int, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        half = self.backward_s / 2
        scaled = values * _Sleep.apply(self.weight, 0.0, half)  # type: ignore[no-untyped-call]
        slept: torch.Tensor = _Sleep.apply(scaled, self.forward_s, half)  # type: ignore[no-untyped-call]
        return slept


def bubble(session: Session, settings: Settings) -> list[dict[str, Any]]:
    """Measures every schedule with each number of micro-batches and each size of a message. Collective.

    settings: `micro_batches`, `message_bytes`; `steps` that count; `forward_s`, `backward_s` of a rank and micro-batch.
    Returns of each: `schedule`, `micro_batches`, `message_bytes`, `seconds` of each step on the slowest rank, and
    `alone_s`, in which a rank computes these micro-batches without messages, while the others do the same.
    """
    hpctrain.init_process_group(session)
    sleeps = {name: settings[name] for name in ("forward_s", "backward_s")}
    found = [
        {
            "schedule": schedule,
            "micro_batches": micro_batches,
            "message_bytes": message_bytes,
            **_measured(
                schedule, micro_batches=micro_batches, message_bytes=message_bytes, steps=settings["steps"],
                **sleeps,
            ),
        }
        for message_bytes in settings["message_bytes"]
        for micro_batches in settings["micro_batches"]
        for schedule in SCHEDULES
    ]  # fmt: skip
    dist.destroy_process_group()
    return found


def _measured(
    schedule: str, *, micro_batches: int, message_bytes: int, steps: int, forward_s: float, backward_s: float
) -> dict[str, Any]:
    """Returns the `seconds` of each step after a first that does not count, and `alone_s`. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_rank = 2 if schedule in OF_TWO_STAGES else 1
    width = message_bytes // 4
    modules = {
        number: SleepingStage(width, forward_s=forward_s / per_rank, backward_s=backward_s / per_rank)
        for number in range(rank, per_rank * num_ranks, num_ranks)
    }
    stages = [
        PipelineStage(module, number, per_rank * num_ranks, torch.device("cpu"))
        for number, module in modules.items()
    ]
    runs = SCHEDULES[schedule](
        stages if per_rank > 1 else stages[0], n_microbatches=micro_batches,
        loss_fn=lambda output, target: (output - target).mean(),
    )  # fmt: skip
    inputs = torch.ones(micro_batches, width)
    arguments = (inputs,) if rank == 0 else ()
    targets = {"target": inputs} if rank == num_ranks - 1 else {}

    def alone() -> None:
        for module in modules.values():
            for row in inputs.split(1):
                module(row.requires_grad_()).mean().backward()

    return {
        "alone_s": min(_on_slowest(alone, times=2)),
        "seconds": _on_slowest(
            lambda: runs.step(*arguments, **targets, return_outputs=False), times=steps + 1
        )[1:],
    }


def _on_slowest(run: Callable[[], object], *, times: int) -> list[float]:
    """Returns the seconds of each call of `run` on the slowest rank. Collective."""
    found = []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        run()
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(float(slowest))
    return found


CASES: dict[str, Case] = {
    "equality": equality, "memory": memory, "traffic": traffic, "bubble": bubble, "save": save, "load": load,
    "dcp": dcp,
}  # fmt: skip
