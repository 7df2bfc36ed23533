"""A script for Lightning, under mpirun or srun: only the strategy differs from the same script for its own launcher.

hpctrain launch -n 4 -- python examples/torch_lightning.py --batch 8 --strategy fsdp
"""

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hpctrain
from hpctrain.lightning import DDPStrategy, ModelParallelStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
parser.add_argument("--batch", type=int, default=16, help="samples of each rank")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def configure_model(self) -> None:
        if arguments.strategy == "fsdp":
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        image, label = batch
        loss = functional.cross_entropy(self.model(image), label)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        self.print(
            f"epoch {self.current_epoch} loss {loss:.6f} on {self.trainer.world_size} ranks", flush=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


session = hpctrain.init_process_group()
if arguments.strategy == "ddp":
    strategy = DDPStrategy(session)
else:
    strategy = ModelParallelStrategy(session, data_parallel_size=session.world_size, tensor_parallel_size=1)
trainer = lightning.Trainer(
    strategy=strategy,  # devices and num_nodes follow from mpirun or srun
    max_epochs=arguments.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
lightning.seed_everything(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
trainer.fit(Digits(), DataLoader(data, batch_size=arguments.batch, shuffle=True, drop_last=True))
torch.distributed.destroy_process_group()
