"""The program of each rank of a method that is timed: `python -m benchmarks.parallel.timed_ranks METHOD DIRECTORY`.

It makes steps when the benchmark says so, and sleeps in between: it looks for a file in a folder that all nodes see
every 20 ms. Peers are written as in their documentation. Those whose ranks compute samples together, torch's tensor
groups and pipelines on Gloo times data parallel, split the model as the layouts do that they are compared with: a
mesh of two axes, the layers of one plan, a stage built of the model's layers by hand. A group or pipeline trains on the
samples of all of its ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from benchmarks.parallel.layouts import LAYOUTS
from benchmarks.parallel.timed import END, METHODS, OPTIMIZERS, Method
from benchmarks.parallel.training import WORKLOADS, Language, of_ranks
from benchmarks.starting import this_rank
from benchmarks.turns import POLL_S

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}  # of AdamW
_DIVISION = 2  # ranks of a tensor group, stages of a pipeline


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What a step says of this rank. loss: of its samples, before the step. exposed_s: seconds in which it only waited
    for communication; None where that is not known."""

    loss: float
    exposed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of one method, as its ranks take them.

    directory: the folder of this method. warmup: number of steps after the start. steps: number of timed steps per
    turn, after one that is not timed. idle_s: seconds after which a waiting rank ends, since the benchmark has ended.
    """

    directory: Path
    warmup: int
    steps: int
    idle_s: float

    def take(
        self, step: Callable[[int], Stepped], *, finish: Callable[[], object] = lambda: None, rank: int,
        facts: dict[str, Any],
    ) -> None:  # fmt: skip
        """Makes the steps of each turn until the benchmark ends the method. Collective over the method's ranks.

        step: makes the step of a number. finish: waits for what a step has left to the next one; of a turn the first
        such rest is timed, with the second step, and not the last. facts: how this rank was started, for the record.
        """
        number = 0
        loss = 0.0
        for _ in range(self.warmup):
            loss = step(number).loss
            number += 1
        self._write(f"ready-{rank}.json", {"loss": loss, "facts": facts})
        turn = 0
        while self._wait_for(turn):
            step(number)
            began = time.perf_counter()
            made = [step(number + more) for more in range(1, 1 + self.steps)]
            seconds = (time.perf_counter() - began) / self.steps
            finish()  # the next turn is another method's
            exposed = [one.exposed_s for one in made if one.exposed_s is not None]
            number += 1 + self.steps
            found = {"step_s": seconds, "exposed_s": sum(exposed) / len(exposed) if exposed else None}
            self._write(f"done-{turn}-{rank}.json", found)
            turn += 1

    def _wait_for(self, turn: int) -> bool:
        """Returns True when turn number `turn` begins, False at the end."""
        until_s = time.monotonic() + self.idle_s
        while time.monotonic() < until_s:
            if (self.directory / f"turn-{turn}").exists():
                return True
            if (self.directory / END).exists():
                return False
            time.sleep(POLL_S)
        return False

    def _write(self, name: str, content: Any) -> None:
        part = self.directory / f"{name}.part"
        part.write_text(json.dumps(content))
        os.replace(part, self.directory / name)


Step = Callable[[int], Stepped]


# ---------------------------------------------------------------------- peers


def ordinary_steps(
    workload: Language, model: nn.Module, optimizer: torch.optim.Optimizer, *, ranks: Sequence[int], num_ranks: int,
    batch: int,
) -> Step:  # fmt: skip
    """Returns the function that makes a step of forward, backward and update on the samples of `ranks`.

    num_ranks: of all. batch: samples of each rank.
    """

    def step(number: int) -> Stepped:
        fields = of_ranks(workload, ranks, number=number, num_ranks=num_ranks, samples=batch)
        optimizer.zero_grad()
        loss = workload.task.loss(model, fields)
        loss.backward()
        optimizer.step()
        return Stepped(loss=float(loss.detach()))

    return step


def tensor_stepper(workload: Language, *, batch: int) -> Step:
    """Returns the function that makes a step with tensor groups of 2, over which DDP sums. Collective.

    batch: samples of each rank.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks // _DIVISION, _DIVISION), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: nn.Module = workload.task.build_model()
    for block in model.blocks:  # type: ignore[union-attr]
        plan = {
            "attention_in": ColwiseParallel(),
            "attention_out": RowwiseParallel(),
            "feed_forward.0": ColwiseParallel(),
            "feed_forward.2": RowwiseParallel(),
        }
        parallelize_module(block, mesh["tp"], plan)
    if mesh["dp"].size() > 1:
        model = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    ranks = _sharing(mesh["dp"].get_local_rank())
    return ordinary_steps(workload, model, optimizer, ranks=ranks, num_ranks=num_ranks, batch=batch)


