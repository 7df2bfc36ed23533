"""`own_loop.py` with a model that is split over the ranks: each holds a part of its parameters and optimizer state.

hpctrain launch -n 4 --ranks-per-node 2 -- python examples/own_loop_sharded.py

It saves its state at the end; run it again, on any number of ranks, and it goes on from there.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import hpctrain

session = hpctrain.init()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
image, label = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
mine = torch.arange(len(label)) % session.world_size == session.rank
share = float(mine.sum()) / len(label)

blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 10))
session.parallelize(model, hpctrain.ParallelPlan(shard="parameters", activation_checkpointing="blocks"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # of the parameters as they are now
optimizer = session.distributed_optimizer(model, optimizer)
ema = hpctrain.Ema(model, decay=0.9)  # each rank averages its parts

begin = session.load_state("sharded", optimizer, also={"ema": ema}).step
for step in range(begin, begin + 10):
    loss = functional.cross_entropy(model(image[mine]), label[mine])
    optimizer.backward(loss, weight=share)
    outcome = optimizer.step(sums={"loss": loss.item() * share})
    if outcome.applied:
        ema.update()
    if session.rank == 0:
        print(f"step {step} loss {outcome.sums['loss']:.6f}", flush=True)
session.save_state("sharded", optimizer, hpctrain.Position(step=begin + 10), also={"ema": ema})
with ema.applied(), torch.no_grad():
    right = float((model(image[mine]).argmax(1) == label[mine]).sum())
right = session.all_reduce({"right": right})["right"]
if session.rank == 0:
    print(f"accuracy of the averages {right / len(label):.4f}", flush=True)
session.close()
