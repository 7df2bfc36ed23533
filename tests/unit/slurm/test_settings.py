"""Section [slurm] of the recipe: what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import RecipeError
from hpctrain.run import parse_recipe
from hpctrain.run.recipe.slurm_schema import seconds_of
from tests.unit.run.test_recipe import minimal


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"node": 2}, "slurm.node: there is no such key; did you mean nodes?"),
        ({"nodes": 0}, "slurm.nodes: found 0: input should be greater than or equal to 1"),
        ({"time": "two hours"}, "time = 'two hours' is not a time limit: write minutes, HH:MM:SS"),
        ({"time": "10", "time_min": "20"}, "time_min = '20' is longer than time = '10'"),
        (
            {"time": "2", "stop_before_s": 120},
            "stop_before_s = 120 leaves no time to train in a job of 120 s",
        ),
        ({"time": "1:00:00", "time_min": "1"}, "leaves no time to train in a job of 60 s"),
        ({"partition": "gpu\n#SBATCH --exclusive"}, "slurm.partition: found"),
        ({"account": "two words"}, "slurm.account: found 'two words': must be one word"),
        ({"constraint": "a\x00b"}, "slurm.constraint: found 'a\\x00b': must be one line"),
        ({"setup": ["source a", "b\nc"]}, "slurm.setup.1: found"),
        ({"environment": {"A B": "1"}}, "'A B' is not the name of an environment variable"),
        ({"environment": {"A": 1}}, "slurm.environment.A: found 1: input should be a valid string"),
        ({"options": ["--nodes=3"]}, "options: --nodes is set by the key nodes"),
        ({"options": ["--requeue"]}, "options: --requeue is set by the key on_stop"),
        ({"options": ["exclusive"]}, "options: write 'exclusive' as --NAME or --NAME=VALUE"),
        ({"options": ["--mem 4G"]}, "options: write '--mem 4G' as --NAME or --NAME=VALUE"),
        ({"array": "all"}, "slurm.array: found"),
        ({"sweep": {"lr": [1]}}, "'lr' is not a key of the recipe: write SECTION.KEY"),
        ({"sweep": {"run.directory": ["a"]}}, "run.directory cannot differ between the tasks of an array"),
        ({"sweep": {"slurm.nodes": [1]}}, "slurm.nodes cannot differ between the tasks of an array"),
        ({"sweep": {"optimizer.lr": []}}, "sweep: optimizer.lr has no values"),
        (
            {"sweep": {"optimizer.lr": [1.0, 2.0], "run.seed": [1, 2]}, "array": "0,2-4%2"},
            "array = '0,2-4%2', but sweep has 4 combinations: give task numbers from 0 to 3",
        ),
        ({"container": "a.sif", "python": "env"}, "the ranks use the container's Python"),
        ({"container_mounts": ["/data"]}, "container_mounts needs container"),
        (
            {"container": "a", "container_runtime": "pyxis", "launcher": "mpirun"},
            "launcher = 'mpirun' cannot start ranks in this container: set 'srun'",
        ),
        (
            {"container": "a", "launcher": "supervise"},
            "launcher = 'supervise' cannot start ranks in this container",
        ),
        ({"launcher": "supervise", "shrinkable": True}, "with launcher = 'supervise' a job keeps its nodes"),
        ({"launcher": "supervise", "spares": 1}, "spares must be fewer than nodes"),
        ({"spares": 1, "nodes": 2}, "only with launcher = 'supervise'"),
        ({"elastic": "2:4", "nodes": 4}, "elastic needs launcher = 'supervise'"),
        ({"elastic": "2:4", "nodes": 3, "launcher": "supervise"}, "MAX at most nodes x tasks_per_node = 3"),
        ({"elastic": "4:2", "nodes": 4, "launcher": "supervise"}, "MIN must be at most MAX"),
        (
            {"elastic": "1:2", "nodes": 4, "launcher": "supervise", "spares": 1},
            "nodes beyond those that MAX ranks need are spares",
        ),
    ],
)
def test_a_faulty_section_is_refused_in_plain_words(slurm: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(minimal(slurm=slurm))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("02:00:05", 7205), ("1-12", 129600), ("1-12:30", 131400),
        ("2-00:00:01", 172801),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert seconds_of(text, key="time") == seconds
