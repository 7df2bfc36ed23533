"""The program of each of two ranks on one device: `python -m tests.gpu.two_ranks_program DEVICE OUTPUT`, started by
`hpctrain launch`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import profiler
from torch.nn import functional

from hpctrain import ParallelPlan
from hpctrain.comm import all_gather_json
from hpctrain.reduce.collective_reducers.power_sgd import LowRankReducer
from hpctrain.reduce.collective_reducers.top_k import TopKReducer
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, run_to_end
from hpctrain.reduce.factory import ReductionRequest
from hpctrain.run import Session, init
from tests.gpu.check import Check, assert_close, assert_equal, samples, small_model

EXACT = (
    ("flat", "fp32"), ("flat", "fp16"), ("ring", "fp32"), ("ring", "bf16"), ("direct", "fp32"), ("direct", "int8"),
    ("hierarchical", "fp32"), ("hierarchical", "fp16"),
)  # fmt: skip
SHAPES = ((200, 130), (1000,), (64, 64), (70, 300), (3,))
SHARDED = {f"sharded {what}": ParallelPlan(shard=what) for what in ("optimizer", "gradients")}  # type: ignore[arg-type]
ROUNDS = 3
STEPS = 8
# A GPU sums products in another order than the CPU, and the differences grow over eight steps.
UPDATER_WITHIN = 1e-4
# Each rank's factors are computed by the device's own QR decomposition.
LOW_RANK_WITHIN = 1e-3


def main(words: Sequence[str]) -> None:
    device, output = words[0], Path(words[1])
    with init(backend="mpi", device=device, timeout_s=240) as session:
        check = Check(device=session.device, scratch=output)
        found = {
            "reductions": _together(session, lambda: _reductions(session)),
            "updater": _together(session, lambda: _updaters(session)),
            "profile": _together(session, lambda: _profile(session, check)),
        }
        if session.rank == 0:
            (output / "ranks.json").write_text(json.dumps(found))


def _together(session: Session, case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what the case found on rank 0, or `failed`: the errors of all ranks. Collective.

    A case must fail either after its last collective operation or on all ranks."""
    found: dict[str, Any] = {}
    fault = None
    try:
        found = case()
    except AssertionError as error:
        fault = f"rank {session.rank}: {error}"
    faults = [each for each in all_gather_json(session.world, fault) if each]
    return {"failed": "; ".join(faults)} if faults else found


# ---------------------------------------------------------------------- reductions


def _reductions(session: Session) -> dict[str, Any]:
    """Checks that every algorithm and wire sums buckets on the device as it sums equal buckets on the CPU."""
    buckets = plan_buckets([_spec(shape) for shape in SHAPES], bucket_bytes=100_000)
    sums: list[tuple[str, list[torch.Tensor], list[torch.Tensor], float]] = []
    for algorithm, wire in EXACT:
        plan = ReductionRequest(algorithm=algorithm, wire=wire)
        made = [session.reductions.make(plan, gradient_bytes=0).reducer for _ in range(2)]
        assert made[0].algorithm == algorithm, f"{algorithm} was requested, but {made[0].algorithm} runs"
        sums.append((f"{algorithm}, {wire}", *_both(made, buckets, session), 0.0))
    top_k = [
        TopKReducer(session.world.duplicate(), start_step=0, topology=session.topology) for _ in range(2)
    ]
    sums.append(("top-k", *_both(top_k, buckets, session), 0.0))
    low_rank = [
        LowRankReducer(session.world.duplicate(), start_step=0, topology=session.topology) for _ in range(2)
    ]
    sums.append(("low-rank", *_both(low_rank, buckets, session), LOW_RANK_WITHIN))
    for name, on_device, on_cpu, within in sums:
        for found, expected in zip(on_device, on_cpu, strict=True):
            if within:
                assert_close(found, expected, within=within, what=name)
            else:
                assert_equal(found, expected, what=name)
    return {"methods": len(sums), "buckets": len(buckets)}


def _spec(shape: tuple[int, ...]) -> GradientSpec:
    return GradientSpec(torch.Size(shape).numel(), torch.float32, shape)


