"""A model that is trained in one of the layouts, on the ranks of a session."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.parallel.layouts import Layout
from benchmarks.parallel.workloads import Fields, Workload, part
from hpctrain import Position
from hpctrain.distributed import is_sharded_tensor
from hpctrain.run import Session

# Fixed, not `auto`, so that every launch reduces in the same way.
ALGORITHM = "hierarchical"


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that may be sharded with all its elements. Collective if it is."""
    found: torch.Tensor = tensor.full_tensor() if is_sharded_tensor(tensor) else tensor  # type: ignore[attr-defined]
    return found.detach()


class Training:
    """A workload's model in a layout. Making one, `step`, `save` and `load` are collective.

    model_seed: of its first parameters. batch: samples of all ranks in a step.
    """

    def __init__(
        self,
        session: Session,
        workload: Workload,
        layout: Layout,
        *,
        batch: int,
        wire: str = "fp32",
        dtype: torch.dtype = torch.float32,
        model_seed: int = 0,
    ) -> None:
        self._session, self._workload, self._batch = session, workload, batch
        self._task = workload.task
        torch.manual_seed(model_seed)
        self.model = self._task.build_model().to(dtype)
        session.parallelize(self.model, layout.plan)
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self._updater = session.updater(self.model, self.optimizer, algorithm=ALGORITHM, wire=wire)

    def backward(self, number: int) -> float:
        """Runs forward and backward of step `number`; returns this rank's part of the loss."""
        every = self._workload.fields(samples=self._batch, seed=number)
        return self.backward_of(part(every, rank=self._session.rank, num_ranks=self._session.num_ranks))

    def backward_of(self, fields: Fields) -> float:
        """The same for this rank's samples."""
        weight = len(next(iter(fields.values()))) / self._batch
        loss = self._task.loss(self.model, fields)
        self._updater.backward(loss, weight=weight)
        return float(loss.detach()) * weight

    def update(self, loss: float = 0.0) -> float:
        """Updates the parameters; returns the sum of `loss` over the ranks."""
        return self._updater.step(sums={"loss": loss}).sums["loss"]

    def step(self, number: int) -> float:
        """Makes step `number`, whose batch depends on nothing else; returns its loss over the whole batch."""
        return self.update(self.backward(number))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns the whole parameters by name. Collective."""
        return {name: whole(parameter) for name, parameter in self.model.named_parameters()}

    def save(self, directory: Path, *, step: int) -> Path:
        return self._session.save_state(directory, self._updater, Position(step=step))

    def load(self, source: Path) -> int:
        """Returns the step of the checkpoint."""
        return self._session.load_state(source, self._updater).step

    def close(self) -> None:
        self._updater.close()
