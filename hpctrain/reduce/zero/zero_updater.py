"""ZeRO-1 and ZeRO-2: every rank holds all parameters, and updates only the part of the parameters that the rank owns.

Source: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

import torch

from hpctrain.comm import Collective, agreed, broadcast_json, is_true_everywhere
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, plan_buckets
from hpctrain.reduce.contract.updater import ReductionObserver
from hpctrain.reduce.data_parallel.gradient_memory import (
    NOT_READABLE_SHARDED,
    describe_gradient,
    one_device,
    ran_twice,
)
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.parameter_checks import check_updater_options, trainable
from hpctrain.reduce.data_parallel.updater_base import StepSums, UpdaterBase
from hpctrain.reduce.zero.bucket_division import ALIGNMENT_ELEMS, BucketDivision, BucketProgress
from hpctrain.reduce.zero.owned_parts import OwnedParts, ParameterCopies, check_zero_optimizer
from hpctrain.reduce.zero.units_in_flight import UnitsInFlight
from hpctrain.reduce.zero.zero_reducer import ZeroReducer

# With ZeRO-2, a bucket is reduced in this many units, and there is memory for the units of two buckets.
_UNITS_OF_A_BUCKET = 4


@final
class ZeroUpdater(UpdaterBase):
    """`DistributedOptimizer` that reduce-scatters gradients in backward and gathers updated parameters in forward.

    The gathering is described in `units_in_flight`. The constructor is collective. A plain `loss.backward()` has weight
    1/num_ranks. From backward to `step` a parameter's `.grad` cannot be used. Parameters are assigned to buckets in the
    reverse order of registration. From the second step on, buckets are reduced in the order in which they were complete
    on rank 0 in the first step.

    Args:
        optimizer: Optimizer that updates each element independently of other elements. Its parameters have the same
            shapes, in the same order, on every rank. Until `close` the optimizer holds this rank's parts of the
            parameters (`distributed.element_shard`).
        comm: Communicator of all ranks, of which there are at least two. The calling thread uses it for the small sums
            of a step.
        reducer: Reducer for this updater only, with a communicator of its own. The caller closes the reducer after the
            updater.
        keeps_gradients: True (ZeRO-1): there is memory for all gradients, and backward waits for no other rank. False
            (ZeRO-2): there is memory for the gradients of two buckets and this rank's share of the sums, and backward
            waits for the network if the network is slower.
        bucket_bytes, loss_scale, clip_norm, max_in_flight, overlap, oversubscribed: See `AllReduceUpdater`.
        align_elems: Shares end at multiples of this number of elements within a parameter.
        model: Model that computes with the parameters. If the model has scripted modules, `step` waits for all
            parameters. `step` also waits without `overlap`, and in a process that has compiled something with
            `torch.compile`.

    Raises:
        UsageError: On every rank. An argument is invalid, or the optimizer or model cannot be sharded.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        reducer: ZeroReducer,
        keeps_gradients: bool,
        bucket_bytes: int = 4_000_000,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        max_in_flight: int = 4,
        overlap: bool = True,
        oversubscribed: bool = False,
        align_elems: int = ALIGNMENT_ELEMS,
        model: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(
            optimizer, comm=comm, loss_scale=loss_scale or LossScale.for_wire(reducer.wire), clip_norm=clip_norm,
            reducer=reducer, wire=reducer.wire,
        )  # fmt: skip
        self._reducer = reducer

        def check() -> None:
            check_updater_options(self._parameters, clip_norm=clip_norm, max_in_flight=max_in_flight)
            one_device(self._parameters)
            check_zero_optimizer(optimizer, self._parameters)

        agreed(comm, check, os_error=UsageError)
        specs = [describe_gradient(p) for p in self._parameters]
        self._plan = BucketDivision.of(
            plan_buckets(specs, bucket_bytes=bucket_bytes), num_ranks=comm.num_ranks, align_elems=align_elems,
            unit_bytes=bucket_bytes if keeps_gradients else -(-bucket_bytes // _UNITS_OF_A_BUCKET),
        )  # fmt: skip
        self._progress = BucketProgress([[slot.parameter for slot in b.slots] for b in self._plan.buckets])
        self._observed = False  # whether the order of complete buckets is known, which the first step shows
        self._copies = ParameterCopies(self._parameters, plan=self._plan, rank=comm.rank)
        self._owned = OwnedParts(
            optimizer, self._parameters, plan=self._plan, rank=comm.rank, optimizer_step=self._optimizer_step
        )
        num_units = len(self._plan.units)
        reducer.plan(
            self._plan,
            # One is filled, and one is on its way to be freed, while `max_in_flight` are reduced.
            num_slots=num_units if keeps_gradients else max(max_in_flight + 2, 2 * _UNITS_OF_A_BUCKET),
            outs=self._owned.gradients,
            gathered=[self._copies.gathered(number) for number in range(num_units)],
        )
        self._units = UnitsInFlight(
            reducer, plan=self._plan, parameters=self._parameters, model=model,
            max_in_flight=max_in_flight, overlap=overlap, oversubscribed=oversubscribed,
        )  # fmt: skip
        self._begin_step()
        self._register_hooks(self._hook)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of one step, in the order in which they are reduced."""
        return tuple(self._plan.buckets[number] for number in self._progress.order)

    def synchronize(self) -> None:
        """Raises UsageError: no rank has the sums of all gradients."""
        raise UsageError(NOT_READABLE_SHARDED)

    def wait_for_parameters(self) -> None:
        """See `DistributedOptimizer.wait_for_parameters`. Raises the error of a gathering that has failed."""
        self._units.wait_for_parameters()

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """See `DistributedOptimizer.observe_reductions`.

        The observer is called after the reduction of each unit, with the unit's index, and with the same index after
        the gathering of its parameters.
        """
        self._units.observe(observer)

    # ------------------------------------------------------------------ implementation

    def _sum(self, sums: Mapping[str, float]) -> StepSums:
        blocked_before_s = self._units.take_blocked_s()  # in forward and backward
        started = time.perf_counter()
        self.wait_for_parameters()
        self._check_parameters()
        self._progress.end_backward()
        self._send_complete()
        busy = self._units.wait()
        square, totals, order_is_new = self._sum_numbers(sums)
        self._units.take_blocked_s()  # is in what follows
        ended = time.perf_counter()
        return StepSums(
            norm_square=square,
            totals=totals,
            scale=self._scale.value,
            order_is_new=order_is_new,
            update_from=ended,
            sync_s=busy.total_s,
            hidden_sync_s=max(0.0, busy.hidden_s - blocked_before_s),
            exposed_sync_s=blocked_before_s + ended - started,
            update_s=0.0,
        )

    def _update(self, factor: float, summed: StepSums) -> bool:
        factor = self._owned.scale_copied(factor)
        fits = self._owned.set_gradients(self._used)
        if not (is_true_everywhere(self._comm, fits) if self._owned.may_overflow else fits):
            return False
        began = time.perf_counter()
        self._owned.step(factor)
        summed.update_s = time.perf_counter() - began
        # What backward needs last is what forward needs first.
        summed.sync_s += self._units.gather(self._progress.order[::-1])
        summed.exposed_sync_s += self._units.take_blocked_s()
        return True

    def _end_step(self, summed: StepSums, *, applied: bool, accepted: bool, rescale: float) -> None:
        self._owned.forget()
        self._drop_gradients()
        self._reducer.end_step(applied=applied, rescale=rescale)
        summed.times = self._clock.times(self.buckets, update_s=summed.update_s or 0.0)
        if summed.order_is_new and accepted:  # after a backward that failed half-way, the order is not known
            self._progress.order = broadcast_json(self._comm, self._progress.completed_order())
            self._observed = True
        self._begin_step()

    def _release(self) -> bool:
        """See `UpdaterBase._release`. Gives the optimizer the model's parameters back, without state.

        Waits for parameters that are still being gathered. Raises the error of a gathering that has failed, unless that
        was raised before.
        """
        try:
            return self._units.close()
        finally:
            if not self._closed:
                self._owned.release()

    @property
    def _has_begun(self) -> bool:
        return self._progress.has_begun

    def _is_plain(self) -> bool:
        return not self._weighted and (any(self._had) or any(p.grad is not None for p in self._parameters))

    def _begin_step(self) -> None:
        super()._begin_step()
        self._progress.begin_step()
        self._last_ready: int | None = None
        self._had = [False] * len(self._parameters)
        self._used = [True] * len(self._parameters)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            dropped = self._last_ready is not None and not self._copies.is_as_left(self._last_ready, had=True)
            if dropped or self._progress.is_ready(index):
                if self._copies.any_is_pending():
                    raise ran_twice()
                self._abandon()  # the model's `zero_grad` has dropped the gradients before this one
            if self._syncing:
                complete = self._progress.gradient_is_ready(index)
                self._copies.hold(index)
                self._last_ready = index
                if complete:
                    self._send_complete()

        return gradient_is_ready

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _abandon(self) -> None:
        """Ends a step that is not applied because the script has dropped its gradients. Collective."""
        fresh = [parameter.grad for parameter in self._parameters]
        self._copies.drop_held()
        self._drop_gradients()
        self._progress.end_backward()
        self._send_complete()
        self._units.wait()
        self._sum_numbers({})
        self._reducer.end_step(applied=False, rescale=1.0)
        self._begin_step()
        for parameter, gradient in zip(self._parameters, fresh, strict=True):
            parameter.grad = gradient

    def _send_complete(self) -> None:
        """Reduces the complete buckets, in an order that is the same on every rank."""
        # For modules that forward has not used, whose parameters occupy the memory of units too.
        self.wait_for_parameters()
        for bucket in self._progress.take_complete():
            self._clock.filled()
            indices = self._progress.indices(bucket)
            gradients = self._copies.take_gradients(indices)
            for number in self._units.units_of(bucket):
                memory = self._units.room_for(number)
                self._copies.pack(number, gradients, factor=self._unsent_factor, into=memory)
                self._units.reduce(number)
            for index in indices:
                self._had[index] = index in gradients
                if not self._copies.is_as_left(index, had=True):
                    self._parameters[index].grad = None

    def _sum_numbers(self, sums: Mapping[str, float]) -> tuple[float, dict[str, float], bool]:
        """Sums the numbers of a step over all ranks, and records which parameters any rank has used. Collective.

        Returns the square of the gradient norm, the sums of the caller's numbers by name, and True if rank 0 has just
        learned the order in which buckets become complete.
        """
        names = sorted(sums)
        num_missing = self._had.count(False)
        news = not self._observed and self._comm.rank == 0 and bool(self._progress.completed)
        found = torch.tensor(
            [self._owned.square(), num_missing, news, *(float(sums[name]) for name in names)],
            dtype=torch.float64,
        )
        self._comm.all_reduce(found)
        square, missing, order_is_new, *totals = found.tolist()
        if missing:
            had = torch.tensor(self._had, dtype=torch.int32)
            self._comm.all_reduce(had)
            self._used = [count > 0 for count in had.tolist()]
        return square, dict(zip(names, totals, strict=True)), order_is_new > 0

    def _check_parameters(self) -> None:
        """Raises UsageError if the script has changed the optimizer's parameters, their memory, or their gradients."""
        now = trainable(self._optimizer)
        if len(now) != len(self._owned.parts) or any(
            a is not b for a, b in zip(now, self._owned.parts, strict=True)
        ):
            raise UsageError(
                f"the optimizer's trainable parameters have changed since the updater was made ({len(now)} now, "
                f"{len(self._parameters)} then): close this updater and make a new one after freezing, unfreezing or "
                "adding parameters"
            )
        if not self._copies.in_place():
            raise UsageError(
                "parameters were moved to other memory since the updater was made, which it would not update: move or "
                "convert the model before making the updater, or make a new one"
            )
        self._abandon_dropped()
        if not all(self._copies.is_as_left(index, had=True) for index in self._progress.ready):
            raise UsageError(NOT_READABLE_SHARDED)
