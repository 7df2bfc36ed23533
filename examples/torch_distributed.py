"""A script for torch.distributed, under mpirun or srun: one line differs from the same script for torchrun.

hpctrain launch -n 4 --ranks-per-node 2 -- python examples/torch_distributed.py --parallel fsdp --directory run/torch
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
parser.add_argument("--directory", type=Path, default=Path("run/torch"))
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

hpctrain.init_process_group()  # instead of dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
if arguments.parallel == "ddp":
    model = DistributedDataParallel(model)
else:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

done, checkpoint = 0, arguments.directory / arguments.parallel
if checkpoint.exists():
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epochs": 0}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    done = state["epochs"]

for epoch in range(done, arguments.epochs):
    sampler.set_epoch(epoch)
    for image, label in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

model_state, optimizer_state = get_state_dict(model, optimizer)
dcp.save(
    {"model": model_state, "optimizer": optimizer_state, "epochs": arguments.epochs}, checkpoint_id=checkpoint
)
dist.destroy_process_group()
