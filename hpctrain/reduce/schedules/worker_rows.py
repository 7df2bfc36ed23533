"""What each worker holds of its own, as rows of global tensors in a checkpoint: one row per worker.

These are the state of the optimizer, the loss scale and, within a round, the parameters. If there are as many workers
as in the saved run, each gets its own row back, to the bit. Otherwise each worker gets the mean of the rows; of numbers
of steps (one element per parameter) and of the loss scale, the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from hpctrain.comm import Collective, ReduceOp
from hpctrain.errors import CheckpointError
from hpctrain.reduce.codecs import rows_in, shapes_of
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.storage import part_of

PREFIX = "workers/"
_PARAMETERS = f"{PREFIX}parameters/"
_OPTIMIZER = f"{PREFIX}optimizer/"
_LOSS_SCALE = f"{PREFIX}loss_scale"
_ORDER = f"{PREFIX}order"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The place of a rank among the workers.

    worker: index of this rank's worker.
    num_workers: number of workers.
    leads: True on the first rank of a worker, which saves the worker's rows.
    """

    worker: int
    num_workers: int
    leads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker holds besides parameters and optimizer state.

    scale: its loss scale.
    order: the order in which gradients become ready in it, as indices of the parameters; None if unknown.
    """

    scale: LossScale
    order: Sequence[int] | None = None


@final
class WorkerRows:
    """Saves and loads what this rank's worker holds. `comm` is the communicator of all ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        *,
        place: WorkerPlace,
        comm: Collective,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._place = place
        self._comm = comm

    def state(self, own: WorkerState, *, with_parameters: bool) -> list[StateTensor]:
        """Returns this worker's rows; [] on ranks that do not lead a worker. Not collective.

        The rows of a single worker are whole tensors, which all ranks list.
        """
        if not self._place.leads and self._place.num_workers > 1:
            return []
        order = own.order if own.order is not None else [-1] * len(self._parameters)
        found = [(_LOSS_SCALE, _numbers_of(own.scale)), (_ORDER, torch.tensor(order, dtype=torch.int64))]
        found += [(name, tensor) for name, tensor in self._optimizer_tensors()]
        if with_parameters:
            found += [(f"{_PARAMETERS}{number}", p.detach()) for number, p in enumerate(self._parameters)]
        num, worker = self._place.num_workers, self._place.worker
        return [
            StateTensor(
                name=name,
                tensor=tensor[None],
                global_shape=(num, *tensor.shape),
                offset=(worker, *(0 for _ in tensor.shape)),
            )
            for name, tensor in found
        ]

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        """Returns this worker's row of each tensor; with another number of workers, an equal share of the rows."""
        return {name: [self._rows(shape[0])] for name, shape in shapes.items() if name.startswith(PREFIX)}

    @torch.no_grad()
    def load(
        self, own: WorkerState, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None
    ) -> WorkerState:
        """Restores the rows, if the checkpoint has any. Collective.

        Args:
            own: The state of this rank's worker in this run.
            tensors: See `DistributedOptimizer.load_state`.
            shapes: See `DistributedOptimizer.load_state`.

        Returns:
            `own` with the saved loss scale; from as many workers as in this run, also with the saved order.

        Raises:
            CheckpointError: On every rank. The rows are of another model.
        """
        shapes = shapes_of(tensors) if shapes is None else shapes
        names = sorted(name for name in shapes if name.startswith(PREFIX))
        if not names:
            return own
        is_same = {shapes[name][0] for name in names} == {self._place.num_workers}
        for name in names:
            saved = tensors[name]
            rows = rows_in(saved, rows=[self._rows(shapes[name][0])])
            value = rows[0] if is_same else self._merged(rows, num_rows=shapes[name][0], name=name)
            if name == _LOSS_SCALE:
                own = replace(own, scale=_with_numbers(own.scale, value))
            elif name == _ORDER:
                known = is_same and len(value) == len(self._parameters) and bool((value >= 0).all())
                own = replace(own, order=value.tolist() if known else None)
            elif name.startswith(_PARAMETERS):
                self._parameter(name, value).copy_(value)
            else:
                self._set_optimizer_tensor(name, value)
        return own

    # ------------------------------------------------------------------ details

    def _rows(self, num_rows: int) -> range:
        place = self._place
        if num_rows == place.num_workers:
            return range(place.worker, place.worker + 1)
        return range(*part_of(num_rows, part=self._comm.rank, num_parts=self._comm.num_ranks))

    def _merged(self, rows: torch.Tensor, *, num_rows: int, name: str) -> torch.Tensor:
        """Returns the mean over all saved rows, of which this rank has read `rows`; collective.

        Of counts, which have one element per row, and of the loss scale, returns the smallest.
        """
        shape = rows.shape[1:]
        wide = torch.view_as_real(rows) if rows.is_complex() else rows
        if name == _LOSS_SCALE or not shape or (not rows.is_floating_point() and not rows.is_complex()):
            least = (
                -wide.double()
                if len(wide)
                else torch.full((1, *wide.shape[1:]), -torch.inf, dtype=torch.float64)
            )
            flat = least.amax(dim=0).reshape(-1).contiguous()
            self._comm.all_reduce(flat, op=ReduceOp.MAX)
            return (-flat).to(rows.dtype).view(shape)
        flat = wide.sum(dim=0, dtype=torch.float64).reshape(-1)
        self._comm.all_reduce(flat)
        mean = (flat / num_rows).view(wide.shape[1:])
        return torch.view_as_complex(mean).to(rows.dtype) if rows.is_complex() else mean.to(rows.dtype)

    def _optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the optimizer's state by name: of each parameter, and of each key of its state."""
        for number, parameter in enumerate(self._parameters):
            for key, value in (self._optimizer.state.get(parameter) or {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{_OPTIMIZER}{number}/{key}", value

    def _parameter(self, name: str, value: torch.Tensor) -> torch.Tensor:
        number = int(name[len(_PARAMETERS) :])
        if number >= len(self._parameters) or self._parameters[number].shape != value.shape:
            raise CheckpointError(
                f"the checkpoint's {name} has the shape {tuple(value.shape)}, which is not that of parameter {number} "
                "of the optimizer: resume with the same model and frozen parameters as the saved run",
                agreed=True,
            )
        return self._parameters[number]

    def _set_optimizer_tensor(self, name: str, value: torch.Tensor) -> None:
        number, _, key = name[len(_OPTIMIZER) :].partition("/")
        parameter = self._parameters[int(number)]
        state: dict[str, Any] = self._optimizer.state[parameter]
        present = state.get(key)
        if isinstance(present, torch.Tensor) and present.shape == value.shape:
            present.copy_(value)
        else:
            state[key] = value.clone().to(parameter.device)


def _numbers_of(scale: LossScale) -> torch.Tensor:
    return torch.tensor(
        [scale.value, scale.good_steps, scale.skipped_in_row, scale.skipped_total], dtype=torch.float64
    )


def _with_numbers(scale: LossScale, numbers: torch.Tensor) -> LossScale:
    value, good, in_row, total = numbers.tolist()
    now = replace(scale, skipped_in_row=int(in_row), skipped_total=int(total))
    return replace(now, value=value, good_steps=int(good)) if scale.dynamic else now
