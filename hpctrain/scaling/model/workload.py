"""What one rank does in a step, independent of the number of ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import UsageError


@dataclass(frozen=True, slots=True)
class ReadyBucket:
    """A bucket of float32 gradients. ready: share of backward after which it is complete, 0 to 1."""

    num_bytes: float
    ready: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A step of one rank that has a core, or a GPU, for itself.

    forward_s, backward_s: of `samples` samples. update_s: optimizer and all else that happens after the reduction.
    buckets: in the order of their reduction. input_bytes: read by each rank in a step. sigma: spread of a rank's time
    from step to step, see `slowest_factor`. busy_slowdown: factor on the computation where every core of the machine
    is busy, over one busy core. overlap_slowdown: factor on the computation of several ranks while reductions
    overlap with it; measured on a pair of nodes. input_s: for which a step waits for its batch even if no other rank
    reads. checkpoint_s: time for which a step is lengthened by saving, on average over all steps.
    """

    forward_s: float
    backward_s: float
    update_s: float
    samples: int
    buckets: tuple[ReadyBucket, ...]
    sigma: float = 0.0
    busy_slowdown: float = 1.0
    overlap_slowdown: float = 1.0
    input_bytes: float = 0.0
    input_s: float = 0.0
    checkpoint_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.buckets or not self.forward_s + self.backward_s > 0 or self.samples < 1:
            raise UsageError(
                "a workload needs at least one bucket, one sample, and a time of forward and backward"
            )

    @property
    def gradient_bytes(self) -> float:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    def with_slower_computation(self, factor: float) -> Workload:
        """The same with all of its computation longer by a factor."""
        return replace(
            self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s,
            update_s=factor * self.update_s,
        )  # fmt: skip

    def with_samples(self, samples: int) -> Workload:
        """The same for another number of samples: forward and backward in proportion, the rest as it is."""
        factor = samples / self.samples
        return replace(
            self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s, samples=samples,
            input_bytes=factor * self.input_bytes,
        )  # fmt: skip

    def with_bucket_bytes(self, bucket_bytes: float) -> Workload:
        """The same gradients, in buckets of `bucket_bytes`. Within today's buckets gradients are taken as evenly
        ready."""
        return replace(self, buckets=rebucketed(self.buckets, bucket_bytes=bucket_bytes))


def rebucketed(buckets: Sequence[ReadyBucket], *, bucket_bytes: float) -> tuple[ReadyBucket, ...]:
    """Cuts the sequence of gradients into buckets of `bucket_bytes`, the last one smaller."""
    ends: list[tuple[float, float]] = [(0.0, 0.0)]  # bytes so far, ready
    for bucket in buckets:
        ends.append((ends[-1][0] + bucket.num_bytes, max(ends[-1][1], bucket.ready)))
    total = ends[-1][0]
    found = []
    done, place = 0.0, 1
    while done < total:
        end = min(total, done + bucket_bytes)
        if total - end < 1e-9 * total:
            end = total
        while ends[place][0] < end * (1 - 1e-12):
            place += 1
        (low_bytes, low), (high_bytes, high) = ends[place - 1], ends[place]
        ready = low + (high - low) * (end - low_bytes) / (high_bytes - low_bytes)
        found.append(ReadyBucket(end - done, ready))
        done = end
    return tuple(found)


def even_buckets(gradient_bytes: float, *, bucket_bytes: float) -> tuple[ReadyBucket, ...]:
    """Buckets of a model of which nothing else is known: gradients become ready evenly during backward."""
    return rebucketed((ReadyBucket(gradient_bytes, 1.0),), bucket_bytes=bucket_bytes)
