"""The layouts of a model over the ranks that are measured. Pure.

A new layout is one entry of `LAYOUTS`: every figure that it names measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.distributed import ParallelPlan, TensorPlan
from hpctrain.reduce import DEFAULT_BUCKET_BYTES

BITS = {"fp32": 32, "fp16": 16, "int8": 8}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of a model's parameters. split: of them, those of which each rank of a tensor group holds a part.
    gathered_once: of them, the last block and what is in no block, which FSDP2 gathers in forward only.

    Of a pipeline also, largest_stage: parameters of the rank that has most; border: values that a rank gives to the
    next stage in a step, and gets back as gradients.
    """

    parameters: int
    split: int = 0
    gathered_once: int = 0
    largest_stage: int = 0
    border: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to split a model over the ranks, with formulas for its memory and traffic.

    options: arguments of its `ParallelPlan`. held: function of the number of ranks that share a copy of a tensor rank's
    part of a stage; returns the bytes per parameter that a rank holds, with AdamW in float32. buffer_bytes: what a rank
    holds in addition, at most all gradients. sent: function of the number of nodes and of the bits of a gradient on the
    wire; returns the bytes that leave a node per step / bytes of the parameters in float32, with one data-parallel rank
    on each node (with several for a layout on `nodes`); for a pipeline, of the number of nodes with the same stage.
    peer: name of the peer with which its time is compared; empty if there is none. wires, timed_wires: wire formats of
    its gradients in the figures of traffic and time. nodes: whether it needs several nodes, each of which holds a copy
    of the model. least_ranks: smallest number of ranks on which it differs from other layouts. figures: numbers of the
    figures that measure it.
    """

    name: str
    what: str
    options: Mapping[str, Any] = field(default_factory=dict)
    held: Callable[[int], float]
    buffer_bytes: int = 0
    sent: Callable[[int, int], float] = lambda num_nodes, bits: 0.0
    peer: str = ""
    wires: tuple[str, ...] = ("fp32",)
    timed_wires: tuple[str, ...] = ("fp32",)
    nodes: bool = False
    least_ranks: int = 1
    figures: str = "12346"

    @property
    def tensor(self) -> int:
        return int(self.options.get("tensor", 1))

    @property
    def pipeline(self) -> int:
        return int(self.options.get("pipeline", 1))

    @property
    def is_apart(self) -> bool:
        """Whether it is trained in processes of its own: PyTorch caches by mesh what a pipeline of tensor groups
        computes with, and a layout before it has left an equal mesh."""
        return self.tensor > 1 and self.pipeline > 1

    @property
    def ranks_per_node(self) -> int:
        """The fewest ranks of each node, if there are several nodes."""
        return max(self.tensor, 2 if self.nodes else 1)

    def plan(self, tensor_plan: TensorPlan) -> ParallelPlan:
        """Returns the plan. tensor_plan: that of the model, used by layouts with tensor groups."""
        return ParallelPlan(**self.options, **({"tensor_plan": tensor_plan} if self.tensor > 1 else {}))

    def fits(self, *, num_ranks: int, num_nodes: int) -> bool:
        """Returns True if so many ranks, equally many on each node, can hold a model in this layout."""
        return (
            num_ranks >= self.least_ranks
            and num_ranks % num_nodes == 0
            and num_ranks // num_nodes % self.tensor == 0
            and num_ranks % (self.tensor * self.pipeline) == 0
            and (num_nodes > 1 or not self.nodes)
        )

    def held_bytes(self, counts: Counts, *, sharing: int) -> float:
        """Returns the bytes that a rank holds of a model, without activations. sharing: ranks that share a copy."""
        of_tensor_rank = counts.parameters - counts.split * (1 - 1 / self.tensor)
        buffers = min(self.buffer_bytes, 4 * counts.parameters)
        return self.held(sharing // (self.tensor * self.pipeline)) * of_tensor_rank / self.pipeline + buffers

    def sent_bytes(self, counts: Counts, *, num_nodes: int, bits: int) -> float:
        """Returns the bytes that leave a node in a step. Each rank of a tensor group sums what the group does not
        split. Of a pipeline, with one rank on each node, it is the node that has the largest stage: its gradients are
        summed with those of the other pipelines, and it gives activations to the next stage or gradients to the one
        before; a stage between two others does both.
        """
        if self.pipeline > 1:
            borders = min(2, self.pipeline - 1)
            return 4 * (
                self.sent(num_nodes // self.pipeline, bits) * counts.largest_stage + borders * counts.border
            )
        of_node = counts.split + self.tensor * (counts.parameters - counts.split)
        sent = self.sent(num_nodes, bits)
        if self.sent is _gathered_twice:
            sent -= _gathered(num_nodes) * counts.gathered_once / counts.parameters
        return 4 * sent * of_node


def arrangements(layouts: Iterable[Layout], *, num_ranks: int) -> dict[int, list[str]]:
    """Returns, by number of nodes, which layouts are measured with so many ranks: each on two nodes if it fits there,
    otherwise on one."""
    found: dict[int, list[str]] = {2: [], 1: []}
    for layout in layouts:
        for num_nodes, names in found.items():
            if layout.fits(num_ranks=num_ranks, num_nodes=num_nodes):
                names.append(layout.name)
                break
    return {num_nodes: names for num_nodes, names in found.items() if names}


def of_figure(figure: str) -> list[Layout]:
    """Returns the layouts that a figure measures."""
    return [layout for layout in LAYOUTS.values() if figure in layout.figures]


def _all_reduced(num: int, bits: int) -> float:
    return 2 * (num - 1) / num * bits / 32


def _gathered(num: int) -> float:
    """Returns the bytes sent to gather a byte of float32 parameters; reducing gradients to owners sends as many."""
    return (num - 1) / num


def _gathered_once(num: int, bits: int) -> float:
    """Gradients are reduced to their owners, parameters are gathered after the update."""
    return _gathered(num) * (1 + bits / 32)


def _gathered_twice(num: int, bits: int) -> float:
    """Parameters are gathered for forward and for backward, gradients are reduced to their owners."""
    return _gathered(num) * (2 + bits / 32)


ALL_WIRES = ("fp32", "fp16", "int8")
# What `shard = "gradients"` holds whole while backward runs.
_BUCKETS = 2
# Of a pipeline's share of the batch; a multiple of the stages, as interleaved schedules need it.
_MICRO_BATCHES = 4


def _of_both(pipeline: int, **options: Any) -> Layout:
    """Returns a pipeline whose stages are split or sharded too."""
    tensor = options.get("tensor", 1)
    sharded = "shard" in options
    name = "-".join(
        [f"pipeline-{pipeline}", *([f"tensor-{tensor}"] if tensor > 1 else []), *(["parameters"] if sharded else [])]
    )  # fmt: skip
    return Layout(
        name=name,
        what=f"pipeline of {pipeline}, 1f1b{f', tensor groups of {tensor}' if tensor > 1 else ''}"
        f"{', parameters sharded' if sharded else ''}",
        options={"pipeline": pipeline, "micro_batches": _MICRO_BATCHES, **options},
        held=lambda n: 16 / n if sharded else 16,
        least_ranks=pipeline * tensor * (2 if sharded else 1), figures="1",
    )  # fmt: skip


def _pipeline(pipeline: int, schedule: str, *, figures: str, peer: str = "") -> Layout:
    usual = schedule == "1f1b"
    return Layout(
        name=f"pipeline-{pipeline}" if usual else f"pipeline-{pipeline}-{schedule}",
        what=f"pipeline of {pipeline}, {schedule}",
        options={"pipeline": pipeline, "schedule": schedule, "micro_batches": max(_MICRO_BATCHES, pipeline)},
        held=lambda n: 16, sent=_all_reduced, peer=peer, least_ranks=pipeline, figures=figures,
    )  # fmt: skip


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="none", what="whole copies", held=lambda n: 16, sent=_all_reduced, peer="ddp", wires=ALL_WIRES,
               timed_wires=("fp32", "fp16")),
        Layout(name="optimizer", what="optimizer sharded (ZeRO-1)", options={"shard": "optimizer"},
               held=lambda n: 8 + 12 / n, sent=_gathered_once, peer="zero", wires=ALL_WIRES),
        Layout(name="gradients", what="optimizer and gradients sharded (ZeRO-2)", options={"shard": "gradients"},
               held=lambda n: 4 + 12 / n, buffer_bytes=_BUCKETS * DEFAULT_BUCKET_BYTES, sent=_gathered_once,
               peer="zero", wires=ALL_WIRES),
        Layout(name="parameters", what="parameters sharded (ZeRO-3)", options={"shard": "parameters"},
               held=lambda n: 16 / n, sent=_gathered_twice, peer="fsdp2", wires=ALL_WIRES),
        Layout(name="parameters-node", what="parameters sharded within a node (HSDP)",
               options={"shard": "parameters", "shard_within": "node"}, held=lambda n: 16 / n, sent=_all_reduced,
               peer="fsdp2", nodes=True, least_ranks=2, wires=ALL_WIRES),
        Layout(name="tensor-2", what="tensor groups of 2", options={"tensor": 2}, held=lambda n: 16, sent=_all_reduced,
               peer="tensor", least_ranks=2),
        Layout(name="tensor-4", what="tensor groups of 4", options={"tensor": 4}, held=lambda n: 16, sent=_all_reduced,
               least_ranks=4, figures="126"),
        Layout(name="tensor-8", what="tensor groups of 8", options={"tensor": 8}, held=lambda n: 16, least_ranks=8,
               figures="1"),
        Layout(name="tensor-2-sequence", what="tensor groups of 2, sequences in parts",
               options={"tensor": 2, "sequence": True}, held=lambda n: 16, least_ranks=2, figures="1"),
        Layout(name="tensor-2-parameters", what="tensor groups of 2, parameters sharded",
               options={"tensor": 2, "shard": "parameters"}, held=lambda n: 16 / n, sent=_gathered_twice,
               least_ranks=4, figures="1236"),
        Layout(name="tensor-4-parameters", what="tensor groups of 4, parameters sharded",
               options={"tensor": 4, "shard": "parameters"}, held=lambda n: 16 / n, least_ranks=8, figures="1"),
        Layout(name="tensor-2-parameters-node", what="tensor groups of 2, parameters sharded within a node",
               options={"tensor": 2, "shard": "parameters", "shard_within": "node"}, held=lambda n: 16 / n, nodes=True,
               least_ranks=8, figures="1"),
        _pipeline(2, "1f1b", figures="12346", peer="pipeline"),
        _pipeline(4, "1f1b", figures="126"),
        _pipeline(8, "1f1b", figures="1"),
        _pipeline(2, "gpipe", figures="1"),
        _pipeline(2, "interleaved", figures="16"),
        _pipeline(2, "zero-bubble", figures="1"),
        _pipeline(4, "gpipe", figures="1"),
        _pipeline(4, "interleaved", figures="1"),
        _pipeline(4, "zero-bubble", figures="1"),
        _of_both(2, tensor=2),
        _of_both(2, tensor=4),
        _of_both(4, tensor=2),
        _of_both(2, shard="parameters"),
        _of_both(4, shard="parameters"),
        _of_both(2, tensor=2, shard="parameters"),
        Layout(name="pipeline-2-optimizer", what="pipeline of 2, 1f1b, optimizer of a stage sharded",
               options={"pipeline": 2, "micro_batches": _MICRO_BATCHES, "shard": "optimizer"},
               held=lambda n: 8 + 12 / n, least_ranks=4, figures="126"),
    )
}  # fmt: skip
# Those whose result is the same bits as that of whole copies, in float32 on the same ranks.
SAME_BITS = ("optimizer", "gradients")
