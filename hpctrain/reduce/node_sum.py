"""This rank's part of a bucket, summed over the ranks of its node, piece by piece in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.reduce.norm import in_rows, num_rows, square_of
from hpctrain.reduce.spans import Span

# Values that a core keeps in its cache while it sums them: 256 KB of float32.
PIECE_ELEMS = 65536


@dataclass(frozen=True, slots=True)
class _Piece:
    """Views. parts: of each rank's bucket. total: where they are summed. copies: where the sum goes from there.

    rows: the total's gradients as rows, and where the norms of these go.
    """

    parts: list[torch.Tensor]
    total: torch.Tensor
    copies: list[torch.Tensor]
    rows: list[tuple[torch.Tensor, torch.Tensor]]


@final
class NodeSum:
    """The sum of `part` of the buckets of all the node's ranks, into each of them, where nothing leaves the node.

    buckets: by local rank, each of shape (numel,). mine: this rank's. num_gradients: of a bucket's elements those that
    count in the norm, the first ones; 0: no norm is taken. scratch: of PIECE_ELEMS, used while `sum` runs.
    """

    def __init__(
        self,
        buckets: Sequence[torch.Tensor],
        *,
        part: Span,
        mine: int,
        num_gradients: int,
        scratch: torch.Tensor,
    ) -> None:
        spans = list(_pieces(part))
        counted = [max(0, min(piece.end, num_gradients) - piece.begin) for piece in spans]
        self._norms = buckets[0].new_zeros(sum(map(num_rows, counted)))
        self._pieces, first = [], 0
        for piece, count in zip(spans, counted, strict=True):
            parts = [bucket[piece.begin : piece.end] for bucket in buckets]
            # The first two are read before anything is written: into one of them no copy is needed.
            total = parts[mine] if mine < 2 else scratch[: piece.numel]
            rows = in_rows(total[:count])
            norms = self._norms[first : first + num_rows(count)].split([len(some) for some in rows])
            first += num_rows(count)
            copies = [other for other in parts if other is not total]
            self._pieces.append(_Piece(parts, total, copies, list(zip(rows, norms, strict=True))))

    def sum(self) -> None:
        """In the order of the ranks. The buckets must be full, and nobody else write to this part."""
        for piece in self._pieces:
            if len(piece.parts) > 1:
                _add(piece.parts, total=piece.total)
            for rows, norms in piece.rows:
                torch.linalg.vector_norm(rows, dim=1, out=norms)
            for copy in piece.copies:
                copy.copy_(piece.total)

    def square(self) -> float:
        """Sum of the squares of the gradients that were summed last."""
        return square_of(self._norms)


def sum_into(values: torch.Tensor, buckets: Sequence[torch.Tensor]) -> None:
    """values = the sum of at least two buckets' parts, in the order of the ranks."""
    for piece in _pieces(Span(0, values.numel())):
        parts = [bucket[piece.begin : piece.end] for bucket in buckets]
        _add(parts, total=values[piece.begin : piece.end])


def _add(parts: Sequence[torch.Tensor], *, total: torch.Tensor) -> None:
    """total, which may be one of the first two, becomes the sum of at least two parts in their order."""
    torch.add(parts[0], parts[1], out=total)
    for other in parts[2:]:
        total.add_(other)


def _pieces(whole: Span) -> Iterator[Span]:
    for begin in range(whole.begin, whole.end, PIECE_ELEMS):
        yield Span(begin, min(whole.end, begin + PIECE_ELEMS))
