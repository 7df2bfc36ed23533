"""Makes the files with which benchmark harnesses run `hpctrain bench scaling` on a cluster.

Both harnesses start one job per number of ranks. Within a job, hpctrain starts the ranks and repeats the measurement.
The functions only read the templates and return text.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from xml.sax.saxutils import escape

import jinja2

from hpctrain.bench.scaling.sweep import SweepSettings
from hpctrain.errors import UsageError


class Harness(str, Enum):
    """An external benchmark harness. hpctrain can write a scaling sweep as a file that this harness runs.

    REFRAME: the file is Python and contains one test (https://reframe-hpc.readthedocs.io). JUBE: the file is XML
    (https://apps.fz-juelich.de/jsc/jube/docu).
    """

    REFRAME = "reframe"
    JUBE = "jube"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedSweep:
    """The sweep that the harness runs.

    Attributes:
        name: The name of the recipe's run.
        recipe: The absolute path of the recipe.
        folder: The absolute path of the folder to which paths in the recipe are relative.
        program: The `hpctrain` program to call.
    """

    name: str
    recipe: Path
    folder: Path
    program: str
    settings: SweepSettings

    def options(self) -> list[str]:
        """Returns the options of `hpctrain bench scaling` that are the same for all sizes."""
        settings = self.settings
        words = ["--steps", str(settings.steps), "--warmup-steps", str(settings.warmup_steps)]
        words += ["--repeats", str(settings.repeats), "--seed", str(settings.seed)]
        if settings.mode == "weak":
            words.append("--weak")
        for override in settings.overrides:
            words += ["--set", override]
        return words


def harness_file(sweep: ExportedSweep, harness: Harness) -> str:
    """Returns the text of the file for `harness`. Raises UsageError for a path that the harness does not accept."""
    if harness is Harness.JUBE and "$" in f"{sweep.recipe}{sweep.folder}{sweep.program}":
        raise UsageError("JUBE replaces $ in paths: move the recipe to a folder whose path contains no $")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpctrain.bench.export", "templates"), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["repr"] = repr
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["xml"] = lambda value: escape(str(value))
    settings = sweep.settings
    name = "reframe.py.j2" if harness is Harness.REFRAME else "jube.xml.j2"
    return environment.get_template(name).render(
        name=sweep.name,
        recipe=str(sweep.recipe),
        folder=str(sweep.folder),
        program=sweep.program,
        ranks=list(settings.ranks),
        ranks_per_node=settings.ranks_per_node,
        mode=settings.mode,
        repeats=settings.repeats,
        options=sweep.options(),
    )
