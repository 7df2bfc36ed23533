"""Plans of recipes: which ways they list, what these need, and what is said where something cannot be known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hpctrain.data import pack_arrays
from hpctrain.distributed import ParallelPlan
from hpctrain.errors import RecipeError
from hpctrain.run import memory_document, memory_lines, memory_table, parse_recipe, plan_memory
from hpctrain.run.memory.calculate import LayoutMemory
from hpctrain.run.memory.forward_backward import LiveBytes, counted_messages, leave_one_part, most_bytes
from hpctrain.run.memory.sizes import TensorMessages
from hpctrain.topology import ParallelMesh, Topology
from hpctrain.train.task.task import Fields
from tests.fsdp2 import needs_fsdp2
from tests.unit.run.memory import measured_task
from tests.unit.run.memory.measured_task import WIDTH, Block, Splittable, Task, batch_of, runner_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("memory") / "data"
    x = np.random.default_rng(0).normal(size=(100, WIDTH)).astype(np.float32)
    pack_arrays(where, {"x": x, "label": (x.sum(1) > 0).astype(np.int64)})
    return where


def planned(
    folder: Path, *, num_ranks: int = 2, memory: int | None = None, **sections: dict[str, Any]
) -> Any:
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": "run", "steps": 1, "device": "cpu"},
        "task": {"target": f"{measured_task.__name__}:Task"},
        "data": {"train": str(folder), "global_batch": 64},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return plan_memory(
        parse_recipe(document), recipe_path=Path("recipe.toml"), num_ranks=num_ranks, memory=memory
    )


def way_named(found: Any, name: str) -> Any:
    return next(way for way in found.ways if way.name == name)


def test_a_plan_has_all_ways_with_measured_activations(data: Path) -> None:
    needs_fsdp2()
    found = planned(data)
    assert found.notes == ()
    document = memory_document(found)
    shards = ("none", "optimizer", "gradients")
    assert [way["way"] for way in document["ways"]] == [
        *shards, *(f"{shard}, selective" for shard in shards), *(f"{shard}, blocks" for shard in shards),
        "parameters", "parameters, selective", "parameters, blocks",
    ]  # fmt: skip
    by_name = {way["way"]: way["bytes"] for way in document["ways"]}
    whole, saving = by_name["none"], by_name["none, blocks"]
    elements = document["parameters"]
    assert whole["parameters"] == 4 * elements
    assert whole["optimizer"] == pytest.approx(8 * elements, rel=1e-3)
    assert saving["activations"] < whole["activations"] / 2
    assert saving["activations"] < by_name["none, selective"]["activations"] < whole["activations"]
    runner = runner_of(Task())
    assert whole["activations"] == pytest.approx(most_bytes(runner, batch_of(32)), rel=0.05)
    parts = ("parameters", "gradients", "optimizer", "reduction", "buffers", "activations", "data")
    assert whole["total"] == sum(whole[part] for part in parts)
    # The loader holds what there is of an epoch, less than its bound, and a batch is in use.
    assert whole["data"] == (50 + 32) * (4 * WIDTH + 8)
    assert [way["way"] for way in document["ways"] if way["is_current"]] == ["none"]


def test_a_model_that_needs_values_is_built_on_the_cpu_and_a_note_says_so(data: Path) -> None:
    on_cpu = planned(data, task={"options": {"on_cpu": True}})
    assert on_cpu.model == planned(data).model
    assert len(on_cpu.notes) == 1
    assert "was built on the CPU" in on_cpu.notes[0]


def test_without_data_or_with_a_model_that_does_not_run_here_activations_are_left_out(
    data: Path, tmp_path: Path
) -> None:
    absent = planned(data, data={"train": str(tmp_path / "nowhere")}, memory=10**9)
    assert absent.run.measured.whole == {}
    assert "no training data can be read" in absent.notes[0]
    assert absent.chosen.way.name == "none"
    failing = planned(data, task={"options": {"fails": True}})
    assert failing.run.measured.whole == {}
    assert "KeyError: 'needs a GPU'" in failing.notes[0]
    assert memory_document(failing)["ways"][0]["bytes"]["activations"] is None


def test_ways_that_a_run_would_refuse_are_refused_with_its_reason(data: Path) -> None:
    needs_fsdp2()
    normalised = planned(data, task={"options": {"normalised": True}})
    refused = {way.name: way.refused for way in normalised.ways if way.refused}
    assert {name.partition(", ")[2] for name in refused} == {"selective", "blocks"}
    assert len(refused) == 8
    assert "running statistics" in refused["none, blocks"]
    assert set(normalised.run.measured.whole) == {"none"}
    # Each reason once, also in words.
    assert sum("running statistics" in line for line in memory_lines(normalised)) == 1
    pytest.importorskip("pytorch_optimizer")
    lamb = planned(data, optimizer={"name": "lamb"})
    assert "norm of whole layers" in way_named(lamb, "parameters").refused


def test_too_few_samples_are_refused_if_no_way_is_left(data: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot be split over run\.ranks = 100"):
        planned(data, num_ranks=100)
    split = planned(
        data,
        num_ranks=100,
        task={"target": f"{measured_task.__name__}:Splittable"},
        data={"global_batch": 60},
    )
    assert "every rank needs at least one sample" in way_named(split, "none").refused
    assert way_named(split, "none, tensor 2").refused == ""


def test_the_section_reduction_has_to_go_where_it_does_not_apply(data: Path) -> None:
    needs_fsdp2()

    def dropping(**section: Any) -> set[str]:
        found = planned(data, reduction=section, task={"target": f"{measured_task.__name__}:Splittable"})
        return {way.name for way in found.ways if way.drops_reduction and "," not in way.name}

    assert dropping(wire="int8") == {name for name in dropping(wire="int8") if "pipeline" in name}
    assert {"parameters"} < dropping(bucket_mb=1)
    assert {"optimizer", "gradients", "parameters"} < dropping(wire="top-k")
    assert not any(way.drops_reduction for way in planned(data).ways)


def test_on_gpus_batches_of_the_loader_do_not_count(data: Path) -> None:
    cpu, gpu = planned(data), planned(data, run={"device": "cuda"})
    assert (cpu.device, gpu.device) == ("cpu", "cuda")
    assert cpu.ways[0].needs(1).data > 0 == gpu.ways[0].needs(1).data
    lines = [found.run.measured.whole["none"] for found in (cpu, gpu)]
    assert lines[1].sample_bytes - lines[0].sample_bytes == 4 * WIDTH + 8


def test_ranks_per_node_come_from_the_section_slurm(data: Path) -> None:
    assert planned(data, num_ranks=4).topology.num_nodes == 1
    assert planned(data, num_ranks=4, slurm={"tasks_per_node": 2}).topology.num_nodes == 2


def test_the_lines_say_what_to_write(data: Path) -> None:
    needs_fsdp2()
    enough = memory_lines(planned(data, memory=10**10))
    assert enough == ["* as the recipe is now", "It fits as it is, without a section [parallel]."]
    found = planned(data)
    sharded = way_named(found, "parameters")
    few = sharded.needs(sharded.choices[-1]).total + 1000
    chosen = planned(data, memory=few, reduction={"bucket_mb": 1})
    lines = memory_lines(chosen)
    assert chosen.chosen.way.plan.shard == "parameters"
    assert any("Leave the section [reduction] out" in line for line in lines)
    assert '\n[parallel]\nshard = "parameters"\n' in "\n".join(lines)
    assert memory_lines(planned(data, memory=1000))[-1].startswith("Nothing fits into 1 KB")


def test_a_background_save_keeps_a_ranks_share_of_the_state(data: Path) -> None:
    found = planned(data, checkpoint={"mode": "async"})
    needs = found.ways[0].needs(1)
    assert needs.snapshot == pytest.approx(12 * found.model.num_elements / 2, rel=1e-3)


def test_split_layers_and_pipelines_are_planned_if_the_task_says_how(data: Path) -> None:
    found = planned(
        data, num_ranks=4, task={"target": f"{measured_task.__name__}:Splittable"}, data={"global_batch": 256}
    )
    assert found.notes == ()
    assert found.run.measured.split.ranks == 2
    whole, split = (way_named(found, name).needs(1) for name in ("none", "none, tensor 2"))
    # Of a block `up` and `down` are split, without the bias of `down` and the norm.
    in_blocks = 6 * (WIDTH * 4 * WIDTH * 2 + 4 * WIDTH)
    assert whole.parameters - split.parameters == 4 * in_blocks / 2
    assert split.optimizer == pytest.approx(2 * split.parameters, rel=1e-3)
    samples = 128
    # Measured with a part of each block: twice the samples, less of the hidden features for each.
    assert whole.activations < split.activations < 1.6 * whole.activations
    # One output of `down` in forward, one gradient of the input of `up` in backward, of each block.
    rest = 4 * found.model.num_elements - 4 * in_blocks
    assert split.sent.total == pytest.approx(
        split.parameters + rest + samples * 6 * 2 * 4 * WIDTH, rel=1e-3
    )  # two data-parallel ranks sum a part, two tensor ranks what is not split
    piped = way_named(found, "pipeline 2 1f1b")
    needs = piped.needs(piped.choices[0])
    assert needs.parameters == pytest.approx(whole.parameters / 2, rel=0.02)
    # 128 samples on each of two replicas, in 8 micro-batches; one boundary between two ranks.
    assert piped.choices[0] == 8
    summed = 2 * 1 / 2 * whole.parameters / 2
    assert needs.sent.total == pytest.approx(summed + 2 * 256 * 4 * WIDTH / 4, rel=1e-3)
    assert "cannot be split into 4 stages" in way_named(found, "pipeline 4 1f1b").refused


def test_a_pipeline_of_split_layers_is_planned_from_parts_of_each_layer(data: Path) -> None:
    parallel = {"pipeline": 2, "tensor": 2, "micro_batches": 4}
    found = planned(
        data,
        num_ranks=8,
        task={"target": f"{measured_task.__name__}:Splittable"},
        data={"global_batch": 256},
        parallel=parallel,
    )
    assert found.notes == ()
    own = way_named(found, "pipeline 2 1f1b, tensor 2")
    assert own.is_current
    assert own.choices[0] == 4
    needs, alone = own.needs(4), way_named(found, "pipeline 2 1f1b").needs(4)
    in_blocks = 6 * (WIDTH * 4 * WIDTH * 2 + 4 * WIDTH)
    # Of a stage's half of the blocks a rank has a half; the last layer is on some ranks only.
    assert alone.parameters - needs.parameters == pytest.approx(4 * in_blocks / 2 / 2, rel=0.01)
    whole, part = (found.run.measured.layers_of(plan) for plan in (ParallelPlan(), own.plan))
    # Of a block's 10 values for each input, of the norm, of `up`, of its activation and of the block, 4 + 4 are halved.
    assert part.kept[0].at(64) == pytest.approx(6 / 10 * whole.kept[0].at(64), rel=0.02)
    # A first stage of three blocks, with twice 32 samples in flight.
    assert needs.activations > 2 * 3 * part.kept[0].at(32)
    needs_fsdp2()
    both = way_named(found, "pipeline 2 1f1b, parameters, tensor 2").needs(4)
    assert both.gathered == needs.parameters
    assert both.optimizer == pytest.approx(needs.optimizer / 2, rel=0.02)


class Sequences(Task):
    """Tokens, whose sequence is split between the layers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(40, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 40))

    def tensor_plan(self) -> dict[str, str | tuple[str, int]]:
        return {
            "0": ("sequence", 16), "*.norm": "sequence", "*.up": "column", "*.down": "row", "5": "sequence-gathered",
        }  # fmt: skip

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        tokens = fields["tokens"].long()
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def test_with_sequences_only_inputs_of_split_layers_and_the_output_are_whole() -> None:
    model, plan = Sequences().build_model(), Sequences().tensor_plan()
    leave_one_part(model, plan, tensor=4, sequence=True)
    shapes: dict[str, tuple[Any, Any]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, args, output, name=name: shapes.update({name: (args[0].shape, output.shape)})
        )
    output = model(torch.zeros(2, 16, dtype=torch.int64))
    output.sum().backward()
    assert output.shape == (2, 16, 40)
    assert shapes["0"] == ((2, 4), (2, 4, WIDTH))
    assert shapes["1.norm"] == ((2, 4, WIDTH), (2, 4, WIDTH))
    assert shapes["1.up"] == ((2, 16, WIDTH), (2, 16, WIDTH))
    assert shapes["1.down"] == ((2, 16, WIDTH), (2, 4, WIDTH))
    whole = Sequences().build_model()
    with counted_messages(whole, plan, samples=2, sequence=True) as sums:
        whole(torch.zeros(2, 16, dtype=torch.int64))
    # Of each block the input of `up` is gathered and the output of `down` scattered, at the end logits are gathered.
    features, logits = 16 * WIDTH * 4, 16 * 40 * 4
    in_blocks = 4 * features
    assert sums() == TensorMessages(forward=in_blocks + logits / 2, in_blocks=in_blocks, backward=in_blocks)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tokens") / "data"
    pack_arrays(where, {"tokens": np.random.default_rng(0).integers(40, size=(64, 16)).astype(np.uint8)})
    return where


