"""The models that are trained and their batches, which follow from a seed; and a model in one of the layouts, on the
ranks of a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.parallel.layouts import Counts, Layout
from hpctrain import ParallelPlan, Position
from hpctrain.comm import all_gather_json
from hpctrain.data import Batch
from hpctrain.distributed import (
    TensorPlan,
    end_process_group,
    is_sharded_tensor,
    pipeline_of,
    repeated_blocks,
    replicated_over_tensor_ranks,
)
from hpctrain.reduce import AUTO, SplitModelUpdater
from hpctrain.run import Session
from hpctrain.run.compute.pipeline import put_in_stages
from hpctrain.tasks.characters import Characters
from hpctrain.tasks.digits import Digits
from hpctrain.train import PipelineRunner

Fields = Mapping[str, torch.Tensor]
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Language:
    """The task `characters`, with `layers` blocks, on random text."""

    window: int
    width: int
    layers: int
    heads: int = 4

    @property
    def block_output(self) -> int:
        """Values that a block gives to the next one, of one sample."""
        return self.window * self.width

    @property
    def task(self) -> Characters:
        return Characters(
            window=self.window, width=self.width, layers=self.layers, heads=self.heads, vocabulary=VOCABULARY
        )

    def fields(self, *, samples: int, seed: int) -> Fields:
        generator = torch.Generator().manual_seed(seed)
        return {"tokens": torch.randint(VOCABULARY, (samples, self.window + 1), generator=generator)}

    @property
    def tensor_plan(self) -> TensorPlan:
        return self.task.tensor_plan()


@dataclass(frozen=True, kw_only=True)
class Images:
    """The convolution net of the task `digits`, on random images of 8 x 8.

    Its two linear layers can be split over tensor groups. It has no repeated blocks of which stages could be made.
    """

    width: int

    @property
    def task(self) -> Digits:
        return Digits(width=self.width)

    def fields(self, *, samples: int, seed: int) -> Fields:
        generator = torch.Generator().manual_seed(seed)
        return {
            "image": 16 * torch.rand((samples, 1, 8, 8), generator=generator),
            "label": torch.randint(10, (samples,), generator=generator),
        }

    @property
    def tensor_plan(self) -> TensorPlan:
        return {"7": "column", "9": "row"}


Workload = Language | Images

WORKLOADS: dict[str, Workload] = {
    "language": Language(window=32, width=64, layers=8, heads=8),  # as many as ranks of a group or pipeline
    "saved": Language(window=32, width=64, layers=4),
    "convolution": Images(width=8),
    "tiny": Language(window=16, width=64, layers=4),
    "3M": Language(window=16, width=256, layers=4),
    "50M": Language(window=16, width=512, layers=16),  # 50.7 million parameters
    "timed": Language(window=64, width=256, layers=4),  # 3.3 million
    "sent": Language(window=16, width=512, layers=4),  # 12.9 million
}


def of_ranks(
    workload: Workload, ranks: Iterable[int], *, number: int, num_ranks: int, samples: int
) -> Fields:
    """Returns the samples that are those of `ranks` in step `number`, if each of `num_ranks` ranks has `samples`."""
    first = number * num_ranks
    parts = [workload.fields(samples=samples, seed=first + rank) for rank in ranks]
    return {name: torch.cat([fields[name] for fields in parts]) for name in parts[0]}


def part(fields: Fields, *, rank: int, num_ranks: int) -> Fields:
    """Returns a rank's samples of a batch: every `num_ranks`-th one."""
    return {name: values[rank::num_ranks] for name, values in fields.items()}


# ---------------------------------------------------------------------- in a layout

