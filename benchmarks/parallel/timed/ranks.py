"""The program of each rank of a method: `python -m benchmarks.parallel.timed.ranks METHOD DIRECTORY`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from benchmarks.parallel.layouts import LAYOUTS
from benchmarks.parallel.timed.methods import METHODS, OPTIMIZERS, Method
from benchmarks.parallel.timed.waiting import Stepped, Turns
from benchmarks.parallel.workloads import WORKLOADS, Language, of_ranks
from benchmarks.starting import this_rank


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
    import torch.distributed as dist

    from benchmarks.parallel.timed.peers import start_gloo, stepper

    torch.set_num_threads(1)
    rank, _ = start_gloo()
    turns.take(stepper(method.name, workload, batch=batch), rank=rank, facts=this_rank())
    dist.destroy_process_group()


def train_horovod_script(method: Method, workload: Language, *, batch: int, turns: Turns) -> None:
    """Trains as Horovod's examples do, with `horovod.torch` or `hpctrain.hvd`: the same lines."""
    from benchmarks.parallel.timed.dividing_peers import OPTIONS, ordinary_steps

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
        directory=Path(directory),
        warmup=settings["warmup"],
        steps=settings["steps"],
        idle_s=settings["idle_s"],
    )
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
