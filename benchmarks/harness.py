"""Runs a suite: measures its parts one after another, and writes records, results file and page.

A suite is its parts (what is measured, on which ranks), its records (figures and their bars) and the tables of its
page: `SUITE` in `benchmarks.NAME.suite`. Everything else is here: the command `python -m benchmarks.NAME` with its
options, places, failures, how ranks were started, the files.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks import headlines, results_file, results_page
from benchmarks.places import OnCluster, OneNode, RanksFailed
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY, Start
from tests.cluster import Cluster, ClusterError, ClusterPlan, why_not
from tests.cluster.cluster import CLUSTERS

BUILD = REPOSITORY / "build"
Say = Callable[[str], None]
Refresh = Callable[[Path, Mapping[str, Any]], None]
_Entered = TypeVar("_Entered")


class NotHere(RuntimeError):
    """A part, or some of it, could not be measured here, which is no failure of its figure: that keeps its older
    records unless the part has yielded new ones."""


@dataclass(kw_only=True)
class Bench:
    """What the parts of a suite are measured with. A context manager, which takes the cluster down and removes files.

    about: of the run, for the results file; parts may add to it. scale: sizes of the measurements. options: of the
    command line. starts: how the part's ranks were started; started: the same of the parts before, as in `Run`. failed:
    what of the part could not be measured. nodes: the cluster, if it is up.
    """

    say: Say
    about: dict[str, Any] = field(default_factory=lambda: {"versions": {}})
    scale: Any = None
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    starts: list[Start] = field(default_factory=list)
    started: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    nodes: Cluster | None = None
    _stack: ExitStack = field(default_factory=ExitStack, init=False)
    _made: dict[str, Any] = field(default_factory=dict, init=False)

    def one_node(self, module: str, **more: Any) -> OneNode:
        """Returns ranks on this machine; see `OneNode`. module: of their cases."""
        return OneNode(module, starts=self.starts, **more)

    def on_cluster(self, module: str, *, rate: str | None = None, **more: Any) -> OnCluster:
        """Returns ranks on the cluster; see `OnCluster`. rate: of the links, None for no change."""
        cluster = self.cluster()
        if rate is not None:
            cluster.set_rate(rate)
        return OnCluster(module, cluster, starts=self.starts, **more)

    def cluster(self, *, cores_per_node: int = 4, shared: Sequence[Path] = ()) -> Cluster:
        """Returns four nodes, which are brought up by the first call; the arguments are of that one.

        Raises NotHere where there can be none, and RanksFailed if they cannot be brought up where there can.
        """
        if self.nodes is None:
            if (reason := why_not()) is not None:
                raise NotHere(f"no cluster: {reason}")
            plan = ClusterPlan(
                directory=CLUSTERS / f"bench-{os.getpid()}", num_nodes=4, cores_per_node=cores_per_node
            )
            try:
                self.nodes = self.enter(Cluster.up(plan, shared=shared))
            except (ClusterError, OSError, subprocess.SubprocessError) as error:
                raise RanksFailed(f"no cluster: it could not be brought up: {error}") from error
            self.say("the cluster is up")
        return self.nodes

    def cluster_down(self) -> None:
        if self.nodes is not None:
            self.nodes.down()
            self.nodes = None

    def folder(self, name: str, *, within: Path = BUILD) -> Path:
        """Returns a new folder in `within`, which is removed at the end."""
        within.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=within, prefix=f"bench-{name}-", ignore_cleanup_errors=True)
        return Path(self.enter(made))

    def keep_starts(self, figure: str, title: str) -> None:
        """Moves `starts` to `started`, as those of a part of a figure."""
        if self.starts:
            self.started.setdefault(figure, {})[title] = [start.as_json() for start in self.starts]
            self.starts.clear()

    def enter(self, context: AbstractContextManager[_Entered]) -> _Entered:
        """Returns what the context yields; it is left at the end."""
        return self._stack.enter_context(context)

    def once(self, name: str, make: Callable[[], _Entered]) -> _Entered:
        """Returns what `make` returned at the first call with this name."""
        if name not in self._made:
            self._made[name] = make()
        made: _Entered = self._made[name]
        return made

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Adds `what` to `failed` if ranks fail in the `with` block, so that the rest of the part is still measured."""
        try:
            yield
        except RanksFailed as error:
            self.failed.append(what)
            self.say(f"{what}: failed\n{error}")
        else:
            self.say(what)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


@dataclass(frozen=True, kw_only=True)
class Part:
    """A measurement. figures: names of the figures of its records, as in `--only`. title: what is measured, in the
    results file. measure: returns the records, or yields them as soon as it has them."""

    figures: tuple[str, ...]
    title: str
    measure: Callable[[Bench], Iterable[Record]]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark with a command, a results file and a page.

    name: of all three. about: what it measures, in a sentence. full, quick: sizes of the measurements, as its parts
    expect them. tables: returns, from the content of the results file, the tables of the page besides those of the
    figures, by marker. options: adds options to the command line. packages: Python packages whose versions the results
    file has in addition.
    """

    name: str
    about: str | None
    parts: Sequence[Part]
    full: Any = None
    quick: Any = None
    tables: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda content: {}
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    packages: Sequence[str] = ()

    @property
    def figures(self) -> list[str]:
        return list(dict.fromkeys(figure for part in self.parts for figure in part.figures))

    def refresh(self, page: Path, content: Mapping[str, Any]) -> None:
        """Writes all tables into the page. content: of the results file."""
        results_page.refresh(page, content, more=self.tables(content))


def main(suite: Suite, words: Sequence[str] | None = None) -> int:
    """Runs the suite's command. Returns the exit code: 1 if something could not be measured."""
    leave_on_sigterm()

    def with_quick(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--quick", action="store_true", help="few rounds and small sizes, to check that it runs"
        )
        suite.options(parser)

    options = parse(
        words, benchmark=suite.name, description=suite.about, names=suite.figures, options=with_quick,
        output=f"`make bench-{suite.name}` passes benchmarks/results/{suite.name}.json; only then the tables of the "
        "docs page are written",
    )  # fmt: skip
    console = open_console()
    about = about_this_run(REPOSITORY, benchmark=suite.name)
    about["versions"] |= {name: version(name) for name in suite.packages}
    output: Path | None = options.output
    written: dict[str, Any] = {"benchmark": suite.name, "about": about, "output": output}
    written["refresh"] = suite.refresh
    scale = suite.quick if options.quick else suite.full
    with Bench(say=saying(console), about=about, scale=scale, options=options) as bench:

        def keep_so_far(run: Run) -> None:
            if output is not None:
                keep(run, **written)

        parts = [part for part in suite.parts if {*part.figures} & {*options.only}]
        run, complete = measure(suite.name, parts, bench=bench, after_part=keep_so_far)
    return finish(console, run, **written) or int(not complete)


