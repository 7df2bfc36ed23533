"""Captures the state of a training for a checkpoint, and restores it on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

import torch

from hpctrain.checkpoint import (
    SEPARATOR,
    Checkpoint,
    FromRank0,
    Item,
    Regions,
    Replicated,
    State,
    TensorShard,
    is_checkpoint,
    load,
    load_newest_good,
    model_items,
    model_state,
    tensor_items,
)
from hpctrain.comm import Collective, all_gather_json, on_rank_0, raise_together
from hpctrain.data import Batch
from hpctrain.distributed import (
    ElementShard,
    box_of,
    device_of,
    is_sharded_tensor,
    pipeline_of,
    sharded_as,
)
from hpctrain.errors import CheckpointError
from hpctrain.reduce import DistributedOptimizer, StateTensor, listed, not_finite
from hpctrain.topology import Axis
from hpctrain.train.state.also import (
    Stateful,
    also_items,
    also_states,
    also_tensors,
    check_state,
    kind_of,
    load_also,
)
from hpctrain.train.state.ema import Ema
from hpctrain.train.state.optimizer_state import (
    OptimizerState,
    Options,
    is_elsewhere,
    nothing_of_other_stages,
    saved_by_stage,
)
from hpctrain.train.state.seeds import capture_generators, derive_seed, restore_generators, seed_generators

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The progress of a training, as a checkpoint stores it.

    Attributes:
        step: The number of optimizer steps done.
        epoch: The current epoch, from 0.
        start: The number of samples of this epoch that all ranks together have used.
        samples: The number of samples that all ranks together have used in all epochs.
    """

    step: int = 0
    epoch: int = 0
    start: int = 0
    samples: int = 0  # over all epochs and ranks

    def after(self, batch: Batch) -> Position:
        """Returns the position after a step on `batch`, this rank's part of a global batch."""
        return Position(
            step=self.step + 1,
            epoch=batch.epoch,
            start=batch.stop,
            samples=self.samples + batch.global_samples,
        )

    def next_epoch(self) -> Position:
        """Returns this position moved to the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, start=0)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state that must be saved so that a resumed run gives the same bits as a run that never stopped.

    The learning rate is not part of the state, since it is a function of the step. Random generators are restored
    exactly if the number of ranks is the same as in the saved run. Otherwise each rank seeds its generators from the
    run's seed, the step and the rank's index. Of the model's buffers (running statistics), only the buffers of rank 0
    are saved: if forward in training reads buffers that differ between ranks, a resumed run is not bit-identical.

    Attributes:
        drawing: The axis along which ranks draw different random numbers; ranks with the same index on this axis draw
            the same numbers. None: every rank draws its own numbers.
        outside: The optimizer's parameters that are not in the model; see `OptimizerState`.
        made_with: The optimizer's options when the run began; see `OptimizerState`.
        also: The user's objects, by name.
        ema: The moving averages of the parameters; None if the run does not average parameters.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    updater: DistributedOptimizer
    seed: int
    drawing: Axis | None = None
    outside: Mapping[str, torch.nn.Parameter] = field(default_factory=dict)
    made_with: Options | None = None
    also: Mapping[str, Stateful | None] = field(default_factory=dict)
    ema: Ema | None = None

    def capture(
        self,
        position: Position,
        *,
        comm: Collective,
        identity: Mapping[str, Any],
        parent: Mapping[str, Any] | None = None,
    ) -> State:
        """Returns the state as named global tensors and a JSON document. Not collective.

        identity: properties of the data and their order, which `restore` compares; see `data_identity`.
        parent: step and id of the checkpoint from which the run resumed; None for a run that did not resume.
        """
        items: list[Item] = model_items(self.model, prefix="model/")
        optimizer, found = self._optimizer.capture()
        items += found
        for name, parameter in self.outside.items():
            items += tensor_items(name, parameter)
        also, found = also_items(self.also)
        items += found
        items += self._averages()
        for name, row in capture_generators(device_of(self.model)).items():
            shape = (comm.num_ranks, row.numel())
            items.append(
                TensorShard(
                    name=f"{_GENERATORS}{name}", tensor=row[None], global_shape=shape, offset=(comm.rank, 0)
                )
            )
        if self.updater.workers_differ:
            items = [_of_rank_0(item) for item in items]
        items.extend(_saved(tensor) for tensor in self.updater.state_tensors())
        items = [saved for item in items if (saved := saved_by_stage(self.model, item)) is not None]
        items = [saved for item in items if (saved := _value_of_rank_0(item, rank=comm.rank)) is not None]
        document = {
            "position": asdict(position),
            "optimizer": optimizer,
            "updater": self.updater.state(),
            "num_ranks": comm.num_ranks,
            "num_drawing": comm.num_ranks if self.drawing is None else self.drawing.size,
            "seed": self.seed,
            "identity": dict(identity),
            **({"also": also} if also else {}),
            **({"ema": {"num_updates": self.ema.num_updates}} if self.ema is not None else {}),
        }
        return State(items=items, document=document, parent=parent)

    def regions(self, checkpoint: Checkpoint, *, rank: int) -> Regions:
        """Returns the boxes (offset, shape) of the checkpoint's tensors that `restore` needs on this rank. Collective.

        Tensors that this rank needs as a whole are left out.
        """
        stored = _under(_UPDATER, checkpoint.tensors)
        state = checkpoint.document.get("updater")
        found: dict[str, list[Box]] = {}
        if isinstance(state, dict):
            self.updater.prepare_to_load(state)
        if stored and isinstance(state, dict):
            shapes = {name: tensor.shape for name, tensor in stored.items()}
            for name, rows in self.updater.rows_to_load(state, shapes).items():
                found[f"{_UPDATER}{name}"] = [_rows_of(shapes[name], part.start, part.stop) for part in rows]
        sharded = {name: box_of(parameter) for name, parameter in self._sharded(checkpoint).items()}
        elements = {name: shard.box_to_read() for name, shard in self._split(checkpoint).items()}
        nothing = nothing_of_other_stages(self.model, checkpoint)
        return {**generator_rows(checkpoint, rank=rank), **found, **sharded, **elements, **nothing}

    def _sharded(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """Returns, for each sharded tensor of the checkpoint by name, a tensor of this run that is sharded alike."""
        # Of the state, not of the module: after a forward without backward FSDP2 holds some parameters whole.
        parameters = {name: p for name, p in self.model.state_dict().items() if is_sharded_tensor(p)}
        found: dict[str, torch.Tensor] = {}
        for name, stored in checkpoint.tensors.items() if parameters else ():
            kind, _, path = name.partition("/")
            parameter = parameters.get(path.split(SEPARATOR)[0])
            if (
                kind in ("model", "optimizer", "ema")
                and parameter is not None
                and stored.shape == parameter.shape
            ):
                found[name] = parameter
        for name, tensor in also_tensors(self.also).items():
            there = checkpoint.tensors.get(name)
            if is_sharded_tensor(tensor) and there is not None and there.shape == tensor.shape:
                found[name] = tensor
        return found

    @property
    def _optimizer(self) -> OptimizerState:
        return OptimizerState(self.optimizer, self.model, self.outside, self.made_with)

    def _split(self, checkpoint: Checkpoint) -> dict[str, ElementShard]:
        """Returns, for tensors of the optimizer's state in the checkpoint by name, the elements that this rank needs.

        Tensors that this rank needs as a whole are left out.
        """
        held = self._optimizer.held()
        found: dict[str, ElementShard] = {}
        for name, stored in checkpoint.tensors.items() if held else ():
            kind, _, path = name.partition("/")
            shard = held.get(path.split(SEPARATOR)[0])
            if kind == "optimizer" and shard is not None and stored.shape == shard.shape:
                found[name] = shard
        return found

    def restore(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, torch.Tensor],
        *,
        comm: Collective,
        identity: Mapping[str, Any],
    ) -> Position:
        """Restores the state and returns the position. Collective.

        Raises CheckpointError on every rank if the checkpoint is of another model, optimizer or dataset. Nothing is
        changed then.

        tensors: every tensor of the checkpoint by name, with its saved shape and dtype. Of tensors for which `regions`
        returned boxes, only these boxes.
        identity: see `capture`.
        """
        document = checkpoint.document
        error: CheckpointError | None = None
        sharded = self._sharded(checkpoint)
        tensors = {
            n: sharded_as(t, sharded[n]) if n in sharded else t
            for n, t in tensors.items()
            if not is_elsewhere(self.model, n)
        }
        split = self._split(checkpoint)
        tensors = {n: split[n].cut(t) if n in split else t for n, t in tensors.items()}
        try:
            self._check_identity(document, identity, where=str(checkpoint.path))
            model = model_state(_under("model/", tensors), present=self.model.state_dict())
            check_state(
                model, self.model.state_dict(), where=f"{checkpoint.path} is a checkpoint of another model"
            )
            outside = {name: _outside(name, p, tensors) for name, p in self.outside.items()}
            optimizer = self._optimizer
            optimizer_state = optimizer.state_dict(document["optimizer"], tensors)
            averages = self._saved_averages(document, tensors, where=str(checkpoint.path))
            also = also_states(self.also, document.get("also", {}), tensors, where=str(checkpoint.path))
            position = _position_in(document)
            saved_ranks, updater_state = int(document["num_ranks"]), document["updater"]
            saved_drawing = int(document.get("num_drawing", saved_ranks))
            updater_state["loss_scale"]  # a KeyError here also leaves everything unchanged
        except CheckpointError as found:
            error = found
        except (KeyError, TypeError, ValueError) as found:
            error = CheckpointError(
                f"{checkpoint.path} lacks training state: {type(found).__name__}: {found}"
            )
        raise_together(comm, error)
        self.model.load_state_dict(model)
        with torch.no_grad():
            for name, parameter in self.outside.items():
                parameter.copy_(outside[name])
        optimizer.load(optimizer_state)
        if self.ema is not None:
            num_updates = document["ema"]["num_updates"] if averages else 0
            self.ema.load(averages, num_updates=num_updates) if averages else self.ema.begin_again()
        load_also(self.also, also, comm=comm)
        rows = _under(_UPDATER, tensors)
        shapes = {name: checkpoint.tensors[f"{_UPDATER}{name}"].shape for name in rows}
        self.updater.load_state(updater_state, rows, shapes)
        drawing = self.drawing or Axis("drawing", tuple(range(comm.num_ranks)), comm.rank)
        otherwise = derive_seed(self.seed, "resume", position.step, drawing.index)
        if (saved_ranks, saved_drawing) == (comm.num_ranks, drawing.size):
            # Cloned: torch reads a generator state as a struct, and a row of a larger tensor may not be aligned for it.
            rows = {name: t[0].clone() for name, t in _under(_GENERATORS, tensors).items()}
            restore_generators(rows, device=device_of(self.model), otherwise=otherwise)
        else:
            seed_generators(otherwise)
        return position

    # ------------------------------------------------------------------ details

    def _averages(self) -> list[Item]:
        """Returns the averaged model as items `ema/NAME`: the averages, and the model's buffers."""
        items: list[Item] = []
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, tensor in (self.ema.tensors() if self.ema is not None else {}).items():
            is_buffer = name not in parameters
            own = f"{_EMA}{name}"
            items += [FromRank0(name=own, tensor=tensor.detach())] if is_buffer else tensor_items(own, tensor)
        return items

    def _saved_averages(
        self, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, where: str
    ) -> dict[str, torch.Tensor]:
        """Returns the saved averages by name; {} if this run or the saved run has none.

        Raises CheckpointError if the averages are of another model.
        """
        if self.ema is None or "ema" not in document:
            return {}
        if not isinstance(document["ema"]["num_updates"], int):
            raise ValueError("the number of updates of the moving averages (EMA) is not an integer")
        saved = _under(_EMA, tensors)
        check_state(saved, self.ema.tensors(), where=f"{where} holds averages of another model")
        return saved

    def _check_identity(
        self, document: Mapping[str, Any], identity: Mapping[str, Any], *, where: str
    ) -> None:
        saved = {**document["identity"], "seed": document["seed"]}
        mine = {**identity, "seed": self.seed}
        faults = [
            f"{k} is {saved.get(k)!r} in the checkpoint, {mine.get(k)!r} in this run"
            for k in sorted(mine)
            if saved.get(k) != mine[k]
        ]
        if faults:
            raise CheckpointError(
                f"{where}: its position in the data is not valid in this run: {'; '.join(faults)}. Resume with the "
                "same data, order and seed, or start from scratch with --resume never"
            )