def _both(
    reducers: Sequence[BucketReducer], buckets: tuple[Bucket, ...], session: Session
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the sums of all rounds, by the first reducer on the device and by the second on the CPU. Collective."""
    devices = (session.device, torch.device("cpu"))
    on_device, on_cpu = (
        list(_sums(reducer, buckets, session=session, device=device))
        for reducer, device in zip(reducers, devices, strict=True)
    )
    return on_device, on_cpu


def _sums(
    reducer: BucketReducer, buckets: tuple[Bucket, ...], *, session: Session, device: torch.device
) -> Iterator[torch.Tensor]:
    memory = reducer.plan(buckets, device=device)
    for number in range(ROUNDS):
        generator = torch.Generator().manual_seed(100 * number + session.rank)
        for bucket, buffer in zip(buckets, memory, strict=True):
            host = torch.zeros(bucket.numel)
            host[: bucket.num_gradients] = torch.randn(bucket.num_gradients, generator=generator)
            host[bucket.first_flag :] = 1
            buffer.copy_(host)
        run_to_end([reducer.reduce(place) for place in range(len(buckets))])
        reducer.end_step(applied=True, rescale=1.0)
        yield from [buffer.detach().cpu().clone() for buffer in memory]


# ---------------------------------------------------------------------- whole steps


def _updaters(session: Session) -> dict[str, Any]:
    """Checks that steps whose reductions overlap with backward result in the CPU's parameters, and in the same bits on
    both ranks."""
    devices = (session.device, torch.device("cpu"))
    trained = {
        way: [_train(session, device, way) for device in devices]
        for way in ("flat", "hierarchical", *SHARDED)
    }
    digest = [hashlib.sha256(mine.numpy().tobytes()).hexdigest() for mine, _ in trained.values()]
    same = all(digest == theirs for theirs in all_gather_json(session.world, digest))
    assert same, f"after {STEPS} steps the ranks' parameters differ"
    shares = [
        assert_close(mine, wanted, within=UPDATER_WITHIN, what=f"{way}, parameters")
        for way, (mine, wanted) in trained.items()
    ]
    return {"difference": max(shares)}


def _train(session: Session, device: torch.device, way: str) -> torch.Tensor:
    """way: an algorithm that sums whole gradients, or what is sharded."""
    model = small_model(width=256, depth=4).to(device)
    if way in SHARDED:
        session.parallelize(model, SHARDED[way])
    updater = session.distributed_optimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        algorithm="hierarchical" if way in SHARDED else way,
        bucket_bytes=150_000,
    )
    for step in range(STEPS):
        inputs, labels = samples(session.rank + 2 * step, size=32, width=256, device=device)
        updater.backward(functional.cross_entropy(model(inputs), labels), weight=0.5)
        outcome = updater.step()
        assert outcome.applied, f"{way}: step {step} was skipped"
    updater.wait_for_parameters()
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in model.parameters()])


def _profile(session: Session, check: Check) -> dict[str, Any]:
    """Writes a trace of some steps on each rank, which the process that started the ranks evaluates."""
    width = check.of(gpu=2048, cpu=128)
    model = small_model(width=width, depth=8).to(session.device)
    updater = session.distributed_optimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), algorithm="flat"
    )
    inputs, labels = samples(
        session.rank, size=check.of(gpu=8192, cpu=64), width=width, device=session.device
    )

    def step() -> float:
        updater.backward(functional.cross_entropy(model(inputs), labels), weight=0.5)
        return updater.step().exposed_sync_s

    for _ in range(3):
        step()
    activities = [profiler.ProfilerActivity.CPU]
    if check.has_gpu:
        activities.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=activities) as profile:
        exposed_s = [step() for _ in range(3)]
        check.wait()
    trace = check.scratch / f"trace-{session.rank}.json"
    profile.export_chrome_trace(str(trace))
    return {"trace": str(trace), "exposed_ms": 1e3 * min(exposed_s)}


if __name__ == "__main__":
    main(sys.argv[1:])