def test_a_recipe_with_sequences_has_a_row_of_its_own(tokens: Path) -> None:
    task = {"target": f"{__name__}:Sequences"}
    found = planned(tokens, num_ranks=4, task=task, parallel={"tensor": 2, "sequence": True}, memory=10**9)
    assert found.notes == ()
    plain, own = way_named(found, "none, tensor 2"), way_named(found, "none, tensor 2, sequence")
    assert own.is_current
    assert not plain.is_current
    # Of 32 samples the inputs of each block's norm, and less at the end, where logits are whole.
    saved = 4 * (32 * 16 * WIDTH * 4) / 2
    assert 0.5 * saved < plain.needs(1).activations - own.needs(1).activations < 1.2 * saved
    assert own.needs(1).held == plain.needs(1).held
    lines = memory_lines(found)
    assert lines[-3:] == [
        "Recommended, the first that fits: none. Leave the section [parallel] out.", "",
        "As the recipe is now, none, tensor 2, sequence, it fits too.",
    ]  # fmt: skip
    # The recommended lines keep it where it is what fits first.
    own_fits = replace(found, chosen=LayoutMemory(way=own, micro_batches=1, needs=own.needs(1)))
    assert memory_lines(own_fits)[-1] == "It fits as it is."
    more = replace(found, chosen=LayoutMemory(way=own, micro_batches=2, needs=own.needs(2)))
    assert memory_lines(more)[-1].splitlines() != []
    assert "sequence = true" in memory_lines(more)


