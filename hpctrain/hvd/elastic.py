"""State for `hvd.elastic` scripts, which can be committed, restored and copied from rank 0 to all ranks.

The set of ranks never changes, since the ranks of an MPI job are fixed. After an error that all ranks raise, `run`
restores the committed state and calls the function again. A lost rank ends the job; `hpctrain supervise` restarts it.
"""

from __future__ import annotations

import abc
import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import torch

from hpctrain.hvd.errors import HorovodInternalError
from hpctrain.hvd.objects import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hpctrain.hvd.running import rank, reopen_groups, size

T = TypeVar("T")


class State(abc.ABC):
    """The base class of the state of a script. Subclasses implement `save`, `restore` and `sync`.

    Args:
        bcast_object: A function that copies an object from rank 0, such as `hvd.broadcast_object`.
        get_rank: A function that returns this rank, such as `hvd.rank`.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], object]] = []
        self.num_commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Registers functions that are called after an error, once the state is restored."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the current state in memory, for `restore`."""
        self.num_commits += 1
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:  # noqa: B027, subclasses may leave it as it is
        """Does nothing: the hosts of an MPI job stay the same."""

    @abc.abstractmethod
    def save(self) -> None:
        """Saves the current state in memory."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Restores what `save` has saved."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Copies rank 0's state to all ranks. Collective."""

    def reset(self) -> None:  # noqa: B027, subclasses may leave it as it is
        """Does nothing. Subclasses may override it to prepare the next call of the function."""


class ObjectState(State):
    """The state of Python objects. Each keyword argument becomes an attribute, which `sync` copies from rank 0."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = kwargs
        self.restore()

    def save(self) -> None:
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)

    def sync(self) -> None:
        if self._saved:
            self.save()
            self._saved = self._bcast_object(self._saved, name="elastic state")
            self.restore()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A sampler that gives each rank its part of the samples that are not yet processed in the epoch.

    Call `record_batch` after each batch and `set_epoch` after each epoch.

    Args:
        dataset: The dataset; only its length is used.
        shuffle: Whether the samples are shuffled in each epoch.
        seed: The seed of the shuffle, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts epoch `epoch`, in which no sample is processed yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch as processed on every rank.

        Args:
            batch_idx: Not used.
            batch_size: The number of samples per rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides the remaining samples of the epoch among the ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Every rank gets equally many samples: the first ones are repeated at the end.
        filled = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(filled, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """The state of models, optimizers and samplers, saved by `state_dict()`, and of other Python objects.

    Args:
        model: The model.
        optimizer: The optimizer.
        **kwargs: Further models, optimizers and `ElasticSampler`s, or Python objects as in `ObjectState`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        kinds = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
        self._tracked = [name for name, value in given.items() if isinstance(value, kinds)]
        for name in self._tracked:
            setattr(self, name, given.pop(name))
        self._states = self._state_dicts()
        super().__init__(broadcast_object, rank, **given)

    def save(self) -> None:
        self._states = self._state_dicts()
        super().save()

    def restore(self) -> None:
        for name, state in self._states.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        for name in self._tracked:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict(), name=name))
        self._states = self._state_dicts()
        super().sync()

    def _state_dicts(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._tracked}


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorates a training function that takes a `State`, so that it is called again after a communication error.

    The function is called after `state.sync()`. After a HorovodInternalError that all ranks raised, the committed state
    is restored and the function is called again. The error is raised to the caller if nothing was committed since the
    last such error. It is also raised if only some ranks raised the error, since the other ranks may be lost.

    Args:
        func: A function whose first argument is the state.

    Returns:
        The decorated function.
    """

    @functools.wraps(func)
    def wrapper(state: State, *arguments: Any, **options: Any) -> T:
        commits_at_error = -1
        while True:
            state.sync()
            try:
                return func(state, *arguments, **options)
            except HorovodInternalError as error:
                if not error.agreed or state.num_commits == commits_at_error:
                    raise
                commits_at_error = state.num_commits
            reopen_groups()
            state.restore()
            state.on_reset()

    return wrapper
