"""The updater of a model that is split over the ranks, by FSDP2, tensor parallelism or a pipeline.

Each rank updates its own part of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import final

import torch

from hpctrain.comm import Collective, agreed
from hpctrain.distributed import (
    ShardedPasses,
    is_first_replica,
    is_sharded_tensor,
    local_part,
    pipeline_of,
    shard_of,
    split_of,
)
from hpctrain.errors import GradientsInUse, UsageError
from hpctrain.reduce.contract.step_end import (
    check_clip_norm,
    square_of_all,
)
from hpctrain.reduce.data_parallel.gradient_memory import (
    NOT_READABLE_SHARDED,
    NOT_READABLE_SPLIT,
    PendingGradient,
)
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.updater_base import StepSums, UpdaterBase
from hpctrain.reduce.split_models.stage_shares import StageShares, check_stage
from hpctrain.reduce.split_models.tensor_gradients import TensorGradients


@final
class HiddenGradients:
    """Hides the gradients of split layers from the end of backward until `step` sums them. Does not communicate.

    Before the sum, a rank has only the gradients of its own samples and layers; a script that clipped these gradients
    would train another model. While gradients are hidden, every use of a `.grad`, and `optimizer.step`, raises
    GradientsInUse. Another backward adds to the hidden gradients. A backward outside of a `given_back` block hides the
    gradients when it ends.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = list(parameters)
        self._pending = [PendingGradient(p, words=NOT_READABLE_SPLIT) for p in self._parameters]
        self._paused = False
        self._task = -1  # the backward at whose end they are hidden
        # A split parameter's own operations refuse a gradient that is not split, in words of another cause.
        self._hooks = [optimizer.register_step_pre_hook(self._refuse_step)]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
            for parameter in self._parameters
        ]

    @contextmanager
    def given_back(self, *, hides: bool = True) -> Iterator[None]:
        """Makes each `.grad` the real gradient in the `with` block.

        hides: True to hide the gradients again at the end of the block.
        """
        self.give_back()
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            if hides:
                self._hide()

    def give_back(self, *, summed: bool = False) -> None:
        """Makes each `.grad` the real gradient again; a `.grad` that the script has set to None stays None.

        summed: True if some gradients are being summed. Then the script may not have set any `.grad` to None.

        Raises GradientsInUse for a `.grad` that the script has replaced.
        """
        pairs = list(zip(self._parameters, self._pending, strict=True))
        changed = [p for p, pending in pairs if pending.held is not None and p.grad is not pending]
        if any(p.grad is not None or summed for p in changed):
            raise GradientsInUse(NOT_READABLE_SPLIT)
        for parameter, pending in pairs:
            if parameter.grad is pending:
                parameter.grad = pending.held
            pending.held = None

    def end(self) -> None:
        """Gives each parameter its hidden gradient, even if the script has set `.grad` to None or another tensor."""
        for parameter, pending in zip(self._parameters, self._pending, strict=True):
            if pending.held is not None:
                parameter.grad, pending.held = pending.held, None

    def close(self) -> None:
        self.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hide(self) -> None:
        for parameter, pending in zip(self._parameters, self._pending, strict=True):
            gradient = parameter.grad
            if gradient is None:
                pending.held = None
            elif gradient is not pending:
                # After create_graph=True it has a graph.
                pending.held = gradient.detach() if gradient.requires_grad else gradient
                parameter.grad = pending

    def _refuse_step(self, *_: object) -> None:
        if any(pending.held is not None for pending in self._pending):
            raise GradientsInUse(NOT_READABLE_SPLIT)

    def _gradient_is_there(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if not self._paused and task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._hide)


# Updates a model that is split over the ranks, by FSDP2 or tensor parallelism.