_GENERATORS = "generators/"
_UPDATER = "updater/"
_EMA = "ema/"

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape)


def generator_rows(checkpoint: Checkpoint, *, rank: int) -> Regions:
    """Returns, per generator state in the checkpoint, the box (offset, shape) of row `rank`, which this rank reads.

    If the checkpoint was saved on fewer ranks, there is no such row. In this case the last row is read, and not used.
    """
    return {
        name: [_rows_of(stored.shape, min(rank, stored.shape[0] - 1), min(rank, stored.shape[0] - 1) + 1)]
        for name, stored in checkpoint.tensors.items()
        if name.startswith(_GENERATORS) and len(stored.shape) == 2 and stored.shape[0]
    }


def _rows_of(shape: tuple[int, ...], first: int, stop: int) -> Box:
    """Returns the box of the rows first, ..., stop - 1 of a tensor of this shape."""
    return (first, *(0 for _ in shape[1:])), (stop - first, *shape[1:])


def _position_in(document: Mapping[str, Any]) -> Position:
    """Returns the position in a checkpoint's document.

    Raises KeyError, TypeError or ValueError unless it consists of four integers of 0 or more.
    """
    found = {field.name: document["position"][field.name] for field in fields(Position)}
    wrong = {name: n for name, n in found.items() if isinstance(n, bool) or not isinstance(n, int) or n < 0}
    if wrong:
        raise ValueError(f"its position is {wrong!r:.100}")
    return Position(**found)


