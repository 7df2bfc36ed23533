"""Your own loop, with hpctrain's loader and checkpoints: kill it, run it again, and it continues to the bit.

hpctrain data pack digits data/digits
hpctrain launch -n 4 -- python examples/own_loop_resume.py data/digits/train checkpoints
"""

import sys

import torch
from torch.nn import functional

import hpctrain

EPOCHS, SEED = 6, 1

with hpctrain.init() as session:
    loader = session.loader(session.open_dataset(sys.argv[1]), global_batch=64, seed=SEED)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = session.distributed_optimizer(
        model, torch.optim.Adam(model.parameters(), lr=1e-2), wire="fp16"
    )

    position = session.load_state(sys.argv[2], optimizer, loader=loader)
    if session.rank == 0:
        print(f"from step {position.step}", flush=True)
    for epoch in range(position.epoch, EPOCHS):
        for batch in loader.epoch(epoch, start=position.start):
            if batch.num_samples > 0:  # the last batch of an epoch can have fewer samples than ranks
                loss = functional.cross_entropy(model(batch["image"] / 16), batch["label"])
                optimizer.backward(loss, weight=batch.weight)
            optimizer.step()
            position = position.after(batch)
        position = position.next_epoch()
        session.save_state(sys.argv[2], optimizer, position, loader=loader)
        mean = session.mean(loss.item())
        if session.rank == 0:
            print(f"epoch {position.epoch} loss {mean:.17g}", flush=True)