@pytest.mark.parametrize(
    ("target", "parallel", "name", "reason"),
    [
        ("Task", {"tensor": 2}, "none, tensor 2", "does not say how its model is split"),
        ("Task", {"pipeline": 2, "micro_batches": 2}, "pipeline 2 1f1b", "pipeline_layers"),
        ("Splittable", {"tensor": 3}, "none, tensor 3", "does not divide"),
        ("Splittable", {"pipeline": 2, "micro_batches": 5}, "pipeline 2 1f1b", "use a multiple of 10"),
        ("Splittable", {"tensor": 2, "sequence": True}, "none, tensor 2, sequence", "does not name"),
        ("Task", {"shard": "parameters", "offload": True}, "parameters, offload", "compute on CPUs"),
    ],
)
def test_the_recipes_own_way_has_a_row_also_if_a_run_would_refuse_it(
    data: Path, target: str, parallel: dict[str, Any], name: str, reason: str
) -> None:
    if parallel.get("shard") == "parameters":
        needs_fsdp2()
    task = {"target": f"{__name__}:{target}"}
    found = planned(data, num_ranks=4, task=task, parallel=parallel, memory=10**9)
    own = way_named(found, name)
    assert [way for way in found.ways if way.is_current] == [own]
    assert reason in own.refused
    assert any(line.startswith(f"{name} *: refused: ") and reason in line for line in memory_lines(found))
    table = memory_table(found)
    column = list(table.columns[0].cells)
    assert column.count(f"{name} *") == 1
    assert list(table.columns[-1].cells)[column.index(f"{name} *")] == "refused, see below"
    assert found.chosen.way.name == "none"


