"""The same script on hpctrain: five lines differ from `own_loop_horovod.py`, the loop is untouched.

hpctrain launch -n 4 --ranks-per-node 2 -- python examples/own_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hpctrain

session = hpctrain.init()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
sampler = DistributedSampler(data, num_replicas=session.world_size, rank=session.rank, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = session.distributed_optimizer(model, optimizer, wire="fp16")

for epoch in range(3):
    sampler.set_epoch(epoch)
    for image, label in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