# Fixed, so that every launch reduces whole gradients in the same way; sharded parameters by the default.
ALGORITHM = "hierarchical"


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that may be sharded with all its elements. Collective if it is."""
    found: torch.Tensor = tensor.full_tensor() if is_sharded_tensor(tensor) else tensor  # type: ignore[attr-defined]
    return found.detach()


def _gathered_once(model: torch.nn.Module) -> int:
    """Returns the elements of the last block and of what is in no block."""
    *others, _ = repeated_blocks(model).values() or [model]
    return sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for block in others for p in block.parameters()
    )


class Training:
    """A workload's model in a layout. Making one, `step`, `save` and `load` are collective.

    model_seed: of its first parameters. batch: samples of all ranks in a step. counts: of the whole model.
    exposed_s: seconds of the last step in which this rank only waited for communication of its updater.
    """

    def __init__(
        self, session: Session, workload: Workload, layout: Layout, *, batch: int, wire: str = "fp32",
        dtype: torch.dtype = torch.float32, model_seed: int = 0,
    ) -> None:  # fmt: skip
        self._session, self._workload, self._batch = session, workload, batch
        self._task = workload.task
        plan = layout.plan(workload.tensor_plan)
        session.axes.arrange(tensor=plan.tensor, pipeline=plan.pipeline)
        torch.manual_seed(model_seed)
        self.model = self._task.build_model().to(dtype)
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if plan.pipeline > 1:
            self.optimizer = self._put_in_stages(plan)
        else:
            session.parallelize(self.model, plan)
            self.optimizer = make_optimizer(list(self.model.parameters()))
        self._micro_batches = plan.micro_batches
        of_rank = -(-batch // session.axes.data.size)
        self._rows = -(-of_rank // plan.micro_batches)
        self.counts = self._counted(num_parameters, in_stages=plan.pipeline > 1)
        self.exposed_s = 0.0
        algorithm = AUTO if plan.shard == "parameters" else ALGORITHM
        self._updater = session.distributed_optimizer(
            self.model, self.optimizer, algorithm=algorithm, wire=wire
        )
        self._stages = self._runner_of_stages(dtype) if plan.pipeline > 1 else None

    def _put_in_stages(self, plan: ParallelPlan) -> torch.optim.Optimizer:
        """Leaves this rank's stages in the model; returns their optimizer. Collective."""
        session, optimizer = self._session, make_optimizer(list(self.model.parameters()))
        if put_in_stages(
            self.model, optimizer, plan, task=self._task, world=session.world, topology=session.topology,
            device=session.device, timeout_s=session.world.limits.settings.timeout_s,
        ):  # fmt: skip
            session.on_close(end_process_group)
        return optimizer

    def _counted(self, num_parameters: int, *, in_stages: bool) -> Counts:
        """Returns the numbers of elements that this layout splits. num_parameters: of the whole model. Collective."""
        if not in_stages:
            split = [p.numel() for p in self.model.parameters() if not replicated_over_tensor_ranks(p)]
            return Counts(
                parameters=num_parameters, split=sum(split), gathered_once=_gathered_once(self.model)
            )
        assert isinstance(self._workload, Language)
        own = sum(parameter.numel() for parameter in self.model.parameters())
        return Counts(
            parameters=num_parameters,
            largest_stage=max(all_gather_json(self._session.world, own)),
            border=self._rows * self._micro_batches * self._workload.block_output,
        )

    def _runner_of_stages(self, dtype: torch.dtype) -> PipelineRunner:
        pipeline = pipeline_of(self.model)
        assert pipeline is not None
        assert isinstance(self._updater, SplitModelUpdater)
        return PipelineRunner(
            self._task, self.model, pipeline=pipeline, rows=self._rows, scaled=self._updater.scaled,
            device=self._session.device, dtype=dtype,
        )  # fmt: skip

    def backward(self, number: int) -> float:
        """Runs forward and backward of step `number`; returns this rank's part of the loss."""
        every = self._workload.fields(samples=self._batch, seed=number)
        data = self._session.axes.data
        return self.backward_of(part(every, rank=data.index, num_ranks=data.size))

    def backward_of(self, fields: Fields) -> float:
        """Runs forward and backward of this rank's samples, and returns its part of the loss.

        The ranks of one tensor group or pipeline have the same samples.
        """
        num_samples = len(next(iter(fields.values())))
        if self._stages is not None:
            batch = Batch(
                fields=dict(fields), epoch=0, start=0, num_samples=num_samples, global_samples=self._batch
            )
            return self._stages.forward_backward(batch, self._updater, micro_batches=self._micro_batches)
        weight = num_samples / self._batch
        loss = self._task.loss(self.model, fields)
        self._updater.backward(loss, weight=weight)
        return float(loss.detach()) * weight if self._session.axes.counts_samples else 0.0

    def update(self, loss: float = 0.0) -> float:
        """Updates the parameters; returns the sum of `loss` over the ranks."""
        outcome = self._updater.step(sums={"loss": loss})
        self.exposed_s = outcome.exposed_sync_s
        return outcome.sums["loss"]

    def step(self, number: int) -> float:
        """Makes step `number`, whose batch depends on nothing else; returns its loss over the whole batch."""
        return self.update(self.backward(number))

    def finish(self) -> None:
        """Waits for what continues after the last step: the parameters of a sharded optimizer are gathered."""
        self._updater.wait_for_parameters()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns the whole parameters by name, in a pipeline those of this rank's stages. Collective."""
        return {name: whole(parameter) for name, parameter in self.model.named_parameters()}

    def save(self, directory: Path, *, step: int) -> Path:
        return self._session.save_state(directory, self._updater, Position(step=step))

    def load(self, source: Path) -> int:
        """Returns the step of the checkpoint."""
        return self._session.load_state(source, self._updater).step

    def close(self) -> None:
        self._updater.close()
