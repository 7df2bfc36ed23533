"""Finds ranks that have drifted apart: their parameters, or the settings of their optimizers, are no longer the same.

Every rank applies the same sums to the same values, so all bits are equal, unless something acts on some ranks only.
Two numbers that each rank adds to a sum that is made anyway tell whether a hash h of them is the same on all N ranks:
it is if and only if N times the sum of h squared is the square of the sum of h (Cauchy and Schwarz). Both sums are
exact in float64. Only where hashes differ do the ranks send more, to find out what differs, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import torch
import xxhash

from hpctrain.comm import Collective, all_gather_json, broadcast_tensors, describe_ranks
from hpctrain.distributed import is_sharded_tensor, pipeline_of, shard_of
from hpctrain.errors import RanksDiffer
from hpctrain.reduce.watch.digests import describe_settings, digests
from hpctrain.reduce.watch.forward_buffers import ForwardBuffers

CompareRanks: TypeAlias = Literal["error", "note", "off"]

# Parameters are compared in the first steps, at powers of two and every so many steps; settings more often.
EVERY_STEPS = 100
SETTINGS_EVERY_STEPS = 10
_FIRST_STEPS = 4
_SUM, _SQUARES = "ranks: sum", "ranks: squares"
_NAMED = 3
_RUNBOOK = "See docs/runbooks/f11-replicas-differ.md"


def compares_parameters(step: int) -> bool:
    """Returns True if parameters are compared in `step`, counted from 1."""
    return step < _FIRST_STEPS or step % EVERY_STEPS == 0 or (step < EVERY_STEPS and step & (step - 1) == 0)


@final
class RankComparison:
    """Compares the ranks of `comm`, at least two, in the steps of one updater.

    model: its parameters are compared, unless each rank holds a part of them; in addition those of `groups()`, the
    optimizer's parameter groups, whose other entries are compared as settings. buffers: those that no forward pass
    changes are compared too; a difference is only said, since each rank may have its own.
    how: "error" returns an error for what differs, "note" says it once and leaves it out from then on.
    say: prints a line for the user, on rank 0.
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
        self._has_whole = shard_of(model) != "parameters" and pipeline_of(model) is None
        self._step = 0
        self._settings_equal = self._parameters_equal = 0  # step in which they were last
        self._left_out: set[str] = set()
        # N h^2 is below 2**53, so that all sums are exact.
        self._bits = (53 - comm.num_ranks.bit_length()) // 2
        self._found: list[dict[str, str]] = []

    def numbers(self) -> dict[str, float]:
        """Begins a step. Returns this rank's numbers to sum over the ranks; in most steps none. Not collective."""
        self._step += 1
        with_parameters = compares_parameters(self._step)
        if not with_parameters and self._step % SETTINGS_EVERY_STEPS:
            return {}
        tensors = self._tensors() if with_parameters and self._has_whole else {}
        buffers = self._buffers.constants() if with_parameters else {}
        found = digests([*tensors.values(), *buffers.values()])
        marks = [f"{digest & (1 << 64) - 1:016x}" for digest in found]
        self._found = [
            self._counted(describe_settings(self._groups())),
            self._counted(dict(zip(tensors, marks[: len(tensors)], strict=True))),
            self._counted(dict(zip(buffers, marks[len(tensors) :], strict=True))),
        ]
        value = xxhash.xxh3_64_intdigest(repr(self._found)) >> (64 - self._bits)
        return {_SUM: float(value), _SQUARES: float(value * value)}

    def without_numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in sums.items() if name not in (_SUM, _SQUARES)}

    def error(self, sums: Mapping[str, float]) -> RanksDiffer | None:
        """Returns the error that every rank is to raise, if ranks differ. Collective if they do.

        sums: with those of `numbers`, the same on every rank.
        """
        if self._comm.num_ranks * int(sums[_SQUARES]) == int(sums[_SUM]) ** 2:
            self._settings_equal = self._step
            if compares_parameters(self._step):
                self._parameters_equal = self._step
            return None
        everyones = all_gather_json(self._comm, self._found)
        settings, tensors, buffers = (_Differences([found[kind] for found in everyones]) for kind in range(3))
        self._left_out.update(buffers.names)
        common = buffers.held_by_all()
        if common:
            self._say(
                f"buffers differ between the ranks: {_listed(map(repr, common))}. Rank 0's are saved, and evaluated in "
                "a recipe's run. Where training reads them, set them alike on all ranks"
            )
        text = self._of_settings(settings) if settings.names else self._of_tensors(tensors)
        if text is None:
            return None
        last = self._settings_equal if settings.names else self._parameters_equal
        since = f"; at step {last} they were equal" if last else ""
        text = f"{text}. Found at step {self._step} of this updater{since}. {_RUNBOOK}"
        if self._how == "error":
            return RanksDiffer(text, agreed=True)
        self._left_out.update(settings.names, tensors.names)
        self._say(f"WARNING: {text}")
        return None

    def _counted(self, found: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in found.items() if name not in self._left_out}

    def _tensors(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {
            name: p for name, p in self._model.named_parameters() if not is_sharded_tensor(p)
        }
        if shard_of(self._model) == "none":  # else the optimizer has parts of its own
            known = set(map(id, self._model.parameters()))
            for number, group in enumerate(self._groups()):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in known:
                        named[f"{place} of parameter group {number}"] = parameter
        return named

    def _of_settings(self, found: _Differences) -> str:
        shown = [f"{name} is {found.values_by_rank(name, self._comm)}" for name in found.names[:_NAMED]]
        rates = all(name.startswith("lr ") for name in found.names)
        what = "with different learning rates" if rates else "with different settings of the optimizer"
        return (
            f"the ranks train {what}: {_listed(shown, num=len(found.names))}. What sets them must do so alike on all "
            "ranks: a scheduler that follows a loss, such as ReduceLROnPlateau, takes one number: "
            "scheduler.step(session.mean(loss))"
        )

    def _of_tensors(self, found: _Differences) -> str | None:
        if not found.names:
            return None
        shown = []
        for name in found.names[:_NAMED]:
            amount = self._largest_difference(name) if name in found.held_by_all() else None
            by = f" by up to {amount:.3g}" if amount else ""
            shown.append(f"{name!r} {found.where(name, self._comm)}{by}")
        return (
            f"the ranks no longer hold the same parameters: {_listed(shown, num=len(found.names))}. "
            f"{self._advice(found.names)}"
        )

    def _largest_difference(self, name: str) -> float:
        """Returns the largest difference between rank 0's values and any rank's. Collective."""
        mine = self._tensors()[name].detach()
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
    """The names under which ranks have different values. by_rank: each rank's values by name."""

    def __init__(self, by_rank: Sequence[Mapping[str, str]]) -> None:
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

    def values_by_rank(self, name: str, comm: Collective) -> str:
        ranks: dict[str | None, list[int]] = {}
        for place, value in enumerate(self._of(name)):
            ranks.setdefault(value, []).append(comm.members[place])
        return ", ".join(
            f"{'missing' if value is None else value} on {describe_ranks(on)}"
            for value, on in list(ranks.items())[:4]
        ) + (", ..." if len(ranks) > 4 else "")

    def where(self, name: str, comm: Collective) -> str:
        """Returns on which ranks it differs from most of them, in words."""
        values = self._of(name)
        usual, count = Counter(values).most_common(1)[0]
        others = [comm.members[place] for place, value in enumerate(values) if value != usual]
        if count == 1:
            return f"between {describe_ranks(comm.members)}"
        no_majority = 2 * count <= len(values)
        return (
            f"between {describe_ranks(others)} and the others"
            if no_majority
            else f"on {describe_ranks(others)}"
        )


def _listed(texts: Iterable[str], *, num: int | None = None) -> str:
    """Returns the first few texts, and how many of `num` are left out."""
    shown = list(texts)
    num = len(shown) if num is None else num
    more = f", and {num - _NAMED} more" if num > _NAMED else ""
    return ", ".join(shown[:_NAMED]) + more