def test_on_gpus_offloaded_parameters_are_the_last_resort(data: Path) -> None:
    needs_fsdp2()
    parallel = {"shard": "parameters", "offload": True}
    found = planned(data, run={"device": "cuda"}, parallel=parallel)
    own = way_named(found, "parameters, offload")
    assert own.is_current
    assert own.needs(1).held == 0 < own.needs(1).host
    assert found.ways[-1].plan.offload
    cpu = planned(data)
    assert not any(way.plan.offload for way in cpu.ways)


def test_many_ranks_are_refused_for_too_few_samples_before_any_is_placed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def placed(*_: Any, **__: Any) -> None:
        raise AssertionError("a mesh was planned")

    monkeypatch.setattr(ParallelMesh, "plan", placed)
    with pytest.raises(RecipeError, match=r"cannot be split over run\.ranks = 20000"):
        planned(data, num_ranks=20_000, task={"target": f"{measured_task.__name__}:Splittable"})


def test_each_mesh_of_many_ranks_is_planned_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[tuple[int, int]] = Counter()
    plan = ParallelMesh.plan

    def counted(topology: Topology, *, pipeline: int = 1, tensor: int = 1) -> ParallelMesh:
        found[pipeline, tensor] += 1
        return plan(topology, pipeline=pipeline, tensor=tensor)

    monkeypatch.setattr(ParallelMesh, "plan", counted)
    done = planned(
        data, num_ranks=1000, task={"target": f"{measured_task.__name__}:Splittable"},
        data={"global_batch": 4000, "train": "nowhere"}, memory=10**6,
    )  # fmt: skip
    memory_document(done)
    # Once to be judged, once to be calculated.
    assert found
    assert max(found.values()) <= 2


def test_a_stage_keeps_what_its_layers_keep_in_a_real_forward(data: Path) -> None:
    found = planned(data, task={"target": f"{measured_task.__name__}:Splittable"})
    layers = found.run.measured.layers["none"]
    assert len(layers.kept) == 6 + 1 + 1  # blocks, the last layer, the loss
    runner, batch = runner_of(Splittable()), batch_of(64)
    known = [*runner.model.parameters(), *batch.fields.values()]
    with LiveBytes(known) as live:
        loss = runner.loss(batch)
        kept = live.now
    del loss
    assert sum(line.at(64) for line in layers.kept) == pytest.approx(kept, rel=0.1)
    assert layers.output_bytes[0] == 4 * WIDTH
    assert found.run.measured.layers["blocks"].kept[0].at(64) < layers.kept[0].at(64) / 3
