"""Token windows of indexed files: the number of windows per file, and their starts if documents split them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import TOKENS_FIELD, FieldSpec, TokenWindows
from hpctrain.data.format.token_windows import split_windows
from hpctrain.data.hdf5.read_elements import read_elements
from hpctrain.data.indexing.hdf5_paths import resolve
from hpctrain.data.indexing.inspect_file import open_to_index
from hpctrain.data.indexing.merge_fields import FieldSource
from hpctrain.data.indexing.request import FieldRequest, SampleIs
from hpctrain.errors import DataError, UsageError


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """Windows of window + 1 tokens that begin `stride` tokens apart. Raises UsageError if either is below 1.

    documents: dataset of each file with the positions at which documents begin, which no window crosses. None:
    windows may cross the borders of documents.
    """

    window: int
    stride: int
    documents: str | None = None

    def __post_init__(self) -> None:
        if self.window < 1 or self.stride < 1:
            raise UsageError(f"windows of {self.window} tokens, {self.stride} apart: both must be at least 1")

    @property
    def windows(self) -> TokenWindows:
        boundaries = "ignore" if self.documents is None else "split"
        return TokenWindows.model_validate(
            {
                "window": self.window,
                "stride": self.stride,
                "boundaries": boundaries,
                "documents": self.documents,
            }
        )


def check_token_request(requests: Sequence[FieldRequest], *, samples: SampleIs) -> None:
    """Raises UsageError unless there is one field, named `tokens`, whose rows are the stream."""
    if [request.name for request in requests] != [TOKENS_FIELD]:
        raise UsageError(
            f"--tokens needs exactly one field, named {TOKENS_FIELD}: --fields {TOKENS_FIELD}=/PATH"
        )
    if samples is not SampleIs.ROWS or requests[0].has_wildcard:
        raise UsageError("--tokens cuts each file's stream into samples: no '*' in the path, no --samples")


@dataclass(frozen=True, kw_only=True)
class CutStream:
    """Windows of one file. num_tokens: length of the part that windows use, 0 without --tokens.

    starts: first token of each window, int64, shape (samples,), if documents split them, else None.
    """

    place: FieldSource
    samples: int
    num_tokens: int
    starts: NDArray[np.int64] | None


def token_field(places: Sequence[FieldSource], *, spec: FieldSpec, request: TokenRequest) -> FieldSpec:
    """Returns the field of windows. spec: field of the streams' rows. Raises DataError unless rows are integers."""
    if spec.shape or spec.kind != "array" or np.dtype(spec.dtype).kind not in "iu":
        raise DataError(
            f"{places[0].describe(TOKENS_FIELD)} is {spec.dtype} with rows of shape {spec.shape}, not a stream of "
            "integers: without --tokens its rows are the samples"
        )
    return FieldSpec(dtype=spec.dtype, shape=(request.window + 1,))


def cut_stream(place: FieldSource, *, request: TokenRequest) -> CutStream:
    """Returns the windows of one file; `samples` is 0 if it is shorter than one window. Raises DataError."""
    num_tokens = place.fields[TOKENS_FIELD].shape[0]
    windows = request.windows
    if request.documents is None:
        samples = windows.windows_in(num_tokens)
        used = windows.tokens_for(samples) if samples else 0
        return CutStream(place=place, samples=samples, num_tokens=used, starts=None)
    documents = _documents(place.file.path, request.documents, num_tokens=num_tokens)
    starts = split_windows(documents, num_tokens=num_tokens, window=request.window, stride=request.stride)
    return CutStream(place=place, samples=len(starts), num_tokens=num_tokens, starts=starts)


def _documents(path: str, name: str, *, num_tokens: int) -> NDArray[np.int64]:
    with open_to_index(path) as file:
        dataset = file[resolve(file, name)]
        shape, dtype = getattr(dataset, "shape", None), getattr(dataset, "dtype", None)
        if shape is None or len(shape) != 1 or dtype is None or dtype.kind not in "iu":
            raise DataError(
                f"{name} of {path} must be a list of integers, the positions at which documents begin"
            )
        starts: NDArray[np.int64] = read_elements(dataset).astype(np.int64)
    if len(starts) and (np.any(np.diff(starts) < 0) or starts[0] < 0 or starts[-1] > num_tokens):
        raise DataError(
            f"{name} of {path} must hold the positions at which documents begin, ascending, from 0 to {num_tokens}"
        )
    return starts
