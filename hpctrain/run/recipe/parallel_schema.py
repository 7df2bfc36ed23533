"""The schema of the recipe's section [parallel]."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from hpctrain.distributed import ParallelPlan, PipelineSchedule, Recomputation, ShardKind, TensorPlan, Within
from hpctrain.errors import UsageError
from hpctrain.reduce import AUTO, CODEC_WIRES, SHARDED_ALGORITHMS, encodes_every_value, listed_wires
from hpctrain.run.recipe.sections import RecipeSection


class ParallelSection(RecipeSection):
    """How the model is split over the ranks; see guides/parallelism.md."""

    shard: ShardKind = Field(
        "none",
        description="`none`: every rank holds the whole model and optimizer. `optimizer`: each rank holds a part "
        "of the optimizer state (ZeRO-1). `gradients`: also a part of the gradients (ZeRO-2); not "
        "with `pipeline`. `parameters`: also a part of the parameters (ZeRO-3), by FSDP2; then "
        "`[reduction]` has `algorithm` (`auto`, `direct`, `hierarchical`) and `wire` "
        f"({', '.join(f'`{name}`' for name in CODEC_WIRES)}) only.",
    )
    shard_within: Within = Field(
        "world",
        description="`world`: sharded over all ranks. `node`: sharded over the ranks of each node, with a replica "
        "on each node (HSDP): more memory, less traffic between nodes.",
    )
    activation_checkpointing: Recomputation = Field(
        "none",
        description="`blocks`: forward keeps only the inputs of each repeated block of the model, and backward "
        "computes the block again: less memory, a third more computation. `selective`: results of "
        "matrix products, convolutions and attention are kept as well, and only the rest is computed "
        "again; not with the schedule `zero-bubble`.",
    )
    tensor: int = Field(
        1, ge=1,
        description="Number of ranks of a node that together hold one layer and compute the same samples (tensor "
            "parallelism); across such groups training is data parallel. The task's `tensor_plan` says which layers "
            "are split. Then `[reduction]` does not apply.",
    )  # fmt: skip
    sequence: bool = Field(
        False,
        description="With `tensor`: between split layers (norms, dropout, residuals) each rank computes a part of the "
        "sequence only, and keeps the activations of that part (sequence parallelism). `tensor` must divide the length "
        "of the sequence, and the task's `tensor_plan` must name every layer.",
    )
    offload: bool = Field(
        False,
        description='With `shard = "parameters"` on GPUs: parameters, gradients and optimizer state are kept in host '
        "memory, where the optimizer steps; a block's parameters are on the GPU only while it is computed. Less "
        "GPU memory, but slower. Not yet tested on a GPU.",
    )
    pipeline: int = Field(
        1,
        ge=1,
        description="Ranks over which the stages of one copy of the model are spread; the others are data "
        'parallel, or share a stage by `tensor`, `shard = "parameters"` or `shard = "optimizer"`. The task needs the '
        "method `pipeline_layers`.",
    )
    schedule: PipelineSchedule = Field(
        "1f1b",
        description="Order of the stages' forward and backward, by torch.distributed.pipelining. `gpipe`: the "
        "forward of all micro-batches first. `1f1b`: forward and backward alternate, so that fewer "
        "activations are kept. `interleaved` and `zero-bubble`: two stages per rank, less waiting; "
        "`zero-bubble` also computes gradients of weights while a rank would wait.",
    )
    micro_batches: int = Field(
        1,
        ge=1,
        description="Number of micro-batches into which a rank's share of the batch is divided; they go through the "
        "pipeline one after another. More of them mean less waiting: 4 times `pipeline` is a good number.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ParallelSection:
        usual = ParallelPlan()
        given = [key for key in ("schedule", "micro_batches") if getattr(self, key) != getattr(usual, key)]
        if self.pipeline == 1 and given:
            raise ValueError(f"{' and '.join(given)} apply only to a pipeline: set pipeline to 2 or more")
        try:
            # The task gives the plan later.
            plan: TensorPlan = {"*": "column"} if self.tensor > 1 else {}
            ParallelPlan(**self.model_dump(), tensor_plan=plan)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self


def check_enough_samples(*, global_batch: int, ranks: int, ranks_of_a_sample: int) -> None:
    """Raises ValueError if the global batch has fewer samples than there are data-parallel ranks."""
    if global_batch * ranks_of_a_sample < ranks:
        raise ValueError(
            f"data.global_batch = {global_batch} cannot be split over run.ranks = {ranks}: every rank needs at least "
            "one sample"
        )


def check_parallel(
    parallel: ParallelSection,
    *,
    optimizer: str,
    algorithm: str,
    wire: str,
    changed: Sequence[str],
    ranks: int | None,
) -> None:
    """Raises ValueError if settings of other sections cannot be combined with the way `parallel` splits the model.

    Args:
        algorithm: The algorithm of the reduction.
        wire: The wire format of the reduction.
        changed: The keys of [reduction] that differ from their defaults.
        ranks: The number of ranks; None: not known yet.
    """
    for name, size in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        if ranks is not None and ranks % size:
            raise ValueError(
                f"parallel.{name} = {size} does not divide run.ranks = {ranks}: change one of them"
            )
    of_a_sample = parallel.tensor * parallel.pipeline
    if ranks is not None and ranks % of_a_sample:
        raise ValueError(
            f"parallel.pipeline = {parallel.pipeline} with parallel.tensor = {parallel.tensor} needs a multiple of "
            f"{of_a_sample} ranks, run.ranks is {ranks}: change one of them"
        )
    _check_sharding(parallel, algorithm=algorithm, wire=wire, changed=changed)
    if changed and parallel.tensor > 1:
        raise ValueError(
            f"reduction.{', reduction.'.join(changed)}: with parallel.tensor = {parallel.tensor} gradients are summed "
            "by torch.distributed, in their dtype; leave the section [reduction] out"
        )
    if changed and parallel.pipeline > 1:
        raise ValueError(
            f"reduction.{', reduction.'.join(changed)}: with parallel.pipeline = {parallel.pipeline} the gradients of "
            "a stage are summed after backward, in their dtype; leave the section [reduction] out"
        )
    if optimizer in ("lars", "lamb"):
        by_default = ParallelPlan()
        for key in ("shard", "tensor", "pipeline"):
            value = getattr(parallel, key)
            if value != getattr(by_default, key):
                raise ValueError(
                    f"optimizer.name = {optimizer!r} needs the norm of whole layers, but with parallel.{key} = "
                    f"{value!r} a rank has only parts of them: use adamw, adam or sgd"
                )


def _check_sharding(parallel: ParallelSection, *, algorithm: str, wire: str, changed: Sequence[str]) -> None:
    shard = parallel.shard
    if shard != "parameters" and parallel.shard_within != "world":
        raise ValueError("parallel.shard_within needs parallel.shard = 'parameters'")
    if shard == "parameters":
        others = [key for key in changed if key not in ("algorithm", "wire")]
        _check_sharded_reduction(algorithm=algorithm, wire=wire, others=others, within=parallel.shard_within)
    if shard in ("optimizer", "gradients") and wire != AUTO and not encodes_every_value(wire):
        raise ValueError(
            f"reduction.wire = {wire!r} does not send each gradient to its owner, which parallel.shard = {shard!r} "
            f"needs: use {listed_wires(CODEC_WIRES)}"
        )


def _check_sharded_reduction(*, algorithm: str, wire: str, others: Sequence[str], within: Within) -> None:
    """Raises ValueError if [reduction] has settings that FSDP2, which reduces sharded gradients, would ignore.

    others: the keys that are set besides `algorithm` and `wire`.
    """
    for key, value, known, is_known in (
        ("algorithm", algorithm, SHARDED_ALGORITHMS, algorithm in SHARDED_ALGORITHMS),
        ("wire", wire, CODEC_WIRES, encodes_every_value(wire)),
    ):
        if not is_known:
            raise ValueError(
                f"reduction.{key} = {value!r}: with parallel.shard = 'parameters' FSDP2 reduces the gradients; choose "
                f"one of {', '.join(known)}"
            )
    if others:
        raise ValueError(
            f"reduction.{', reduction.'.join(others)}: with parallel.shard = 'parameters' FSDP2 reduces each block's "
            "gradients at once, and nothing is measured; leave all keys but algorithm and wire out"
        )
    if within == "node" and algorithm == "direct":
        raise ValueError(
            "reduction.algorithm = 'direct' cannot be combined with parallel.shard_within = 'node', which sums within "
            "each node first: choose hierarchical or auto, or parallel.shard_within = 'world'"
        )
