"""The trainings of a session: the model and optimizer of each updater, and how their state is saved and loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from hpctrain.checkpoint import SEPARATOR, CheckpointSave, SaveOptions, header_of, model_items
from hpctrain.comm import Collective, agreed
from hpctrain.data import ORDER_NAME, Loader, Sequential
from hpctrain.distributed import is_sharded, pipeline_of
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.reduce import (
    AllReduceUpdater,
    ScheduledUpdater,
    SparseUpdater,
    SplitModelUpdater,
    SspUpdater,
    ZeroUpdater,
)
from hpctrain.topology import Axis
from hpctrain.train.state.also import Stateful, check_also, check_same_on_ranks
from hpctrain.train.state.optimizer_state import Options, options_of, parameters_outside
from hpctrain.train.state.training_state import Position, TrainingState, resume

# The identity of a position in the data: dataset, order and handling of the last batch.


def data_identity(loader: Loader, *, fingerprint: str | None) -> dict[str, Any]:
    """Returns the properties of the data and their order for which a position in the data is valid.

    A checkpoint stores these properties, and `TrainingState.restore` compares them with the properties in the resumed
    run.

    fingerprint: the fingerprint of the dataset's content. None for a dataset without a manifest; the number of samples
    is then used instead.
    """
    # The two simple orders keep the names from before others were added.
    plain = isinstance(loader.order, Sequential)
    return {
        **({"dataset": fingerprint} if fingerprint is not None else {"samples": loader.dataset.num_samples}),
        "order": ORDER_NAME if plain else loader.order.name,
        "shuffle": not plain,
        "last_batch": loader.last_batch.value,
    }


# The trainings of a session.


SessionUpdater: TypeAlias = (
    AllReduceUpdater | ZeroUpdater | SplitModelUpdater | SparseUpdater | ScheduledUpdater | SspUpdater
)


@dataclass(kw_only=True, eq=False, slots=True)
class TrainingParts:
    """What the session must know of an updater to save and load its training.

    Attributes:
        model: The model that the updater trains.
        outside: The optimizer's parameters that are not in the model, by name.
        made_with: The optimizer's options at the first `load_state`; before that, when the updater was made.
        trained: The ids (`id()`) of the trained parameters.
        has_begun: True if the first `load_state` has set `made_with`.
        noted: True if the user was told that the state of a scheduler is not saved.
    """

    model: torch.nn.Module
    outside: Mapping[str, torch.nn.Parameter]
    made_with: Options
    trained: frozenset[int]
    has_begun: bool = False
    noted: bool = False

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> TrainingParts:
        """Returns the `TrainingParts` for an updater that is about to be made.

        Raises UsageError if no checkpoint can hold the model or the optimizer's options. Also raises UsageError if the
        model is split over the ranks and does not contain all of the optimizer's parameters.
        """
        outside = parameters_outside(model, optimizer)
        if outside and (is_sharded(model) or pipeline_of(model) is not None):
            _refuse_outside(optimizer, outside)
        try:
            for item in model_items(model):
                if SEPARATOR in item.name and pipeline_of(model) is not None:
                    raise CheckpointError(
                        f"{item.name.split(SEPARATOR)[0]!r} of the model's state is no tensor, which a model in a "
                        "pipeline cannot save: have get_extra_state return a tensor"
                    )
                try:
                    header_of(item)
                except CheckpointError as error:
                    raise CheckpointError(f"{item.name!r} of the model's state: {error}") from error
            made_with = options_of(optimizer)
        except CheckpointError as error:
            raise UsageError(f"no checkpoint can hold this training: {error}") from error
        groups = optimizer.param_groups
        trained = frozenset(id(p) for group in groups for p in group["params"] if p.requires_grad)
        return cls(model=model, outside=outside, made_with=made_with, trained=trained)


@final
class Trainings:
    """The trainings of a session, by updater.

    Args:
        world: The communicator of all ranks.
        drawing: A function that returns the ranks that draw different random numbers (see `TrainingState`).
        note: A function that prints a note for the user.
    """

    def __init__(
        self, world: Collective, *, drawing: Callable[[], Axis], note: Callable[[str], None]
    ) -> None:
        self._world = world
        self._drawing = drawing
        self._note = note
        self._parts: weakref.WeakKeyDictionary[SessionUpdater, TrainingParts] = weakref.WeakKeyDictionary()

    @property
    def updaters(self) -> list[SessionUpdater]:
        return list(self._parts)

    def parts_for(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> TrainingParts:
        """Returns the `TrainingParts` for an updater that is about to be made.

        Raises UsageError as `TrainingParts.of` does. Also raises UsageError if another updater that is not closed
        trains some of the parameters, since both updaters would sum the gradients of these parameters.
        """
        parts = TrainingParts.of(model, optimizer)
        both = {
            i for u, of in self._parts.items() if u.step_watch is not None for i in of.trained & parts.trained
        }
        if both and not is_sharded(model):
            names = [repr(name) for name, p in model.named_parameters() if id(p) in both]
            raise UsageError(
                f"{names[0] if names else 'a parameter'} is trained by another updater of this session: call close() "
                "of that updater first, or give each optimizer parameters of its own"
            )
        return parts

    def add(self, updater: SessionUpdater, parts: TrainingParts) -> None:
        self._parts[updater] = parts

    def model_of(self, updater: SessionUpdater) -> torch.nn.Module:
        """Returns the model that an updater trains. Raises UsageError for an updater of another session."""
        return self._parts_of(updater).model

    def _parts_of(self, updater: SessionUpdater) -> TrainingParts:
        if updater not in self._parts:
            raise UsageError(
                "save_state and load_state take an updater that `distributed_optimizer` of this session made"
            )
        return self._parts[updater]

    def state(
        self, updater: SessionUpdater, *, seed: int, also: Mapping[str, Stateful | None] | None = None
    ) -> TrainingState:
        """Returns the state of an updater's training that a checkpoint holds. Not collective.

        Raises UsageError for an updater of another session.

        seed: the seed of the run.
        also: the user's objects that are saved too, by name.
        """
        parts = self._parts_of(updater)
        return TrainingState(
            parts.model, updater.optimizer, updater, seed, self._drawing(), outside=parts.outside,
            made_with=parts.made_with, also=also or {},
        )  # fmt: skip

    def save(
        self,
        directory: str | Path,
        updater: SessionUpdater,
        position: Position,
        *,
        loader: Loader | None,
        options: SaveOptions | None,
        also: Mapping[str, Stateful | None],
    ) -> Path:
        """Saves the training of `updater` as a checkpoint in `directory`; see `Session.save_state`. Collective."""
        state, identity = self._state_of(updater, loader, also)
        saved = agreed(
            self._world,
            lambda: state.capture(position, comm=self._world, identity=identity),
            os_error=CheckpointError,
        )
        self._note_scheduler(updater, also)
        check_same_on_ranks(saved.document.get("also", {}), comm=self._world)
        saving = CheckpointSave.begin(
            saved, directory=directory, step=position.step, comm=self._world, options=options or SaveOptions()
        )
        return saving.finish().path

    def load(
        self,
        source: str | Path,
        updater: SessionUpdater,
        *,
        loader: Loader | None,
        also: Mapping[str, Stateful | None],
    ) -> Position:
        """Restores the training of `updater` from `source`, and returns the position. Collective.

        See `Session.load_state`.
        """
        parts = self._parts.get(updater)
        if parts is not None and not parts.has_begun:
            # By now the user has made the schedulers, which change options when they are made.
            parts.made_with = options_of(updater.optimizer)
            parts.has_begun = True
        state, identity = self._state_of(updater, loader, also)
        resumed = resume(state, source=Path(source), named=False, comm=self._world, identity=identity)
        return resumed.position

    def _note_scheduler(self, updater: SessionUpdater, also: Mapping[str, Stateful | None]) -> None:
        """Prints a note, once, if the optimizer has a scheduler whose state is not saved.

        A scheduler is recognised by the entry `initial_lr` that it adds to the parameter groups.
        """
        parts = self._parts[updater]
        if (
            not also
            and not parts.noted
            and any("initial_lr" in group for group in updater.optimizer.param_groups)
        ):
            parts.noted = True
            self._note(
                "a scheduler changes the optimizer's learning rate, and its own state is not saved: a resumed run "
                "would begin its schedule anew, from the saved rate. Give save_state and load_state "
                "also={'scheduler': scheduler}; also={'scheduler': None} if you restore it yourself"
            )

    def _state_of(
        self, updater: SessionUpdater, loader: Loader | None, also: Mapping[str, Stateful | None]
    ) -> tuple[TrainingState, dict[str, Any]]:
        """Returns the state of an updater's training, and the result of `data_identity` for its data. Collective."""
        agreed(self._world, lambda: check_also(also), os_error=UsageError)
        state = self.state(updater, seed=loader.seed if loader is not None else 0, also=also)
        if loader is None:
            return state, {}
        manifest = getattr(loader.dataset, "manifest", None)  # samples of the user's need not have one
        return state, data_identity(
            loader, fingerprint=manifest.fingerprint if manifest is not None else None
        )


def _refuse_outside(optimizer: torch.optim.Optimizer, outside: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises UsageError if a split model contains only some of the optimizer's parameters.

    Does nothing if the model contains none of them, as when the optimizer was made before the model was split: in that
    case the updater raises an error.
    """
    if len(outside) < sum(len(group["params"]) for group in optimizer.param_groups):
        first = next(iter(outside.values()))
        raise UsageError(
            f"the optimizer holds {len(outside)} parameters that are not in the model, the first of shape "
            f"{tuple(first.shape)}, and the model is split over the ranks: register them in the model "
            "(model.register_parameter) before session.parallelize"
        )
