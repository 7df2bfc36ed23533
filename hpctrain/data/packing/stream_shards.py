"""Makes shards from sources that can only be read sequentially: token chunks, and iterators over samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import TOKENS_FIELD, FieldSpec, TokenWindows
from hpctrain.data.format.shard_file import shard_name
from hpctrain.data.packing.shard_makers import ShardContent
from hpctrain.data.packing.token_documents import as_tokens
from hpctrain.data.sources.row_source import field_spec
from hpctrain.errors import DataError, HpctrainError

Sample = Mapping[str, Any]


class StreamShards:
    """Makes shards from concatenated token chunks. Holds about one shard in memory."""

    def __init__(
        self, chunks: Iterable[NDArray[Any]], *, windows: TokenWindows, dtype: str, shard_samples: int
    ) -> None:
        self._stream = _Stream(chunks, dtype=dtype)
        self._windows = windows
        self._shard_samples = shard_samples
        self._fields = {TOKENS_FIELD: FieldSpec(dtype=dtype, shape=(windows.window + 1,))}
        self._next = 0

    @property
    def read_tokens(self) -> int:
        """Number of tokens read so far."""
        return self._stream.read_tokens

    def begin(self) -> str | None:
        if len(self._stream.peek(self._windows.window + 1)) <= self._windows.window:
            self._stream.drain()
            return None
        return shard_name(self._next)

    def make(self) -> ShardContent:
        tokens = self._stream.peek(self._windows.tokens_for(self._shard_samples))
        samples = self._windows.windows_in(len(tokens))
        arrays = {TOKENS_FIELD: tokens[: self._windows.tokens_for(samples)]}
        self.skip(samples)
        return ShardContent(samples=samples, fields=self._fields, arrays=arrays, other_datasets={})

    def skip(self, samples: int) -> None:
        self._next += 1
        self._stream.skip(samples * self._windows.stride)


class _Stream:
    """A cursor over concatenated chunks. Keeps in memory only tokens that were returned by `peek` and not skipped."""

    def __init__(self, chunks: Iterable[NDArray[Any]], *, dtype: str) -> None:
        self._chunks: Iterator[NDArray[Any]] = iter(chunks)
        self._dtype = dtype
        self._held: NDArray[Any] = np.empty(0, dtype=self._dtype)
        self._to_skip = 0
        self.read_tokens = 0

    def peek(self, num_tokens: int) -> NDArray[Any]:
        """Returns the next `num_tokens` tokens, fewer at the end of the stream, without moving the cursor."""
        parts, length = [self._held], len(self._held)
        while length < num_tokens:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            array = as_tokens(chunk, dtype=self._dtype)
            self.read_tokens += len(array)
            dropped = min(self._to_skip, len(array))
            self._to_skip -= dropped
            parts.append(array[dropped:])
            length += len(array) - dropped
        self._held = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return self._held[:num_tokens]

    def skip(self, num_tokens: int) -> None:
        """Moves the cursor by `num_tokens`, which may be more than `peek` returned."""
        self._to_skip += max(0, num_tokens - len(self._held))
        self._held = self._held[num_tokens:]

    def drain(self) -> None:
        """Reads the remaining chunks only to count their tokens."""
        for chunk in self._chunks:
            self.read_tokens += len(chunk)


class IteratorShards:
    """Makes shards from samples (dicts of arrays and numbers) of one iterator per part.

    open_part: returns the iterator over a part. parts: numbers of this rank's parts. The first sample of a part
    determines the fields; the arrays of one shard are held in memory.
    """

    def __init__(
        self,
        open_part: Callable[[int], Iterator[Sample]],
        *,
        parts: Sequence[int],
        num_parts: int,
        shard_bytes: int,
        shard_samples: int | None,
    ) -> None:
        self._open_part = open_part
        self._parts = list(parts)
        self._num_parts = num_parts
        self._shard_bytes = shard_bytes
        self._shard_samples = shard_samples
        self._samples: _Checked | None = None
        self._index = 0

    def begin(self) -> str | None:
        while self._parts:
            part = self._parts[0]
            if self._samples is None:
                self._samples, self._index = _Checked(self._open_part(part), part=part), 0
            if self._samples.peek() is not None:
                return shard_name(self._index, part=part if self._num_parts > 1 else None)
            self._parts.pop(0)
            self._samples = None
        return None

    def make(self) -> ShardContent:
        assert self._samples is not None
        fields = self._samples.fields
        sample_bytes = sum(spec.sample_bytes for spec in fields.values())
        at_most = self._shard_samples or max(1, self._shard_bytes // sample_bytes)
        taken = self._samples.take(at_most)
        self._index += 1
        arrays = {name: np.stack([sample[name] for sample in taken]) for name in fields}
        return ShardContent(samples=len(taken), fields=fields, arrays=arrays, other_datasets={})

    def skip(self, samples: int) -> None:
        assert self._samples is not None
        self._samples.drop(samples)
        self._index += 1


class _Checked:
    """Reads samples from an iterator and checks that each has the fields of the first. Raises DataError."""

    def __init__(self, samples: Iterator[Sample], *, part: int) -> None:
        self._samples = samples
        self._part = part
        self._ahead: dict[str, NDArray[Any]] | None = None
        self._number = 0
        self.fields: dict[str, FieldSpec] = {}

    def peek(self) -> dict[str, NDArray[Any]] | None:
        """Returns the next sample without consuming it; None at the end."""
        if self._ahead is None:
            self._ahead = self._convert(self._pull())
        return self._ahead

    def take(self, number: int) -> list[dict[str, NDArray[Any]]]:
        """Returns the next `number` samples, fewer at the end."""
        taken: list[dict[str, NDArray[Any]]] = []
        while len(taken) < number and (sample := self.peek()) is not None:
            taken.append(sample)
            self._ahead = None
        return taken

    def drop(self, number: int) -> None:
        """Skips `number` samples without checking them. Raises DataError if there are fewer."""
        if number and self._ahead is not None:
            self._ahead, number = None, number - 1
        for _ in range(number):
            if self._pull() is None:
                raise DataError(
                    f"{self._where} there are no more samples, but shards of the interrupted packing have more: "
                    "the iterator has changed, pack again with --overwrite"
                )

    @property
    def _where(self) -> str:
        return f"at sample {self._number} of part {self._part} of the iterator"

    def _pull(self) -> Any:
        try:
            sample = next(self._samples, None)
        except (HpctrainError, MemoryError):
            raise
        except Exception as error:  # the user's code may raise anything
            raise DataError(f"{self._where} it raised {type(error).__name__}: {error}") from error
        self._number += sample is not None
        return sample

    def _convert(self, sample: Any) -> dict[str, NDArray[Any]] | None:
        if sample is None:
            return None
        if not isinstance(sample, Mapping) or not sample:
            raise DataError(f"{self._where} it yields {type(sample).__name__}, not a dict of field -> array")
        try:
            arrays = {str(name): np.asarray(value) for name, value in sample.items()}
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{self._where} a field is not an array: {error}") from error
        if not self.fields:
            self.fields = {
                name: field_spec(name, dtype=array.dtype, shape=array.shape) for name, array in arrays.items()
            }
        if arrays.keys() != self.fields.keys():
            raise DataError(
                f"{self._where} the fields are {', '.join(arrays)}; the first sample had {', '.join(self.fields)}"
            )
        for name, array in arrays.items():
            spec = self.fields[name]
            if array.dtype.name != spec.dtype or array.shape != spec.shape:
                raise DataError(
                    f"{self._where} field {name!r} is {array.dtype} {array.shape}, in the first sample "
                    f"{spec.dtype} {spec.shape}: all samples must be alike (pad or resize them)"
                )
        return arrays
