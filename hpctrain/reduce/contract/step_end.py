"""The end of a step: gradient norm, clipping and divisor of the gradients, and the sum of a step's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np
import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import Finishing, Numbers, Reduced
from hpctrain.reduce.wire_formats import WIRE_FORMATS, listed_wires, needs_feedback

# Norms are computed of rows of this many elements, and then of these norms in float64: a float32 sum over a whole
# bucket would lose up to a thousandth, and a float64 sum takes four times as long.
ROW_ELEMS = 1024


def in_rows(gradients: torch.Tensor) -> list[torch.Tensor]:
    """Returns views of shape (rows, elements), none of them empty, that cover `gradients`, shape (n,)."""
    whole = gradients.numel() - gradients.numel() % ROW_ELEMS
    return [rows for rows in (gradients[:whole].view(-1, ROW_ELEMS), gradients[None, whole:]) if rows.numel()]


def square_of(norms: torch.Tensor) -> float:
    """Returns the sum of the squares of `norms`, shape (n,)."""
    norm = float(torch.linalg.vector_norm(norms, dtype=torch.float64))
    return norm * norm  # ** would raise where this is infinite


def square_of_all(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the sum of the squares of all elements of `tensors`, which may have any shape.

    The sum is infinite or NaN if an element is infinite or NaN.

    Needs memory for one norm per ROW_ELEMS elements, and for a copy of each tensor that is not contiguous.
    """
    return _square_of_rows([rows for tensor in tensors for rows in in_rows(tensor.detach().reshape(-1))])


def _square_of_rows(rows: Sequence[torch.Tensor]) -> float:
    if not rows:
        return 0.0
    square = square_of(torch.cat([_norms(part) for part in rows]))
    if math.isinf(square):  # perhaps only in float32
        norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in rows]
        square = square_of(torch.cat(norms))
    return square


def _norms(rows: torch.Tensor) -> torch.Tensor:
    narrow = rows.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32 if narrow else None)


@final
class GradientSquares:
    """Computes the sum of the squares of the gradients in planned buckets.

    Other elements of the buckets (flags of used parameters, padding) do not count. The computation takes little more
    time than reading the memory once, and is exact enough for a norm.
    """

    def __init__(self, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> None:
        """Prepares the sum. buffers: memory of each bucket, shape (bucket.numel,)."""
        pairs = list(zip(buckets, buffers, strict=True))
        gradients = [buffer[: bucket.num_gradients] for bucket, buffer in pairs if bucket.slots]
        self._rows = [rows for values in gradients for rows in in_rows(values)]
        # Of the share that was asked for last: its rows, and memory for their norms; None if their dtypes differ.
        self._share: tuple[int, int] | None = None
        self._rows_of_share: list[torch.Tensor] = []
        self._norms: torch.Tensor | None = None
        self._places: Sequence[torch.Tensor] = ()

    def of_share(self, share: int, *, num_shares: int) -> float:
        """Returns the sum of squares of one share of the gradients. The results for all shares add up to the whole."""
        if self._share != (share, num_shares):
            self._prepare(share, num_shares=num_shares)
        if self._norms is not None:
            for rows, norms in zip(self._rows_of_share, self._places, strict=True):
                torch.linalg.vector_norm(rows, dim=1, out=norms)
            square = square_of(self._norms)
            if not math.isinf(square):
                return square
        return _square_of_rows(self._rows_of_share)

    def _prepare(self, share: int, *, num_shares: int) -> None:
        self._share = share, num_shares
        mine = [rows.tensor_split(num_shares)[share] for rows in self._rows]
        self._rows_of_share = [rows for rows in mine if rows.numel()]
        self._norms = None
        kinds = {(rows.dtype, rows.device) for rows in self._rows_of_share}
        if len(kinds) == 1:
            [(dtype, device)] = kinds
            sizes = [len(rows) for rows in self._rows_of_share]
            self._norms = torch.empty(sum(sizes), dtype=dtype, device=device)
            self._places = self._norms.split(sizes)

    def of_all(self) -> float:
        """Returns the sum of squares of all gradients."""
        return self.of_share(0, num_shares=1)


_ADDED_TO_NORM = 1e-6  # as torch does


def check_clip_norm(clip_norm: float | None) -> None:
    """Raises UsageError for a `clip_norm` that is not above 0. None means that gradients are not clipped."""
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"clip_norm is {clip_norm}: give a number above 0, or None for no clipping")


