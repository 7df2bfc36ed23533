"""Error feedback of a codec: what encoding has lost is added to what is encoded the next time.

Source: Seide et al. 2014 (1-bit SGD), doi:10.21437/Interspeech.2014-274; Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from typing import final

import torch

from hpctrain.reduce.codecs.codec import Codec


@final
class NoFeedback:
    """Encodes, and forgets what was lost."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        self._codec.encode(values, out=out)

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        self._codec.encode(values, out=out)


@final
class CodecFeedback:
    """The losses of one carrier's part: of every slice on its way to the owner, and of the sum on its way back.

    Kept twice: the losses of a step count once `settle` has said that the step was applied. A step that was
    skipped (gradients not finite) leaves no trace.
    """

    def __init__(
        self, codec: Codec, *, numel: int, own: slice, num_gradients: int, dtype: torch.dtype
    ) -> None:
        """numel: of the part. own: the place in it of the slice that this rank sums.

        num_gradients: the elements that are fed back, the first ones; behind them are flags, which must not
        carry anything into a step to which they do not belong.
        """
        self._codec = codec
        self.own = own
        self._num_gradients = num_gradients
        # The own slice, which is not encoded on the way to an owner, holds the loss of its sum.
        self.lost = torch.zeros(numel, dtype=dtype)
        self._new = torch.zeros(numel, dtype=dtype)

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        place = slice(first, first + values.numel())
        values.add_(self.lost[place])
        self._codec.encode(values, out=out)
        new = self._new[place]
        self._codec.decode(out, out=new)
        torch.sub(values, new, out=new)
        new[max(0, self._num_gradients - first) :].zero_()

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        self.encode(values, first=self.own.start, out=out)

    def settle(self, *, applied: bool, rescale: float) -> None:
        """The step is over. rescale: factor of the loss scale from this step to the next."""
        if applied:
            self.lost, self._new = self._new, self.lost
        if rescale != 1:
            self.lost.mul_(rescale)
