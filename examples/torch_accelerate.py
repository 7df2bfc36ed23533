"""A script for Hugging Face accelerate, under mpirun or srun: one line more than the same script for accelerate launch.

hpctrain launch -n 4 -- python examples/torch_accelerate.py --batch 8
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="samples of each rank")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

hpctrain.init_process_group()  # before the Accelerator, which takes the group that is there
accelerator = Accelerator()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
order = torch.Generator().manual_seed(0)
loader = DataLoader(data, batch_size=arguments.batch, shuffle=True, generator=order, drop_last=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(arguments.epochs):
    for image, label in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(
        f"epoch {epoch} loss {mean.item():.6f} on {accelerator.num_processes} ranks", flush=True
    )
accelerator.end_training()  # ends the group, and with it the session
