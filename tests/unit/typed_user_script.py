"""A user's script as a type checker sees it: every name of `hpctrain` is used as its own type. It is never run."""

from pathlib import Path

import numpy as np
import torch

import hpctrain
from hpctrain import (
    Batch,
    Dataset,
    DistributedOptimizer,
    Ema,
    HpctrainError,
    Loader,
    LossScale,
    ParallelPlan,
    Position,
    Session,
    StopRequest,
    Task,
    TimeToStop,
    WallClock,
    WireFormat,
)
from hpctrain.checkpoint import (
    FromRank0,
    Replicated,
    SaveOptions,
    State,
    TensorShard,
    load_newest_good,
    model_items,
)


def train(task: Task, directory: Path) -> list[str]:
    hpctrain.pack_arrays(directory / "data", {"x": np.zeros((8, 3), np.float32)})
    recipe = hpctrain.load_recipe(directory / "recipe.toml")
    session: Session = hpctrain.init(backend=recipe.run.backend)
    sizes: list[int] = [session.rank, session.world_size, session.local_rank, session.local_world_size]
    model = session.parallelize(task.build_model(), ParallelPlan(shard="parameters"))
    updater: DistributedOptimizer = session.distributed_optimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=LossScale()
    )
    average: Ema = Ema(model, decay=0.9)
    average.update()
    dataset: Dataset = session.open_dataset(directory / "data")
    loader: Loader = session.loader(dataset, global_batch=4)
    stop: StopRequest = StopRequest().install()
    clock: WallClock = WallClock.start()
    plan: TimeToStop = TimeToStop(margin_s=60)
    with loader.epoch(Position().epoch) as batches:
        for batch in batches:
            one: Batch = batch
            loss = task.loss(model, one.fields)
            assert isinstance(loss, torch.Tensor)  # this task's losses have no weights
            updater.backward(loss, weight=one.weight)
            updater.step(sums={"stop": stop.requested or plan.must_stop(clock.time_left_s())})
    weight = torch.zeros(2)
    state: State = State(
        items=[
            *model_items(model),
            Replicated(name="weight", tensor=weight),
            FromRank0(name="buffer", tensor=weight),
            TensorShard(name="rows", tensor=weight, global_shape=(4,), offset=(2 * session.rank,)),
        ]
    )
    options: SaveOptions = SaveOptions(keep=2)
    try:
        hpctrain.save(state, directory=directory, step=1, comm=session.world)
    except hpctrain.errors.CheckpointError as error:
        print(error, sizes, options)
    except HpctrainError as error:
        print(error.exit_code)
    torch_session: Session = hpctrain.init_process_group(session)
    print(torch_session.rank)
    wire: WireFormat = WireFormat(name="site", codec="site_wires:Codec", bytes_per_element=1)
    print(wire.name)
    plan_again: hpctrain.distributed.ParallelPlan = ParallelPlan()
    print(plan_again, hpctrain.data.verify_dataset, hpctrain.hvd.allreduce, hpctrain.testing.CodecContract)
    print(hpctrain.lightning.DDPStrategy, load_newest_good, hpctrain.__version__)
    return list(hpctrain.open_checkpoint(directory / "step-00000001.h5", comm=session.world).tensors)