def _saved(held: StateTensor) -> Replicated | TensorShard:
    """Converts a tensor of the updater to a checkpoint item.

    The item is replicated if this rank holds the whole tensor, otherwise a shard.
    """
    name = f"{_UPDATER}{held.name}"
    if tuple(held.tensor.shape) == held.global_shape:
        return Replicated(name=name, tensor=held.tensor)
    return TensorShard(name=name, tensor=held.tensor, global_shape=held.global_shape, offset=held.offset)


def _of_rank_0(item: Item) -> Item:
    """Returns the item that saves rank 0's value, in place of one whose values must be the same on every rank."""
    return FromRank0(name=item.name, tensor=item.tensor) if isinstance(item, Replicated) else item


def _under(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors whose names begin with `prefix`, by their names without the prefix."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def _value_of_rank_0(item: Item, *, rank: int) -> Item | None:
    """Returns the item that this rank saves in place of `item`; None if only rank 0 saves it.

    Only rank 0 saves the extra state of a module, since the length of that state may differ between ranks. Other items
    are returned unchanged.
    """
    if not isinstance(item, FromRank0) or SEPARATOR not in item.name:
        return item
    shape = tuple(item.tensor.shape)
    whole = TensorShard(name=item.name, tensor=item.tensor, global_shape=shape, offset=(0,) * len(shape))
    return whole if rank == 0 else None


def _outside(name: str, parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the saved value of a parameter that is not in the model.

    Raises CheckpointError if the value is missing, or has another shape or dtype.
    """
    if name not in tensors or (tensors[name].shape, tensors[name].dtype) != (
        parameter.shape,
        parameter.dtype,
    ):
        found = (
            f"is {kind_of(tensors[name])} in the checkpoint, {kind_of(parameter)} in this run"
            if name in tensors
            else "is missing in the checkpoint"
        )
        raise CheckpointError(f"{name}, a parameter of the optimizer that is not in the model, {found}")
    return tensors[name]


# Says once when a checkpoint is about to hold parameters or buffers that are not finite.


@final
class FiniteCheck:
    """Warns once, before a checkpoint with values that are not finite is saved.

    say: function that prints a line for the user, on rank 0.
    """

    def __init__(self, *, comm: Collective, say: Callable[[str], None]) -> None:
        self._comm = comm
        self._say = say
        self._said = False

    def before_save(self, model: torch.nn.Module, *, step: int) -> None:
        """Checks the parameters and buffers that the checkpoint of `step` will hold.

        Collective: each rank checks a share of the values.
        """
        if self._said:
            return
        comm = self._comm
        # The ranks of a pipeline hold different parameters.
        share, num_shares = (comm.rank, comm.num_ranks) if pipeline_of(model) is None else (0, 1)
        found = list(not_finite(model, share=share, num_shares=num_shares))
        num_found = torch.tensor([len(found)], dtype=torch.int64)
        comm.all_reduce(num_found)
        if not int(num_found):
            return
        self._said = True
        names = list(dict.fromkeys(name for names in all_gather_json(comm, found) for name in names))
        self._say(
            f"WARNING: the checkpoint of step {step} holds values that are not finite, in {listed(names)}: a run that "
            "resumes from it starts with these values. Earlier checkpoints are unchanged"
        )


# Resumes a run from the newest good checkpoint of its folder, or from a given checkpoint.


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Where a run starts.

    Attributes:
        position: The position at which training continues.
        path: The checkpoint that was loaded; None if the run starts at step 0.
        parent: Step and id of the loaded checkpoint.
        divergence: The state of `hpctrain.resilience.Divergence` in the loaded checkpoint.
        loss_unit: The number by which the loaded run divided the task's loss weights (`LossWeights.unit`); None if
            losses are weighted by numbers of samples.
    """

    position: Position
    path: Path | None
    parent: Mapping[str, Any] | None = None
    divergence: Mapping[str, Any] = field(default_factory=dict)
    loss_unit: float | None = None


def resume(
    state: TrainingState, *, source: Path, named: bool, comm: Collective, identity: Mapping[str, Any]
) -> Resumed:
    """Restores `state` from `source`, a checkpoint or a folder of checkpoints. Collective.

    From a folder, the newest good checkpoint is loaded; newer checkpoints that are damaged are reported. Raises
    CheckpointError on every rank if no checkpoint can be restored.

    named: what happens if the folder has no checkpoint. True (the user has named this source): CheckpointError is
    raised. False: the run starts at step 0.
    """
    regions = partial(state.regions, rank=comm.rank)
    if on_rank_0(comm, lambda: is_checkpoint(source)):
        checkpoint, tensors = load(source, comm=comm, regions=regions)
    else:
        found = load_newest_good(source, comm=comm, regions=regions)
        if found is None and named:
            raise CheckpointError(f"--resume {source}: there is no checkpoint", agreed=True)
        if found is None:
            return Resumed(position=Position(), path=None)
        checkpoint, tensors = found.checkpoint, found.tensors
    position = state.restore(checkpoint, tensors, comm=comm, identity=identity)
    parent = {"step": checkpoint.step, "id": checkpoint.metadata.id}
    return Resumed(
        position=position,
        path=checkpoint.path,
        parent=parent,
        divergence=checkpoint.document.get("divergence", {}),
        loss_unit=checkpoint.document.get("loss_unit"),
    )
