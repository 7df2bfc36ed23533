"""Your own loop, with hpctrain's loader and checkpoints: kill it, run it again, and it goes on to the bit.

hpctrain data pack digits data/digits
hpctrain launch -n 4 -- python examples/own_loop_resume.py data/digits/train checkpoints
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

import hpctrain

EPOCHS, SEED = 6, 1
directory = Path(sys.argv[2])

with hpctrain.start() as session:
    dataset = session.open_dataset(sys.argv[1])
    loader = session.loader(dataset, global_batch=64, seed=SEED)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    updater = session.updater(model, optimizer, wire="fp16")

    state = hpctrain.TrainingState(model, optimizer, updater, SEED)
    belongs_to = {"dataset": dataset.manifest.fingerprint}
    resumed = hpctrain.resume(state, source=directory, named=False, comm=session.world, identity=belongs_to)
    position = resumed.position
    if session.rank == 0:
        print(f"from step {position.step}", flush=True)

    while position.epoch < EPOCHS:
        for batch in loader.epoch(position.epoch, start=position.start):
            if (
                batch.num_samples > 0
            ):  # the last batch of an epoch may have fewer samples than there are ranks
                loss = functional.cross_entropy(model(batch["image"] / 16), batch["label"])
                updater.backward(loss, weight=batch.weight)
            updater.step()
            position = replace(position, step=position.step + 1, start=batch.stop)
        position = replace(position, epoch=position.epoch + 1, start=0)
        saved = state.capture(position, comm=session.world, identity=belongs_to)
        hpctrain.save(saved, directory=directory, step=position.step, comm=session.world)
        mean = session.mean(loss.item())
        if session.rank == 0:
            print(f"epoch {position.epoch} loss {mean:.17g}", flush=True)
