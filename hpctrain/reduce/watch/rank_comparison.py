"""Finds ranks that have drifted apart: their parameters or optimizer settings are no longer the same.

Every rank applies the same gradient sums to the same parameters. So all bits are equal, unless something acts on only
some of the ranks. To check this, each rank computes a hash h of its values, and adds two numbers, h and h squared, to a
sum over the ranks that each step computes anyway. All N hashes are the same if and only if N times the sum of h squared
equals the square of the sum of h (Cauchy and Schwarz). Both sums are exact in float64. Only if hashes differ do the
ranks send more data, to find out what differs, and on which ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import torch
import xxhash

from hpctrain.comm import Collective, all_gather_json, broadcast_tensors, describe_ranks
from hpctrain.distributed import Box, box_of, is_sharded, is_sharded_tensor, local_part, pipeline_of, shard_of
from hpctrain.errors import RanksDiffer
from hpctrain.reduce.watch.forward_buffers import ForwardBuffers

_ROW = 4096
# Odd, so that multiplication modulo 2**64 loses nothing.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a hash of the bits of each tensor. Reads each tensor once. Not collective."""
    found: list[int | torch.Tensor] = []
    for tensor in tensors:
        content = _bytes_of(local_part(tensor.detach()))
        if content.device.type == "cpu":
            found.append(xxhash.xxh3_64_intdigest(content.numpy().data))
        else:
            found.append(_device_digest(content))
    on_device = [digest for digest in found if isinstance(digest, torch.Tensor)]
    values = iter(torch.stack([digest.cpu() for digest in on_device]).tolist() if on_device else ())
    return [digest if isinstance(digest, int) else next(values) for digest in found]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes in memory order: uint8, shape (n,). They are copied only if the memory has gaps."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).contiguous().view(-1).view(torch.uint8)


def _device_digest(content: torch.Tensor) -> torch.Tensor:
    """Returns a hash of bytes on a device, as a weighted sum with another weight for each row: int64, shape ().

    content: the bytes, uint8, shape (n,).
    """
    if content.data_ptr() % 4 == 0 and content.numel() % 4 == 0:
        content = content.view(torch.int32)
    whole = content.numel() - content.numel() % _ROW
    sums = torch.cat([
        content[:whole].view(-1, _ROW).sum(dim=1, dtype=torch.int64), content[whole:].to(torch.int64),
    ])  # fmt: skip
    weights = torch.arange(1, sums.numel() + 1, device=sums.device) * _FACTOR
    return (sums * (weights | 1)).sum()


