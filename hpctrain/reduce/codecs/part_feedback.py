"""Error feedback of a codec: the error of an encoding is added to the values of the next one.

Source: Seide et al. 2014 (1-bit SGD), doi:10.21437/Interspeech.2014-274; Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from typing import final

import torch

from hpctrain.reduce.codecs.codec import Codec


@final
class NoFeedback:
    """Encodes without error feedback."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        self._codec.encode(values, out=out)

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        self._codec.encode(values, out=out)


@final
class CodecFeedback:
    """Encoding errors of one carrier's part: of the slices that it sends to their owners, and of the sum that it owns.

    The new errors of a step take effect when `settle` reports that the step was applied. A step that was skipped
    (gradients not finite) changes nothing.
    """

    def __init__(
        self, codec: Codec, *, numel: int, own: slice, num_gradients: int, dtype: torch.dtype
    ) -> None:
        """numel: of the part. own: the slice of the part that this rank sums.

        num_gradients: number of elements with error feedback, the first ones; after them are flags, which must not
        affect later steps. dtype: of the errors.
        """
        self._codec = codec
        self.own = own
        self._num_gradients = num_gradients
        # The own slice, which is not sent to an owner, holds the error of its sum.
        self.lost = torch.zeros(numel, dtype=dtype)
        self._new = torch.zeros(numel, dtype=dtype)

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        """Encodes `values` plus their earlier error into `out`, and keeps the new error. Changes `values`.

        first: their offset in the part.
        """
        place = slice(first, first + values.numel())
        values.add_(self.lost[place])
        self._codec.encode(values, out=out)
        new = self._new[place]
        self._codec.decode(out, out=new)
        torch.sub(values, new, out=new)
        new[max(0, self._num_gradients - first) :].zero_()

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        self.encode(values, first=self.own.start, out=out)

    def add_to(self, values: torch.Tensor, *, first: int) -> None:
        """Adds their earlier error to `values`, which are not encoded, so that there is no new one.

        first: their offset in the part.
        """
        place = slice(first, first + values.numel())
        values.add_(self.lost[place])
        self._new[place].zero_()

    def settle(self, *, applied: bool, rescale: float) -> None:
        """Ends the step: the new errors take effect if it was `applied`. rescale: next loss scale / this one's."""
        if applied:
            self.lost, self._new = self._new, self.lost
        if rescale != 1:
            self.lost.mul_(rescale)
