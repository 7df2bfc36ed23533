"""A plain Horovod script that knows nothing of hpctrain but its Compression. Rank 0 prints what came out as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import hpctrain
from hpctrain.errors import UsageError

Make = Callable[[torch.nn.Module], Any]


def fp16(model: torch.nn.Module) -> Any:
    return hpctrain.Compression.fp16(model.named_parameters(), num_ranks=hvd.size(), scale=1024.0)


def int8(model: torch.nn.Module) -> Any:
    return hpctrain.Compression.int8(model.named_parameters(), num_ranks=hvd.size())


def none(_: torch.nn.Module) -> Any:
    return hvd.Compression.none


class Training:
    """The digits, as many people train them; every rank has a half of each batch."""

    def __init__(self, make: Make, *, clip: bool = False, interrupt: bool = False, **options: Any) -> None:
        self.make, self.options, self.clip, self.interrupt = make, options, clip, interrupt
        self.passes = options.get("backward_passes_per_step", 1)
        self.start()

    def start(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.compression = self.make(self.model)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
            **self.options,
        )

    def run(self, epochs: int) -> dict[str, Any]:
        images, labels = load_digits(return_X_y=True)
        image, label = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        order = torch.Generator().manual_seed(1)
        train, held_out = torch.randperm(len(label), generator=order).split([1280, len(label) - 1280])
        for epoch in range(epochs):
            if self.interrupt and epoch == epochs // 2:
                self.go_on_from_saved_state()
            for batch in train[torch.randperm(len(train), generator=order)].split(64):
                self.step(image, label, batch[hvd.rank() :: hvd.size()])
        scores = self.model(image[held_out])
        right = scores.argmax(dim=1) == label[held_out]
        bits = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        digest = hashlib.sha256(bits).hexdigest()
        return {
            "accuracy": float(right.double().mean()),
            "loss": functional.cross_entropy(scores, label[held_out]).item(),
            "bits": hvd.allgather_object(digest),
        }

    def step(self, image: torch.Tensor, label: torch.Tensor, mine: torch.Tensor) -> None:
        for part in mine.chunk(self.passes):
            loss = functional.cross_entropy(self.model(image[part]), label[part]) / self.passes
            loss.backward()
        if self.clip:
            self.optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def go_on_from_saved_state(self) -> None:
        """As a script that was killed and runs again, with what it had saved."""
        saved = self.model.state_dict(), self.optimizer.state_dict(), self.compression.state_dict()
        self.start()
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.compression.load_state_dict(saved[2])


def what_an_average_of_int8_raises() -> str:
    training = Training(int8)
    try:
        training.run(1)
    except UsageError as error:
        return str(error)
    return "nothing"


def gradients_of_a_model_with_a_sparse_and_an_unused_parameter(
    make: Make, **options: Any
) -> list[list[float]]:
    """After the second step, the first being sent in full precision by int8. Rank 1 never uses `bias`."""
    model = torch.nn.ParameterDict({"bias": torch.ones(3)})
    words = torch.nn.Embedding(5, 3, sparse=True)
    torch.nn.init.ones_(words.weight)
    model["words"] = words.weight
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=list(model.named_parameters()),
        compression=make(model),
        **options,
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = words(torch.tensor([hvd.rank(), 4])).sum()
        if hvd.rank() == 0:
            loss = loss + (model["bias"] * torch.tensor([1.0, 2.0, 3.0])).sum()
        loss.backward()
        optimizer.step()
    return [model["bias"].grad.tolist(), *model["words"].grad.to_dense().tolist()]


def main() -> None:
    hvd.init()
    summed = {"op": hvd.Sum}
    found: dict[str, Any] = {
        "none": Training(none).run(8),
        "fp16": Training(fp16).run(8),
        "fp16 predivided": Training(fp16, gradient_predivide_factor=2.0).run(8),
        "fp16 interrupted": Training(fp16, interrupt=True).run(8),
        "int8": Training(int8, **summed).run(8),
        "int8 interrupted": Training(int8, interrupt=True, **summed).run(8),
        "int8 again": Training(int8, **summed).run(8),
        "int8 in groups": Training(int8, groups=2, **summed).run(8),
        "int8 in passes": Training(int8, backward_passes_per_step=2, **summed).run(8),
        "int8 clipped": Training(int8, clip=True, **summed).run(8),
        "sparse": {
            "none": gradients_of_a_model_with_a_sparse_and_an_unused_parameter(none),
            "fp16": gradients_of_a_model_with_a_sparse_and_an_unused_parameter(fp16),
            "int8": gradients_of_a_model_with_a_sparse_and_an_unused_parameter(int8, **summed),
        },
        "average of int8": hvd.allgather_object(what_an_average_of_int8_raises()),
    }
    if hvd.rank() == 0:
        print(json.dumps(found), flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main()