def measure(
    suite: str, parts: Sequence[Part], *, bench: Bench, after_part: Callable[[Run], None] = lambda run: None
) -> tuple[Run, bool]:
    """Measures the parts one after another, and calls `after_part` with the run so far after each.

    If a part fails, or some of it, the others are still measured, and the run names what failed. Returns the run, and
    False if a part cannot be measured here.
    """
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    complete = True
    for part in parts:
        bench.starts.clear()
        bench.failed.clear()
        figures = [f"{suite}.{figure}" for figure in part.figures]
        failures: list[str] = []
        try:
            made += part.measure(bench)
        except NotHere as error:
            bench.say(f"figure {', '.join(part.figures)}, {part.title}: not measured: {error}")
            complete = False
        except Exception as error:  # whatever it is, it is not to lose the other figures
            said = error if isinstance(error, RanksFailed) else traceback.format_exc()
            bench.say(f"figure {', '.join(part.figures)}, {part.title}: failed\n{said}")
            failures.append(part.title)
        else:
            bench.say(f"figure {', '.join(part.figures)}: {part.title}")
        failures += [f"{part.title}: {what}" for what in bench.failed]
        for figure in figures if failures else ():
            failed.setdefault(figure, []).extend(failures)
        bench.keep_starts(figures[0], part.title)
        after_part(Run(records=tuple(made), failed=failed, started=bench.started))
    return Run(records=made, failed=failed, started=bench.started), complete


def command(suite: Suite) -> None:
    """Runs the suite's command and ends the process."""
    sys.exit(main(suite))


# ---------------------------------------------------------------------- the command line and the files


def parse(
    words: Sequence[str] | None, *, benchmark: str, description: str | None, names: Sequence[str], output: str,
    options: Callable[[argparse.ArgumentParser], object],
) -> argparse.Namespace:  # fmt: skip
    """Returns the options of the command line, with those that all benchmarks have: `only`, the list of the names to
    measure, and `output`. names: what `--only` may name. output: what its help says of the path. options: adds more."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=description)
    parser.add_argument(
        "--only", default=",".join(names), metavar="NAME,NAME", help="what to measure [default: %(default)s]"
    )
    options(parser)
    parser.add_argument(
        "--output", type=Path, metavar="PATH",
        help=f"JSON file to write; records of other figures in it are kept. {output}",
    )  # fmt: skip
    found = parser.parse_args(words)
    found.only = found.only.split(",")
    if unknown := [name for name in found.only if name not in names]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(names)}")
    return found


def leave_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that `finally` blocks end the ranks and remove their files."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def open_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def saying(console: Console) -> Say:
    """Returns a function that prints a line with the seconds since the call of `saying`."""
    began = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {what}", markup=False)

    return say


def finish(
    console: Console, run: Run, *, benchmark: str, about: dict[str, Any], output: Path | None,
    refresh: Refresh | None,
) -> int:  # fmt: skip
    """Prints the records, writes them to `output`, and returns the exit code: 1 if a figure failed.

    about: machine, versions and commit, from `results_file.about_this_run`. refresh: updates the tables of the page in
    docs/benchmarks, if there is one. It is called, and the headline figures are written into docs/results.md and
    README.md, if `output` is the file in benchmarks/results.
    """
    table = Table("id", "what", "value", "rounds: range", "bar", "holds")
    for record in run.records:
        holds = "yes" if record.holds else "[red]no[/red]"
        rounds = f"{record.rounds}: {record.range[0]:.3g} to {record.range[1]:.3g}" if record.range else ""
        table.add_row(
            record.id, record.what, f"{record.value:.3g}", rounds, f"{record.sense} {record.bar:g}", holds
        )
    console.print(table)
    for figure, parts in run.failed.items():
        console.print(f"{figure}: not measured, because of an error: {', '.join(parts)}", markup=False)
    if output is not None:
        keep(run, benchmark=benchmark, about=about, output=output, refresh=refresh)
        console.print(f"written: {output}")
    return 1 if run.failed else 0


def keep(run: Run, *, benchmark: str, about: dict[str, Any], output: Path, refresh: Refresh | None) -> None:
    """Writes the records to `output`, and the tables that show them, as `finish` does. May be called again with more
    records of the same run, so that one that is interrupted keeps what was measured."""
    content = results_file.write(output, run, about=about)
    if output.resolve() == REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json":
        if refresh is not None:
            refresh(REPOSITORY / "docs" / "benchmarks" / f"{benchmark}.md", content)
        headlines.refresh()
