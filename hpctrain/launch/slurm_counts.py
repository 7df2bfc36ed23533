"""Parses Slurm's short form of a count per node, as in SLURM_STEP_TASKS_PER_NODE."""

from __future__ import annotations

import re

from hpctrain.errors import LaunchError

_PART = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_counts(text: str, *, variable: str) -> list[int]:
    """Returns one count per node: `2(x3),1` is [2, 2, 2, 1]. `variable`: name of the environment variable.

    Raises LaunchError if the text is not in this form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise LaunchError(
                f"{variable}={text!r} is not a list of counts such as '2(x3),1': "
                "the variable is not one that Slurm set; unset it, or start the ranks again with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
