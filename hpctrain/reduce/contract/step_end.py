"""The end of a step for reducers that only sum buckets: one more pass over the gradients, one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpctrain.comm import Collective
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import Finishing, Numbers, Reduced
from hpctrain.reduce.contract.gradient_norm import GradientSquares


class StepEnd:
    """Base class with the defaults of `BucketReducer` for `keep_squares`, `begin_step`, `filled` and `finish`."""

    _squares: GradientSquares

    def keep_squares(self) -> None: ...

    def begin_step(self, factor: float) -> float:
        return 1.0

    def filled(self, number: int, num_elems: int) -> None: ...

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        return all_reduced(self._squares, numbers, comm=comm)

    def _will_finish(self, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> None:
        """Notes the planned buckets and their memory; `plan` calls it."""
        self._squares = GradientSquares(buckets, buffers)


def all_reduced(squares: GradientSquares, numbers: Numbers, *, comm: Collective) -> Finishing:
    """Each rank computes the squares of its share of the gradients; one all-reduce sums them and the numbers."""
    share = squares.of_share(comm.rank, num_shares=comm.num_ranks)
    if comm.num_ranks > 1:
        buffer = torch.from_numpy(np.concatenate([[share], numbers]))
        comm.all_reduce(buffer)
        share, numbers[:] = float(buffer[0]), buffer[1:].numpy()
    yield True
    return Reduced(share, numbers)
