"""What both engines share: the job of one save, and the memory of a rank's extents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpctrain.checkpoint.dtypes import byte_view
from hpctrain.checkpoint.plan import Extent, PlannedTensor, WritePlan
from hpctrain.checkpoint.state import Replicated, Shard
from hpctrain.comm.communicator import Collective


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteJob:
    """One save. path: of the partial file. sources: `State.sources()` of this rank."""

    path: Path
    plan: WritePlan
    sources: Sequence[Replicated | Shard]
    comm: Collective

    def own_extents(self) -> Iterator[tuple[Extent, PlannedTensor, np.ndarray]]:
        """This rank's extents in the plan's order, each with its tensor and its bytes, shape (nbytes,) uint8.

        One source at a time is made contiguous or, piece by piece, brought to the host.
        """
        current, view = -1, torch.empty(0, dtype=torch.uint8)
        for extent in self.plan.extents_by_rank[self.comm.rank]:
            tensor = self.plan.tensors[extent.tensor]
            if extent.source != current:
                current, view = extent.source, byte_view(self.sources[extent.source].tensor)
            start = extent.source_start * tensor.elem_bytes
            data = view[start : start + extent.box.num_elems * tensor.elem_bytes]
            yield extent, tensor, data.cpu().numpy()


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """file_offsets: of each of the plan's tensors, the same on every rank. hashes: of this rank's extents,
    in the plan's order."""

    file_offsets: Sequence[int]
    hashes: Sequence[str]