@final
class SplitModelUpdater(UpdaterBase):
    """`DistributedOptimizer` of a model of which each rank holds a part.

    FSDP2 sums the gradients of sharded parameters within backward; `step` sums all other gradients. Forward and
    backward are collective: every rank runs them the same number of times, and a rank without samples uses an empty
    batch with weight 0. A plain `loss.backward()` has weight 1/num_ranks, or 1/(data-parallel ranks) with split layers.
    FSDP2 reduces the gradients of each micro-batch, so that no rank holds whole gradients. If a backward of sharded
    parameters has failed on all ranks, the next call must be `zero_grad`, or a `step` that is not accepted: other calls
    raise UsageError.

    With split layers that FSDP2 does not shard, every use of `.grad` between backward and `step` raises
    GradientsInUse.

    In a pipeline only ranks with the last stage weight the loss. If several ranks hold whole copies of a stage, they
    sum the stage's gradients in `step`. With `shard = "optimizer"` each of these ranks keeps and updates a share of the
    stage's elements, and `step` gathers the parameters. The constructor is then collective, and until `close` the
    optimizer holds this rank's share (`distributed.element_shard`).

    Args:
        model: The split model.
        optimizer: Optimizer of the parameters as they are split.
        comm: Communicator of all ranks, for the norm and the small sums of a step.
        loss_scale: Loss scale; None means 1.
        clip_norm: Limit of the global 2-norm of the gradients; None means no clipping.
        end_sums: Function that `close` calls, such as the result of `reduce_gradients_by`; None: `close` calls nothing.

    Raises:
        UsageError: The optimizer's parameters are not those of the model, or cannot be sharded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        end_sums: Callable[[], object] | None = None,
    ) -> None:
        check_clip_norm(clip_norm)
        super().__init__(optimizer, comm=comm, loss_scale=loss_scale or LossScale(), clip_norm=clip_norm)
        split, pipeline = split_of(model), pipeline_of(model)
        by_fsdp = shard_of(model) == "parameters"
        self._in_pipeline = pipeline is not None
        whole = pipeline is not None and split is None and not by_fsdp
        self._replicas = pipeline.replicas if pipeline is not None and whole else None
        own = set(map(id, model.parameters()))
        if not self._parameters or not all(
            is_sharded_tensor(p) if by_fsdp else id(p) in own for p in self._parameters
        ):
            raise UsageError(
                "the optimizer's parameters are not those of the split model: make the optimizer after parallelize"
            )
        self._num_data_ranks = comm.num_ranks if split is None else split.num_data_ranks
        self._tensor = TensorGradients(self._parameters, split=split) if split is not None else None
        self._shares: StageShares | None = None
        if self._replicas is not None and self._replicas.num_ranks > 1 and shard_of(model) == "optimizer":
            agreed(comm, partial(check_stage, optimizer, self._parameters), os_error=UsageError)
            self._shares = StageShares(
                optimizer, self._parameters, replicas=self._replicas, optimizer_step=self._optimizer_step
            )
        self._passes: ShardedPasses | None = None
        if by_fsdp and pipeline is None:
            self._passes = ShardedPasses(model, plain_factor=1.0 / self._num_data_ranks)
            for owner in (model, optimizer):
                self._passes.drop_with(owner)
        self._hidden: HiddenGradients | None = None
        if self._passes is None and pipeline is None:
            self._hidden = HiddenGradients(self._parameters, optimizer=optimizer)
        # For a plain backward, FSDP2 sums gradients divided by the number of ranks, so that `.grad` is the mean.
        self._plain_scale = 1.0 if self._passes is not None else float(self._num_data_ranks)
        self._end_sums = end_sums
        self._begin_step()

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """Runs backward on `weight * loss`; see `DistributedOptimizer.backward`. Collective.

        Raises UsageError for a loss that does not have exactly one element, and after a backward that has failed.
        """
        if self._passes is not None and self._passes.backward_has_failed:
            raise UsageError(
                "a backward before this one has failed and left incomplete gradients: call zero_grad() on every rank, "
                "and begin the step again"
            )
        scaled = self.scaled(loss, weight=weight)
        sums_early = self._tensor is not None and last and self._syncing
        with (
            self._hidden.given_back(hides=last and self._syncing)
            if self._hidden is not None
            else nullcontext(),
            self._tensor.during_backward() if self._tensor is not None and sums_early else nullcontext(),
            self._passes.weighted() if self._passes is not None else nullcontext(),
        ):
            scaled.backward()

    def scaled(self, loss: torch.Tensor, *, weight: float) -> torch.Tensor:
        """Returns the loss times weight and loss scale, for a backward that the schedule of a pipeline runs."""
        scaled = self._scale.scaled(loss, weight=weight)
        self._weighted = True
        return scaled

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which backward only accumulates gradients, without any reduction.

        Each rank keeps whole gradients until the next backward outside of the context, or until `step`.
        """
        with (
            super().no_sync(),
            self._hidden.given_back(hides=False) if self._hidden is not None else nullcontext(),
            self._passes.without_sums() if self._passes is not None else nullcontext(),
        ):
            yield

    def zero_grad(self) -> None:
        """Drops the gradients, like the optimizer's own `zero_grad`.

        Collective between `backward` and `step`, if layers are split.
        """
        if self._hidden is not None:
            self._hidden.end()
        if self._shares is not None:
            self._shares.drop_gradients()
        if self._tensor is not None:
            self._tensor.forget()
        self._optimizer.zero_grad(set_to_none=True)  # and what `ShardedPasses` drops with it
        self._weighted = False

    def synchronize(self) -> None:
        """Raises UsageError: no rank has all gradients."""
        raise UsageError(NOT_READABLE_SHARDED if self._hidden is None else NOT_READABLE_SPLIT)

    # ------------------------------------------------------------------ implementation

    def _sum(self, sums: Mapping[str, float]) -> StepSums:
        """Completes the sums of the gradients, and sums the numbers in `sums` over the ranks. Collective.

        If a backward has failed on any rank, a step that `accepts` does not drop raises an error.
        """
        if self._passes is not None and any(p._backward_hooks for p in self._parameters):
            raise UsageError(
                "a parameter has a hook of its gradient (Tensor.register_hook), which FSDP2 does not call: change "
                ".grad between backward and step() instead, on all ranks"
            )
        if self._hidden is not None:
            self._hidden.give_back(summed=self._tensor is not None and self._tensor.has_begun)
        weighted = not self._is_plain()
        names = sorted(sums)
        started = time.perf_counter()
        failed = self._passes is not None and self._passes.backward_has_failed
        if self._passes is not None:
            with self._passes.weighted() if weighted else nullcontext():
                self._passes.sum_whole_gradients()
        if self._tensor is not None:
            self._tensor.complete()
        if self._shares is not None:
            self._shares.sum()
        elif self._replicas is not None:
            self._sum_over(self._replicas)
        missing = float(sum(p.grad is None for p in self._parameters)) if self._passes is not None else 0.0
        numbers = [
            self._squares(),
            float(failed),
            missing,
            missing**2,
            *(float(sums[name]) for name in names),
        ]
        found = torch.tensor(numbers, dtype=torch.float64)
        if self._comm.num_ranks > 1:
            self._comm.all_reduce(found)
        ended = time.perf_counter()
        square, num_failed, missing, missing_square, *numbers = found.tolist()
        not_applicable = ""
        if num_failed:
            not_applicable = (
                "a backward has failed and left incomplete gradients, which step() has dropped: call zero_grad() "
                "after such an error, and begin the step again"
            )
        elif missing_square * self._comm.num_ranks != missing**2:
            not_applicable = (
                "some parameters have a gradient on some ranks and none on others, and ranks would update their parts "
                "of them differently: set .grad to None on all ranks alike"
            )
        return StepSums(
            norm_square=square,
            totals=dict(zip(names, numbers, strict=True)),
            scale=self._scale.value if weighted else self._plain_scale,
            not_applicable=not_applicable,
            update_from=ended,
            sync_s=ended - started,
            exposed_sync_s=ended - started,
        )

    def _end_step(self, summed: StepSums, *, applied: bool, accepted: bool, rescale: float) -> None:
        self.zero_grad()
        if self._passes is not None:
            self._passes.end_step()

    def _release(self) -> bool:
        """Undoes what the updater has changed in optimizer and gradients; see `UpdaterBase._release`.

        Makes hidden gradients visible again. With `shard = "optimizer"`, the optimizer gets the model's parameters
        back, without state.
        """
        if self._hidden is not None and not self._closed:
            self._hidden.close()
        if self._shares is not None and not self._closed:
            self._shares.release()
        if self._tensor is not None:
            self._tensor.close()
        if self._passes is not None:
            self._passes.close()
        if self._end_sums is not None:
            self._end_sums()
        return True

    def _is_plain(self) -> bool:
        return not (self._weighted or self._in_pipeline)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _update(self, factor: float, summed: StepSums) -> bool:
        if self._shares is not None:
            gathered_s = self._shares.update(factor=factor)
            summed.sync_s += gathered_s
            summed.exposed_sync_s += gathered_s
            summed.update_from += gathered_s  # gathering the parameters is not part of the update
            return True
        if factor != 1.0:
            for gradient in self._gradients():
                local_part(gradient).mul_(factor)
        try:
            self._optimizer.step()
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            if not any(map(is_sharded_tensor, self._parameters)):
                raise
            raise UsageError(
                f"{type(self._optimizer).__name__}.step() failed for parameters of which each rank has a part: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Use AdamW, Adam or SGD, or "
                "leave parameters whole"
            ) from error
        return True

    def _squares(self) -> float:
        """Returns this rank's part of the sum of squares of the gradients.

        A gradient that several ranks hold is counted once: by the first of these ranks, or by each of them for its
        share.
        """
        if self._shares is not None:
            return self._shares.square()
        return square_of_all(local_part(gradient) for gradient in self._gradients() if self._counts(gradient))

    def _counts(self, gradient: torch.Tensor) -> bool:
        if self._tensor is not None:
            return self._tensor.counts(gradient)
        return is_first_replica(gradient) if self._replicas is None else self._replicas.rank == 0

    def _sum_over(self, replicas: Collective) -> None:
        """Sums the gradients over `replicas`, the ranks that hold the same stage. Collective over `replicas`.

        A gradient that no replica has remains None.
        """
        if replicas.num_ranks == 1:
            return
        used = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.int32)
        replicas.all_reduce(used)
        summed = [p for p, count in zip(self._parameters, used.tolist(), strict=True) if count]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in dict.fromkeys(p.dtype for p in summed):
            gradients = [p.grad for p in summed if p.dtype == dtype and p.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            replicas.all_reduce(flat)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