def pipeline_stepper(workload: Language, *, batch: int) -> Step:
    """Returns the function that makes a step with pipelines of 2 by 1F1B, over which DDP sums. Collective.

    batch: samples of each rank.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (_DIVISION, num_ranks // _DIVISION), mesh_dim_names=("pp", "dp"))
    index = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    layers = workload.task.build_model().layers()  # type: ignore[operator]
    half = 1 + workload.layers // 2  # the embeddings are before the first block
    module: nn.Module = nn.Sequential(*(layers[half:] if index else layers[:half]))
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    if mesh["dp"].size() > 1:
        module = nn.parallel.DistributedDataParallel(
            module, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
        )
    stage = PipelineStage(module, index, _DIVISION, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(
        stage, n_microbatches=LAYOUTS["pipeline-2"].options["micro_batches"], loss_fn=loss_of
    )
    ranks = _sharing(mesh["dp"].get_local_rank())

    def step(number: int) -> Stepped:
        fields = of_ranks(workload, ranks, number=number, num_ranks=num_ranks, samples=batch)
        tokens = fields["tokens"]
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if index == 0:
            schedule.step(tokens[:, :-1], return_outputs=False)
        else:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        # Of the ranks of a pipeline one has the loss: the mean of the ranks is then that of the pipelines.
        return Stepped(loss=_DIVISION * fmean(float(loss.detach()) for loss in losses) if losses else 0.0)

    return step


def _sharing(group: int) -> range:
    """Returns the ranks whose samples the ranks of tensor group or pipeline number `group` train on."""
    return range(_DIVISION * group, _DIVISION * (group + 1))


def start_gloo() -> tuple[int, int]:
    """Initialises torch.distributed from the environment (env://); returns rank and number of ranks. Collective.

    torchrun has set the variables; under srun they are those of Slurm.
    """
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def stepper(method: str, workload: Language, *, batch: int) -> Step:
    """Returns the function that makes a step. Collective.

    method: name of the peer. batch: samples of each rank; the ranks have equally many, so the mean of their gradients
    is that of the loss.
    """
    if method in _DIVIDING:
        return _DIVIDING[method](workload, batch=batch)
    torch.manual_seed(0)
    model, optimizer = _METHODS[method](workload.task.build_model())
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return ordinary_steps(workload, model, optimizer, ranks=[rank], num_ranks=num_ranks, batch=batch)


Made = tuple[nn.Module, torch.optim.Optimizer]


def _ddp(model: nn.Module) -> Made:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), **OPTIONS)


def _ddp_fp16(model: nn.Module) -> Made:
    wrapped, optimizer = _ddp(model)
    wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    return wrapped, optimizer


def _zero(model: nn.Module) -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **OPTIONS
    )
    return wrapped, optimizer


def _fsdp2(model: nn.Module) -> Made:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    *others, last = model.blocks  # type: ignore[union-attr,misc]
    for block in others:
        fully_shard(block, mesh=mesh)
    fully_shard(last, mesh=mesh, reshard_after_forward=False)  # backward needs it at once
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


_METHODS: dict[str, Callable[[nn.Module], Made]] = {
    "ddp": _ddp, "ddp-fp16": _ddp_fp16, "zero": _zero, "fsdp2": _fsdp2,
}  # fmt: skip
_DIVIDING: dict[str, Callable[..., Step]] = {"tensor": tensor_stepper, "pipeline": pipeline_stepper}


# ---------------------------------------------------------------------- the program


def train_ours(method: Method, workload: Language, *, batch: int, turns: Turns) -> None:
    """Trains a layout on the ranks that `hpctrain launch` started.

    batch: samples of each rank. The ranks of a tensor group or pipeline train on those of all of its ranks, so that
    each layout has the same samples in a step.
    """
    from benchmarks.parallel.training import Training
    from hpctrain.run import init

    session = init(backend="mpi", device="cpu", timeout_s=turns.idle_s)
    assert method.layout is not None
    training = Training(
        session, workload, LAYOUTS[method.layout], batch=batch * session.world_size, wire=method.wire
    )

    data = session.axes.data
    of_group = session.world_size // data.size
    places = range(data.index * of_group, (data.index + 1) * of_group)

    def step(number: int) -> Stepped:
        fields = of_ranks(workload, places, number=number, num_ranks=session.world_size, samples=batch)
        loss = training.backward_of(fields) * session.world_size
        training.update()
        return Stepped(loss=loss, exposed_s=training.exposed_s)

    turns.take(step, finish=training.finish, rank=session.rank, facts=this_rank())
    training.close()
    session.close()


def train_peer(method: Method, workload: Language, *, batch: int, turns: Turns) -> None:
    """Trains with a peer on the ranks that torchrun or srun started."""
    torch.set_num_threads(1)
    rank, _ = start_gloo()
    turns.take(stepper(method.name, workload, batch=batch), rank=rank, facts=this_rank())
    dist.destroy_process_group()


def train_horovod_script(method: Method, workload: Language, *, batch: int, turns: Turns) -> None:
    """Trains as Horovod's examples do, with `horovod.torch` or `hpctrain.hvd`: the same lines."""
    hvd = importlib.import_module(method.interface)
    hvd.init()
    torch.manual_seed(0)
    model = workload.task.build_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), **OPTIONS),
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, "none" if method.wire == "fp32" else method.wire),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    rank, num_ranks = hvd.rank(), hvd.size()
    step = ordinary_steps(workload, model, optimizer, ranks=[rank], num_ranks=num_ranks, batch=batch)
    turns.take(step, rank=rank, facts=this_rank())
    hvd.shutdown()


def main(name: str, directory: str) -> None:
    settings = json.loads((Path(directory) / "settings.json").read_text())
    workload = WORKLOADS[settings["workload"]]
    assert isinstance(workload, Language)
    turns = Turns(
        directory=Path(directory), warmup=settings["warmup"], steps=settings["steps"], idle_s=settings["idle_s"],
    )  # fmt: skip
    method = {**METHODS, **OPTIMIZERS}[name]
    if method.interface:
        train = train_horovod_script
    else:
        train = train_peer if method.layout is None else train_ours
    try:
        train(method, workload, batch=settings["batch"], turns=turns)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the launcher ends the other ranks


if __name__ == "__main__":
    main(*sys.argv[1:])
