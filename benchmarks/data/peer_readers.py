"""Writes and reads the formats of MosaicML streaming and WebDataset; runs in the peers' own environment.

Both are used as their documentation shows, shuffled, with two workers. WebDataset's workers make whole batches.
"""

from __future__ import annotations

import glob
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.data.h5py_loader import WORKERS, FromLoader
from benchmarks.data.kinds import Kind, blocks
from benchmarks.data.serve import Reader

warnings.filterwarnings("ignore")
MOST_SHARD_BYTES = 64 << 20
LEAST_SHARDS = 4  # at least one per worker
# By fork, as by default before Python 3.14: what the peers hand to their workers cannot all be pickled.
FORKED: dict[str, Any] = {
    "num_workers": WORKERS,
    "persistent_workers": True,
    "multiprocessing_context": "fork",
}


def _streaming() -> Any:
    """Returns the imported package. It imports torchvision, which fails without these operators unless it was built for
    this torch; they are declared here and never called."""
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import streaming

    streaming._keep = operators
    return streaming


streaming = _streaming()
import webdataset  # noqa: E402


def versions() -> dict[str, str]:
    return {"mosaicml-streaming": streaming.__version__, "webdataset": webdataset.__version__}


def write(*, method: str, kind: dict[str, Any], directory: str) -> None:
    of = Kind.from_json(kind)
    shard_bytes = min(MOST_SHARD_BYTES, of.num_samples * of.sample_bytes // LEAST_SHARDS)
    if method == "streaming":
        shape = ",".join(map(str, of.shape))
        columns = {"x": f"ndarray:{of.dtype}:{shape}"} | ({"label": "int"} if of.labels else {})
        with streaming.MDSWriter(out=directory, columns=columns, size_limit=shard_bytes) as out:
            for start, samples in blocks(of):
                for number, sample in enumerate(samples):
                    out.write({"x": sample} | ({"label": start + number} if of.labels else {}))
        return
    Path(directory).mkdir(parents=True)
    pattern = f"{directory}/shard-%06d.tar"
    with webdataset.ShardWriter(pattern, maxsize=shard_bytes, verbose=0) as sink:
        for start, samples in blocks(of):
            for number, sample in enumerate(samples):
                cls = {"cls": start + number} if of.labels else {}
                sink.write({"__key__": f"{start + number:08d}", "npy": sample, **cls})


class Streamed(streaming.StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        x = found["x"]
        if "label" not in found:
            return torch.from_numpy(x.astype(np.int32))
        return torch.from_numpy(x), found["label"]


class StreamingReader(FromLoader):
    def __init__(self, loader: Any, *, dataset: Any) -> None:
        super().__init__(loader)
        self._dataset = dataset

    def close(self) -> None:
        super().close()
        del self._dataset
        streaming.base.util.clean_stale_shared_memory()


def open_reader(method: str, kind: Kind, *, directory: str) -> Reader:
    if method == "streaming":
        dataset = Streamed(local=directory, shuffle=True, batch_size=kind.batch)
        loader = DataLoader(dataset, batch_size=kind.batch, **FORKED)
        return StreamingReader(loader, dataset=dataset)
    urls = sorted(glob.glob(f"{directory}/shard-*.tar"))
    pipeline = webdataset.WebDataset(urls, shardshuffle=len(urls), workersplitter=webdataset.split_by_worker)
    pipeline = pipeline.shuffle(1000 if kind.sample_bytes < 1 << 20 else 8).decode()
    if kind.labels:
        pipeline = pipeline.to_tuple("npy", "cls")
    else:
        pipeline = pipeline.to_tuple("npy").map(lambda found: (found[0].astype(np.int32),))
    pipeline = pipeline.batched(kind.batch)
    loader = webdataset.WebLoader(pipeline, batch_size=None, **FORKED)
    return FromLoader(
        loader, around=next(stage for stage in loader.pipeline if isinstance(stage, DataLoader))
    )