def clip_factor(norm: float, *, clip_norm: float | None) -> float:
    """Returns the factor for gradients whose global 2-norm is `norm`: clip_norm / (norm + 1e-6), at most 1.

    This is the formula of `torch.nn.utils.clip_grad_norm_`.
    """
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + _ADDED_TO_NORM))


def check_divide_by(
    divide_by: str | None, *, sums: Mapping[str, float] | None, plain: bool, wire: str | None = None
) -> None:
    """Raises UsageError unless `divide_by` is None, or names a number in `sums` that can be used as a divisor.

    Gradients are divided by such a number if the weights of a step do not add up to 1, for example if the weights are
    numbers of tokens.

    plain: True if a backward of this step ran outside the updater, which then weighted all ranks equally.
    wire: wire format. A wire format with error feedback cannot be used with `divide_by`: what is not sent in a step
    would be divided by the number of the next step. None: the weights of each step add up to about 1, so that any wire
    format can be used.
    """
    if divide_by is None:
        return
    if divide_by not in (sums or {}):
        raise UsageError(
            f"step(divide_by={divide_by!r}) needs a number of that name in sums, which has {sorted(sums or {})}"
        )
    if plain:
        raise UsageError(
            f"step(divide_by={divide_by!r}) after a plain loss.backward(), which weights all ranks equally: call "
            "updater.backward(loss, weight=...) with the weights that sums adds up"
        )
    if needs_feedback(wire):
        others = [name for name in WIRE_FORMATS if not needs_feedback(name)]
        raise UsageError(
            f"step(divide_by={divide_by!r}) with wire={wire!r}: what this wire format does not send is added to the "
            "gradients of the next step, and would be divided by that step's sum of weights. Divide the weights before "
            "backward instead, with `mine` the sum of this rank's weights over the micro-batches of the step: "
            "total = session.all_reduce({'weight': mine})['weight']; updater.backward(loss, weight=weight / total); "
            "updater.step() without divide_by. Or use wire=" + listed_wires(others, mark="'")
        )


def divisor(totals: Mapping[str, float], *, divide_by: str | None) -> float:
    """Returns the sum over the ranks of the number `divide_by`, or 1 if `divide_by` is None.

    If the sum is 0, the step cannot be applied. Raises UsageError on all ranks if the sum is negative or not finite.

    totals: the sums by name, the same on every rank.
    """
    total = 1.0 if divide_by is None else totals[divide_by]
    if not 0 <= total < math.inf:
        raise UsageError(
            f"the sum over the ranks of {divide_by!r}, by which step divides the gradients, is {total:g}: weights are "
            "finite numbers, 0 or more",
            agreed=True,
        )
    return total


class StepEnd:
    """Base class of reducers that only sum buckets: defaults for `keep_squares`, `begin_step`, `filled` and `finish`.

    `finish` makes one more pass over the gradients, and one all-reduce.
    """

    _squares: GradientSquares

    def keep_squares(self) -> None: ...

    def begin_step(self, factor: float) -> float:
        return 1.0

    def filled(self, number: int, num_elems: int) -> None: ...

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        return all_reduced(self._squares, numbers, comm=comm)

    def _will_finish(self, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> None:
        """Stores the planned buckets and their memory for `finish`; `plan` calls it."""
        self._squares = GradientSquares(buckets, buffers)


def all_reduced(squares: GradientSquares, numbers: Numbers, *, comm: Collective) -> Finishing:
    """Computes the gradient norm and sums `numbers` over the ranks, in one all-reduce.

    Each rank computes the sum of squares of its share of the gradients.
    """
    share = squares.of_share(comm.rank, num_shares=comm.num_ranks)
    if comm.num_ranks > 1:
        buffer = torch.from_numpy(np.concatenate([[share], numbers]))
        comm.all_reduce(buffer)
        share, numbers[:] = float(buffer[0]), buffer[1:].numpy()
    yield True
    return Reduced(share, numbers)
