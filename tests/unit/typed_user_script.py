"""A user's script as a type checker sees it: every name of `hpctrain` is used as its own type. It is never run."""

from pathlib import Path

import numpy as np
import torch

import hpctrain
from hpctrain import (
    Batch,
    Dataset,
    Ema,
    FromRank0,
    HpctrainError,
    Loader,
    ParallelPlan,
    Position,
    Replicated,
    SaveOptions,
    Session,
    Shard,
    State,
    Task,
    TrainingState,
    Updater,
)


def train(task: Task, directory: Path) -> list[str]:
    hpctrain.pack_arrays(directory / "data", {"x": np.zeros((8, 3), np.float32)})
    recipe = hpctrain.load_recipe(directory / "recipe.toml")
    session: Session = hpctrain.start(backend=recipe.run.backend)
    model = session.parallelize(task.build_model(), ParallelPlan(shard="parameters"))
    updater: Updater = session.updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average: Ema = Ema(model, decay=0.9)
    average.update()
    dataset: Dataset = session.open_dataset(directory / "data")
    loader: Loader = session.loader(dataset, global_batch=4)
    with loader.epoch(Position().epoch) as batches:
        for batch in batches:
            one: Batch = batch
            loss = task.loss(model, one.fields)
            assert isinstance(loss, torch.Tensor)  # this task's losses have no weights
            updater.backward(loss, weight=one.weight)
            updater.step()
    weight = torch.zeros(2)
    state: State = State(
        items=[
            *hpctrain.model_items(model),
            Replicated(name="weight", tensor=weight),
            FromRank0(name="buffer", tensor=weight),
            Shard(name="rows", tensor=weight, global_shape=(4,), offset=(2 * session.rank,)),
        ]
    )
    try:
        hpctrain.save(state, directory=directory, step=1, comm=session.world)
    except HpctrainError as error:
        print(error)
    torch_session: Session = hpctrain.init_process_group(session)
    print(torch_session.rank)
    kinds: tuple[type, ...] = (TrainingState, SaveOptions, hpctrain.Compression)
    print(kinds, hpctrain.resume, hpctrain.load_newest_good, hpctrain.__version__)
    return list(hpctrain.open_checkpoint(directory / "step-00000001.h5", comm=session.world).tensors)
