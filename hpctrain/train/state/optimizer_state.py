"""Captures the state of an optimizer, under the names of its parameters, for a checkpoint. Restores such a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from hpctrain.checkpoint import (
    SEPARATOR,
    Checkpoint,
    Item,
    Regions,
    TensorShard,
    decode,
    element_items,
    encode,
    get_inline,
    put_inline,
    tensor_items,
    value_from,
    value_items,
)
from hpctrain.distributed import ElementShard, element_shard, pipeline_of
from hpctrain.errors import CheckpointError

# Which parts of a training state belong to this rank's pipeline stages. Without a pipeline, all of it does.


_OF_PARAMETERS = ("model", "optimizer", "ema")  # kinds of tensors that belong to one parameter or buffer


def saved_by_stage(model: torch.nn.Module, item: Item) -> Item | None:
    """Returns the item that this rank saves in place of `item`; None if another rank of the pipeline saves it.

    In a pipeline, exactly one rank saves each tensor of a stage, as one shard that covers the whole tensor. Shards of
    split tensors, and items that do not belong to a stage, are returned unchanged. Without a pipeline, all items are
    returned unchanged.
    """
    pipeline, (kind, _, path) = pipeline_of(model), item.name.partition("/")
    if pipeline is None or kind not in _OF_PARAMETERS or isinstance(item, TensorShard):
        return item
    if not pipeline.saves(path.split(SEPARATOR)[0]):
        return None
    shape = tuple(item.tensor.shape)
    return TensorShard(name=item.name, tensor=item.tensor, global_shape=shape, offset=(0,) * len(shape))


def is_elsewhere(model: torch.nn.Module, name: str) -> bool:
    """Returns True if a tensor of a checkpoint belongs only to pipeline stages of other ranks."""
    pipeline, (kind, _, path) = pipeline_of(model), name.partition("/")
    if pipeline is None or kind not in _OF_PARAMETERS:
        return False
    return pipeline.is_elsewhere(path.split(SEPARATOR)[0])


def nothing_of_other_stages(model: torch.nn.Module, checkpoint: Checkpoint) -> Regions:
    """Returns an empty box (offset, shape) for each tensor that belongs only to stages of other ranks, by name."""
    return {
        name: ((0,) * len(stored.shape), (0,) * len(stored.shape))
        for name, stored in checkpoint.tensors.items()
        if stored.shape and is_elsewhere(model, name)
    }


# The state of an optimizer, by the names of its parameters.


OPTIMIZER = "optimizer/"
# The prefix of optimizer state that belongs to no parameter; no parameter has this name.
_OF_NONE = f"{OPTIMIZER}{SEPARATOR}"
# The options that torch's schedulers read and change in the groups.
_LEARNING_RATES = ("lr", "initial_lr")

Options = list[dict[str, Any]]  # of each group, as JSON


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    """Returns the options of each parameter group, without the parameters, as JSON values that keep exact types.

    Raises CheckpointError if an option cannot be stored; the error names the option.
    """
    return [
        {
            key: encode(value, put=put_inline, where=f"the optimizer's option {key!r}")
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def parameters_outside(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.nn.Parameter]:
    """Returns the optimizer's parameters that are not in the model, by their names in a checkpoint.

    If the optimizer was made from named parameters, these names are used. Otherwise a name consists of the indices of
    the group and of the parameter in the group, such as `outside/0.2`.
    """
    own = set(map(id, model.parameters()))
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                name = given[place] if given is not None else f"{number}.{place}"
                found[f"outside/{name}"] = parameter
    return found


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer that a checkpoint holds.

    outside: the optimizer's parameters that are not in the model, by name.
    made_with: the optimizer's options when the run began, before a checkpoint or a step has changed them; None if
    unknown.
    """

    optimizer: torch.optim.Optimizer
    model: torch.nn.Module
    outside: Mapping[str, torch.nn.Parameter] = field(default_factory=dict)
    made_with: Options | None = None

    def held(self) -> dict[str, ElementShard]:
        """Returns, for each parameter by name, the elements for which this rank holds the optimizer's state.

        Parameters for which this rank holds the state of all elements are left out.
        """
        found = {name: element_shard(parameter) for name, parameter in self._parameters().items()}
        return {name: shard for name, shard in found.items() if shard is not None}

    def capture(self) -> tuple[dict[str, Any], list[Item]]:
        """Returns the optimizer's entry for the checkpoint's JSON document, and its tensors. Not collective.

        Raises CheckpointError if the state cannot be saved.
        """
        items: list[Item] = []
        scalars: dict[str, Any] = {}
        held, names = self.held(), self._names()
        of_none: dict[Any, Any] = {}
        for parameter, state in self.optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):
                of_none[parameter] = state
                continue
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer has state of a parameter of shape {tuple(parameter.shape)} that is in none of its "
                    "groups: remove it from optimizer.state"
                )
            for path, value in _leaves(names[id(parameter)], state):
                shard = held.get(path.split(SEPARATOR)[0])
                if shard is not None and isinstance(value, torch.Tensor):
                    items += element_items(f"{OPTIMIZER}{path}", value, shard=shard)
                elif shard is not None and value is not None:
                    raise CheckpointError(
                        f"the optimizer's state {path!r} is a {type(value).__name__}: with a sharded optimizer only "
                        "tensors can be saved"
                    )
                elif shard is not None:
                    continue
                elif isinstance(value, torch.Tensor):
                    items += tensor_items(f"{OPTIMIZER}{path}", value)
                else:
                    where = f"the optimizer's state {path!r}"
                    scalars[path], found = value_items(f"{OPTIMIZER}{path}{SEPARATOR}", value, where=where)
                    items += found
        document = {
            "class": type(self.optimizer).__name__,
            "groups": self._groups(),
            "scalars": scalars,
        }
        if of_none:
            document["of_none"], found = value_items(_OF_NONE, of_none, where="the optimizer's state")
            items += found
        return document, items

    def state_dict(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Returns the saved state in the layout that `Optimizer.load_state_dict` takes, where parameters are numbered.

        Raises CheckpointError if the state is of another optimizer, and KeyError, TypeError or ValueError if the state
        is not valid.

        saved: the optimizer's entry in the checkpoint's JSON document.
        tensors: the tensors of the checkpoint that this rank needs, by name.
        """
        if saved["class"] != type(self.optimizer).__name__:
            raise CheckpointError(
                f"the checkpoint holds the state of {saved['class']}, this run's optimizer is "
                f"{type(self.optimizer).__name__}: resume with the same one, or start from scratch with --resume never"
            )
        mine = self._groups()
        self._check_groups(saved["groups"], mine)
        here = [[n for n in g["parameters"] if not is_elsewhere(self.model, f"model/{n}")] for g in mine]
        number = {name: i for i, name in enumerate(chain.from_iterable(here))}
        held = self.held()
        used = _Used(tensors)
        scalars = {
            path: value_from(value, used, where=f"the optimizer's state {path!r}")
            for path, value in saved["scalars"].items()
        }
        of_none = value_from(saved.get("of_none", {}), used, where="the optimizer's state")
        leaves = {
            name[len(OPTIMIZER) :]: tensor
            for name, tensor in tensors.items()
            if name.startswith(OPTIMIZER) and name not in used.names and not name.startswith(_OF_NONE)
        }
        state: dict[Any, Any] = dict(of_none)
        for path, value in {**leaves, **scalars}.items():
            name, *keys = path.split(SEPARATOR)
            if name in held and not held[name].part.numel():
                continue  # this rank has no element of it
            if not keys:
                state[number[name]] = value
                continue
            place = state.setdefault(number[name], {})
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = value
        groups: list[dict[str, Any]] = []
        first = 0
        made_with = self.made_with or [group["options"] for group in mine]
        for begun, theirs, own in zip(made_with, saved["groups"], here, strict=True):
            chosen = self._chosen(begun, theirs)
            options = {
                key: decode(value, get=get_inline, where=f"the optimizer's option {key!r}",
                            present=self.optimizer.param_groups[len(groups)].get(key))
                for key, value in chosen.items()
            }  # fmt: skip
            groups.append({**options, "params": list(range(first, first + len(own)))})
            first += len(own)
        return {"state": state, "param_groups": groups}

    def load(self, state: dict[str, Any]) -> None:
        """Loads a result of `state_dict`. Types and dtypes of the state stay as saved.

        If an option is a tensor, the new value is written into that tensor, since compiled steps and schedulers may
        refer to the tensor.
        """
        before = [dict(group) for group in self.optimizer.param_groups]
        # Copied: an optimizer may keep what it is given.
        self.optimizer.load_state_dict({**state, "state": dict(state["state"])})
        for group, old in zip(self.optimizer.param_groups, before, strict=True):
            for key in group.keys() & old.keys() - {"params"}:
                group[key] = _as_before(old[key], group[key])
        numbered = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        for number, parameter in enumerate(numbered):
            if number in state["state"]:
                _restore_types(self.optimizer.state[parameter], state["state"][number])

    # ------------------------------------------------------------------ details

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {**dict(self.model.named_parameters()), **self.outside}

    def _names(self) -> dict[int, str]:
        parts = {id(shard.part): name for name, shard in self.held().items()}
        return {**parts, **{id(p): name for name, p in self._parameters().items()}}

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the parameter names and the options of each group.

        In a pipeline, the names are those of the parameters of all stages.
        """
        names, pipeline = self._names(), pipeline_of(self.model)
        groups = []
        for number, (group, options) in enumerate(
            zip(self.optimizer.param_groups, options_of(self.optimizer), strict=True)
        ):
            unknown = [p for p in group["params"] if id(p) not in names]
            if unknown:
                raise CheckpointError(
                    f"the optimizer holds {len(unknown)} parameters that are not in the model and were not in the "
                    f"optimizer when the updater was made, the first of shape {tuple(unknown[0].shape)}: make a new "
                    "updater after changing the optimizer"
                )
            own = [names[id(p)] for p in group["params"]]
            all_stages = pipeline.optimizer_groups[number] if pipeline is not None else own
            begun = {} if self.made_with is None else {"made_with": self._begun(number, options)}
            groups.append({"parameters": all_stages, "options": options, **begun})
        return groups

    def _begun(self, number: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options with which the run began, but only those that have changed since.

        number: index of the parameter group.

        options: the present options of the group.
        """
        made_with = (self.made_with or [])[number : number + 1]
        return {
            key: value
            for key, value in chain.from_iterable(map(dict.items, made_with))
            if options.get(key) != value
        }

    def _chosen(self, begun: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options to load for a group.

        The saved value of an option is taken if this run and the saved run began with the same value. If they began
        with different values, this run's value is kept, so that a changed recipe takes effect. Learning rates are
        always taken as saved. Older checkpoints do not record the options with which their run began. From these, only
        learning rates are taken, and options that the optimizer adds while it steps.

        begun: the options with which this run began.
        theirs: the group's entry in the checkpoint's JSON document.
        """
        saved = theirs["options"]
        if "made_with" in theirs:
            then = {**saved, **theirs["made_with"]}
            taken = {key for key in saved if key not in begun or begun[key] == then[key]}
        else:
            taken = saved.keys() - begun.keys() - self.optimizer.defaults.keys()
        taken |= saved.keys() & set(_LEARNING_RATES)
        return {**begun, **{key: value for key, value in saved.items() if key in taken}}

    def _check_groups(self, saved: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> None:
        """Raises CheckpointError unless the parameter groups have the same parameters in the same order.

        saved: the groups in the checkpoint.
        mine: the groups of this run's optimizer.

        The error names the difference.
        """
        theirs, own = ([list(group["parameters"]) for group in groups] for groups in (saved, mine))
        if theirs != own:
            raise CheckpointError(
                f"the checkpoint's optimizer has other parameter groups: {difference_of_groups(theirs, own)}"
            )


def difference_of_groups(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> str:
    """Returns a text that states how the parameter groups of two optimizers differ: in names, groups or order.

    there, here: for the checkpoint and for this run, the parameter names of each group.
    """
    all_there, all_here = (list(chain.from_iterable(groups)) for groups in (there, here))
    missing = [name for name in all_here if name not in set(all_there)]
    unknown = [name for name in all_there if name not in set(all_here)]
    if missing or unknown:
        faults = [f"{_some(missing)} missing in the checkpoint"] if missing else []
        faults += [f"{_some(unknown)} not in this run"] if unknown else []
        return f"{'; '.join(faults)}. Make the optimizer of the same parameters, by the same names"
    if len(there) != len(here) or list(map(len, there)) != list(map(len, here)):
        return f"{_sizes(there)} in the checkpoint, {_sizes(here)} in this run. Divide parameters into groups as before"
    for number, (theirs, own) in enumerate(zip(there, here, strict=True)):
        if set(theirs) != set(own):
            moved = next(name for name in theirs if name not in set(own))
            return (
                f"{moved!r} is in group {number} in the checkpoint, in another one in this run. Divide the parameters "
                "into groups as before"
            )
    number = next(
        n for n, (theirs, own) in enumerate(zip(there, here, strict=True)) if list(theirs) != list(own)
    )
    place = next(p for p, (a, b) in enumerate(zip(there[number], here[number], strict=True)) if a != b)
    return (
        f"group {number} has the same {len(there[number])} parameters in another order: number {place} is "
        f"{there[number][place]!r} in the checkpoint, {here[number][place]!r} in this run. Give them to the optimizer "
        "in the same order"
    )


class _Used(dict[str, torch.Tensor]):
    """Tensors by name. The attribute `names` collects the names that were looked up."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.names.add(name)
        return super().__getitem__(name)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and value of each entry of nested dicts with text keys. Any other value is a single entry."""
    if type(value) is dict and value and all(type(key) is str and SEPARATOR not in key for key in value):
        for key, item in value.items():
            yield from _leaves(f"{path}{SEPARATOR}{key}", item)
    elif SEPARATOR in path or value:
        yield path, value


def _as_before(old: Any, new: Any) -> Any:
    """Returns the value `new` with the type of `old`. If `old` is a tensor, writes `new` into it and returns it."""
    if isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor) and new.shape != old.shape:
            return new
        with torch.no_grad():
            old.copy_(new) if isinstance(new, torch.Tensor) else old.fill_(new)
        return old
    if isinstance(old, (tuple, list)) and type(old) is type(new) and len(old) == len(new):
        return type(old)(map(_as_before, old, new))
    if type(old) in (int, float) and isinstance(new, torch.Tensor) and new.numel() == 1:
        return new.item()
    return new


def _restore_types(loaded: Any, saved: Any) -> None:
    """Undoes the conversions that `Optimizer.load_state_dict` has made in `loaded`, with the values of `saved`.

    That method converts tensors to the dtype of the parameter, and does not keep texts.
    """
    for key, value in saved.items() if isinstance(saved, dict) else ():
        found = loaded.get(key)
        if isinstance(value, dict) and isinstance(found, dict):
            _restore_types(found, value)
        elif isinstance(value, torch.Tensor):
            if isinstance(found, torch.Tensor) and found.dtype != value.dtype:
                loaded[key] = value.to(found.device)
        elif type(found) is not type(value) and not isinstance(found, torch.Tensor):
            loaded[key] = value
        elif isinstance(value, (list, tuple, str)):
            loaded[key] = _to_device_of(found, value)


def _to_device_of(found: Any, saved: Any) -> Any:
    """Returns `saved` with its tensors moved to the devices that `load_state_dict` has chosen."""
    if isinstance(saved, torch.Tensor):
        return saved.to(found.device) if isinstance(found, torch.Tensor) else saved
    if type(saved) in (list, tuple) and isinstance(found, (list, tuple)) and len(found) == len(saved):
        return type(saved)(map(_to_device_of, found, saved))
    return saved


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more + (" is" if len(names) == 1 else " are")


def _sizes(groups: Sequence[Sequence[str]]) -> str:
    return " + ".join(str(len(group)) for group in groups) + " parameters"