def describe_settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the hyperparameters of an optimizer's groups as texts, by names such as `lr of parameter group 0`.

    Included are numbers, texts, tensors with one element, and sequences of these types. Other entries are left out.
    """
    found = {}
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key != "params" and (text := _text(value)) is not None:
                found[f"{key} of parameter group {number}"] = text
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return _text(value.item()) if value.numel() == 1 else None
    if isinstance(value, float):
        return repr(float(value))  # also for numpy's floats
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        parts = [_text(part) for part in value]
        return None if any(part is None for part in parts) else f"({', '.join(map(str, parts))})"
    return None


# Finds ranks that have drifted apart.


CompareRanks: TypeAlias = Literal["error", "note", "off"]

# Parameters are compared in the first steps, at powers of two, and then every EVERY_STEPS; settings more often.
EVERY_STEPS = 100
SETTINGS_EVERY_STEPS = 10
_FIRST_STEPS = 4
_SUM, _SQUARES = "ranks: sum ", "ranks: squares "  # prefixes, followed by the number of a set of ranks
_NUM_FOR_ALL = 3  # entries of `_found` that all ranks compare; further ones only ranks with the same part
_NAMED = 3
_RUNBOOK = "See docs/runbooks/f11-replicas-differ.md"


def compares_parameters(step: int) -> bool:
    """Returns True if parameters are compared in `step`, counted from 1."""
    return step < _FIRST_STEPS or step % EVERY_STEPS == 0 or (step < EVERY_STEPS and step & (step - 1) == 0)


@final
class RankComparison:
    """Compares the ranks of `comm`, at least two, in the steps of one updater. The constructor is collective.

    model: model whose parameters are compared. A rank that holds a part of the model is compared with the ranks that
    hold the same part.
    groups: function that returns the optimizer's parameter groups. The parameters in these groups are compared too; all
    other entries of the groups are compared as settings.
    buffers: buffers of the model. Buffers that no forward pass changes are compared too, but a difference is only
    reported, since ranks may have different buffers on purpose.
    how: "error": `error` returns an error for each difference. "note": each difference is reported once, and ignored
    from then on.
    say: function that prints a line for the user, on rank 0.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        *,
        buffers: ForwardBuffers,
        comm: Collective,
        how: Literal["error", "note"],
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._groups = groups
        self._buffers = buffers
        self._comm = comm
        self._how = how
        self._say = say
        self._is_stage = pipeline_of(model) is not None
        is_split = self._is_stage or is_sharded(model)
        layout = _layout(model) if is_split else {}
        self._parts = [name for name, box in layout.items() if box is not None or self._is_stage]
        # First all ranks, then those that hold the same parts as another.
        self._rank_sets = [list(range(comm.num_ranks)), *(_sets_of_ranks(layout, comm) if is_split else [])]
        self._step = 0
        self._settings_equal = self._parameters_equal = 0  # step in which they were last
        self._left_out: set[str] = set()
        # N h^2 is below 2**53, so that all sums are exact.
        self._bits = (53 - comm.num_ranks.bit_length()) // 2
        # Settings, whole parameters and buffers, compared by all ranks, then parts and a stage's buffers.
        self._found: list[dict[str, str]] = []

    def numbers(self) -> dict[str, float]:
        """Starts a step. Returns this rank's numbers, which the caller sums over the ranks. Not collective.

        In most steps nothing is compared, and there are no numbers.
        """
        self._step += 1
        with_parameters = compares_parameters(self._step)
        if not with_parameters and self._step % SETTINGS_EVERY_STEPS:
            return {}
        whole: dict[str, torch.Tensor] = {}
        parts: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        if with_parameters:
            whole, buffers = self._whole(), self._buffers.constants()
            if any(self._comm.rank in members for members in self._rank_sets[1:]):
                now = dict(self._model.named_parameters())
                parts = {name: now[name] for name in self._parts if name in now}
        marks = iter(digests([*whole.values(), *parts.values(), *buffers.values()]))
        of_whole, of_parts, of_buffers = (
            self._counted({name: f"{next(marks) & (1 << 64) - 1:016x}" for name in tensors})
            for tensors in (whole, parts, buffers)
        )
        settings = self._counted(describe_settings(self._groups()))
        apart = (of_parts, of_buffers) if self._is_stage else (of_parts, {})
        self._found = [settings, of_whole, {} if self._is_stage else of_buffers, *apart]
        numbers: dict[str, float] = {}
        for number, members in enumerate(self._rank_sets):
            mine = self._found[_NUM_FOR_ALL:] if number else self._found[:_NUM_FOR_ALL]
            value = 0
            if self._comm.rank in members:
                value = xxhash.xxh3_64_intdigest(repr(mine).encode()) >> (64 - self._bits)
            numbers |= {f"{_SUM}{number}": float(value), f"{_SQUARES}{number}": float(value * value)}
        return numbers

    def without_numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in sums.items() if not name.startswith((_SUM, _SQUARES))}

    def error(self, sums: Mapping[str, float]) -> RanksDiffer | None:
        """Returns the error that every rank must raise if the ranks differ; None if the ranks are equal.

        Collective if the ranks differ.

        sums: sums over the ranks, including the sums of `numbers`; the same on every rank.
        """
        if all(
            len(members) * int(sums[f"{_SQUARES}{number}"]) == int(sums[f"{_SUM}{number}"]) ** 2
            for number, members in enumerate(self._rank_sets)
        ):
            self._settings_equal = self._step
            if compares_parameters(self._step):
                self._parameters_equal = self._step
            return None
        everyones = all_gather_json(self._comm, self._found)
        settings = self._differences(everyones, kind=0)
        whole, *parts = (self._differences(everyones, kind=1), *self._differences_apart(everyones, kind=3))
        buffers = [self._differences(everyones, kind=2), *self._differences_apart(everyones, kind=4)]
        self._left_out.update(name for found in buffers for name in found.names)
        common = [name for found in buffers for name in found.held_by_all()]
        if common:
            self._say(
                f"buffers differ between the ranks: {_listed(map(repr, common))}. Rank 0's are saved, and evaluated in "
                "a recipe's run. If training reads them, set them to the same values on all ranks"
            )
        text = self._of_settings(settings) if settings.names else self._of_tensors(whole, parts)
        if text is None:
            return None
        last = self._settings_equal if settings.names else self._parameters_equal
        since = f"; at step {last} they were equal" if last else ""
        text = f"{text}. Found at step {self._step} of this updater{since}. {_RUNBOOK}"
        if self._how == "error":
            return RanksDiffer(text, agreed=True)
        self._left_out.update(settings.names, *(found.names for found in (whole, *parts)))
        self._say(f"WARNING: {text}")
        return None

    def _counted(self, found: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in found.items() if name not in self._left_out}

    def _differences(
        self, everyones: Sequence[Sequence[Mapping[str, str]]], *, kind: int, rank_set: int = 0
    ) -> _Differences:
        members = self._rank_sets[rank_set]
        ranks = [self._comm.members[place] for place in members]
        return _Differences([everyones[place][kind] for place in members], ranks=ranks)

    def _differences_apart(
        self, everyones: Sequence[Sequence[Mapping[str, str]]], *, kind: int
    ) -> list[_Differences]:
        return [
            self._differences(everyones, kind=kind, rank_set=number)
            for number in range(1, len(self._rank_sets))
        ]

    def _whole(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that every rank holds as a whole, by name."""
        apart = set(self._parts)
        named: dict[str, torch.Tensor] = {
            name: local_part(p) for name, p in self._model.named_parameters() if name not in apart
        }
        if shard_of(self._model) == "none":  # else the optimizer has parts of its own
            known = set(map(id, self._model.parameters()))
            for number, group in enumerate(self._groups()):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in known:
                        named[f"{place} of parameter group {number}"] = parameter
        return named

    def _of_settings(self, found: _Differences) -> str:
        shown = [f"{name} is {found.values_by_rank(name)}" for name in found.names[:_NAMED]]
        rates = all(name.startswith("lr ") for name in found.names)
        what = "with different learning rates" if rates else "with different settings of the optimizer"
        return (
            f"the ranks train {what}: {_listed(shown, num=len(found.names))}. What sets them must do so alike on all "
            "ranks: a scheduler that follows a loss, such as ReduceLROnPlateau, takes one number: "
            "scheduler.step(session.mean(loss))"
        )

    def _of_tensors(self, whole: _Differences, parts: Sequence[_Differences]) -> str | None:
        shown = []
        for name in whole.names[:_NAMED]:
            amount = self._largest_difference(name) if name in whole.held_by_all() else None
            by = f" by up to {amount:.3g}" if amount else ""
            shown.append(f"{name!r} {whole.where(name)}{by}")
        for found in parts:
            among = f" ({describe_ranks(found.ranks)} hold the same part)"
            shown += [f"{name!r} {found.where(name)}{among}" for name in found.names]
        if not shown:
            return None
        names = [name for found in (whole, *parts) for name in found.names]
        num = len(shown) + max(0, len(whole.names) - _NAMED)
        return (
            f"the ranks no longer hold the same parameters: {_listed(shown, num=num)}. {self._advice(names)}"
        )

    def _largest_difference(self, name: str) -> float:
        """Returns the largest absolute difference between rank 0's values and the values of any rank. Collective.

        name: name of a parameter that every rank holds.
        """
        mine = self._whole()[name].detach()
        reference = mine.clone()
        broadcast_tensors(self._comm, [reference])
        wide = torch.complex128 if mine.is_complex() else torch.float64
        amount = (mine.to(wide) - reference.to(wide)).abs().nan_to_num(0.0).max()
        return float(max(all_gather_json(self._comm, float(amount))))

    def _advice(self, names: Sequence[str]) -> str:
        limited = {
            f"{path}.weight" if path else "weight"
            for path, module in self._model.named_modules()
            if getattr(module, "max_norm", None) is not None
        }
        if limited.intersection(names):
            return (
                "An embedding with max_norm changes the rows that a rank looks up, so each rank changes others: leave "
                "max_norm out, and limit what is looked up, as in rows * (max_norm / rows.norm(dim=-1, keepdim=True))"
                ".clamp(max=1)"
            )
        return (
            "Something changes them on some ranks only: a forward pass or a hook that writes to parameters, an "
            "optimizer that draws random numbers (seed it alike on all ranks), code that depends on the rank, or "
            "processors that round differently (differences of about 1e-7)"
        )


@final
class _Differences:
    """The names for which ranks have different values.

    by_rank: for each of `ranks`, its values by name.
    ranks: world ranks.
    """

    def __init__(self, by_rank: Sequence[Mapping[str, str]], *, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._by_rank = by_rank
        self.names = [
            name
            for name in dict.fromkeys(name for found in by_rank for name in found)
            if len(set(self._of(name))) > 1
        ]

    def _of(self, name: str) -> list[str | None]:
        return [found.get(name) for found in self._by_rank]

    def held_by_all(self) -> list[str]:
        return [name for name in self.names if None not in self._of(name)]

    def values_by_rank(self, name: str) -> str:
        ranks: dict[str | None, list[int]] = {}
        for place, value in enumerate(self._of(name)):
            ranks.setdefault(value, []).append(self.ranks[place])
        return ", ".join(
            f"{'missing' if value is None else value} on {describe_ranks(on)}"
            for value, on in list(ranks.items())[:4]
        ) + (", ..." if len(ranks) > 4 else "")

    def where(self, name: str) -> str:
        """Returns a text that names the ranks whose value of `name` differs from the value of most ranks."""
        values = self._of(name)
        usual, count = Counter(values).most_common(1)[0]
        others = [self.ranks[place] for place, value in enumerate(values) if value != usual]
        if count == 1:
            return f"between {describe_ranks(self.ranks)}"
        no_majority = 2 * count <= len(values)
        return (
            f"between {describe_ranks(others)} and the others"
            if no_majority
            else f"on {describe_ranks(others)}"
        )


def _layout(model: torch.nn.Module) -> dict[str, Box | None]:
    """Returns, for each parameter by name, where this rank's part lies in the whole parameter.

    The value is None if this rank holds the whole parameter.
    """
    layout: dict[str, Box | None] = {}
    for name, parameter in model.named_parameters():
        placements = parameter.placements if is_sharded_tensor(parameter) else ()  # type: ignore[attr-defined]
        layout[name] = None if all(at.is_replicate() for at in placements) else box_of(parameter)
    return layout


def _sets_of_ranks(layout: Mapping[str, Box | None], comm: Collective) -> list[list[int]]:
    """Returns the sets of at least two ranks that have the same layout. Collective.

    layout: this rank's result of `_layout`.
    """
    found_on: dict[str, list[int]] = {}
    for place, found in enumerate(all_gather_json(comm, xxhash.xxh3_64_hexdigest(repr(layout).encode()))):
        found_on.setdefault(found, []).append(place)
    return [members for members in found_on.values() if len(members) > 1]


def _listed(texts: Iterable[str], *, num: int | None = None) -> str:
    """Returns one text with the first few of `texts`, and the number of the other ones.

    num: total number of texts; None: the number of `texts`.
    """
    shown = list(texts)
    num = len(shown) if num is None else num
    more = f", and {num - _NAMED} more" if num > _NAMED else ""
    return ", ".join(shown[:_NAMED]) + more
