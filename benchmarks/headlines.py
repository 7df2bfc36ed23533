"""The headline figures of the suites, and the pages that show them: docs/results.md and a table of README.md.

`python -m benchmarks.headlines` writes these from the files in benchmarks/results, as every benchmark does at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import results_page
from benchmarks.results_file import figure_of
from benchmarks.starting import REPOSITORY

Content = Mapping[str, Any]  # of a file in benchmarks/results

QUICK = "quick"
SHOWN_RUNS = 5  # of the history


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A figure for the front. id: of its record. what: hpctrain's side, in words. against: the limit or the peer.

    kind: what `against` is. A limit's records are costs (`at most`) or shares of the limit (`at least`); a peer's are
    how many times as fast as the peer hpctrain is. readme: whether the README shows it, which calls a cost a time.
    """

    id: str
    kind: Literal["limit", "peer"]
    what: str
    against: str
    readme: bool = False

    @property
    def suite(self) -> str:
        return self.id.partition(".")[0]

    def factor(self, value: float, sense: str) -> float:
        """Returns the number to show: times as fast as the peer, or the cost in units of the limit's."""
        return 1 / value if self.kind == "limit" and sense == "at least" else value


def _on_four_nodes(rate: str, wire: str) -> str:
    return f"sum of 4.2 million gradients, 8 ranks on 4 nodes, links of {rate}, {wire} on the wire"


_IMAGES = "reading images of 12 KB, shuffled, from the page cache"
_SAVE = "saving 512 MiB as in a run, 2 ranks, flushed"
_STEPS = "steps of `examples/characters.toml`, 2 ranks"
_ON_NODES = "steps of `examples/characters.toml` on {} nodes of one rank, links of 1 Gbit/s"
_SLOW16 = _on_four_nodes("200 Mbit/s", "16 bits")

HEADLINES = (
    Headline(id="reduction.1.hierarchical-ring", kind="limit",
             what="bytes that leave a node for a sum of 25 million gradients, 8 ranks on 4 nodes, fp16 on the wire",
             against="the fewest bytes possible, 2(C-1)/C of the gradients for C nodes"),
    Headline(id="reduction.2.200mbit.bound", kind="limit", what=_SLOW16,
             against="as many bytes in a plain MPI stream", readme=True),
    Headline(id="scaling.nodes-2", kind="limit", what=_ON_NODES.format(2), against="the cores that they share"),
    Headline(id="scaling.nodes-4", kind="limit", what=_ON_NODES.format(4), against="the cores that they share"),
    Headline(id="step.characters-2.scaling.limit", kind="limit", what=_STEPS,
             against="two ranks that never communicate", readme=True),
    Headline(id="checkpoint.1a.limit", kind="limit", what="saving 512 MiB into new blocks, 2 ranks, flushed",
             against="the disk alone, `O_DIRECT`"),
    Headline(id="checkpoint.3a", kind="limit", what="training blocked by saving 512 MiB in the background, 2 ranks",
             against="a memcpy of a rank's share", readme=True),
    Headline(id="data.1a", kind="limit", what=_IMAGES, against="gathering them from a raw memmap"),
    Headline(id="data.1f", kind="limit", what="reading gzip chunks in order", against="zlib alone on every core"),
    Headline(id="reduction.2.200mbit.best-16-bit-peer", kind="peer", what=_SLOW16, against="the best peer in 16 bits",
             readme=True),
    Headline(id="reduction.2.200mbit.ddp-gloo-fp32", kind="peer", what=_SLOW16, against="DDP on Gloo, fp32",
             readme=True),
    Headline(id="reduction.2.200mbit.horovod-fp32", kind="peer", what=_SLOW16, against="Horovod, fp32"),
    Headline(id="reduction.2.200mbit.horovod-fp32.ring", kind="peer", what=_SLOW16,
             against="Horovod, fp32, with Open MPI's ring"),
    Headline(id="reduction.2.200mbit.8-bit", kind="peer", what=_on_four_nodes("200 Mbit/s", "8 bits"),
             against="the best peer"),
    Headline(id="reduction.2.1gbit.best-peer", kind="peer", what=_on_four_nodes("1 Gbit/s", "16 bits"),
             against="the best peer"),
    Headline(id="step.characters-2.flat", kind="peer", what=f"{_STEPS}, `flat` over Horovod, no saves",
             against="`hvd.DistributedOptimizer`", readme=True),
    Headline(id="checkpoint.1b", kind="peer", what=_SAVE, against="torch DCP as it comes"),
    Headline(id="checkpoint.1c", kind="peer", what=_SAVE, against="torch DCP without fsync", readme=True),
    Headline(id="checkpoint.2c", kind="peer", what="loading 512 MiB from the page cache, verified, 2 ranks",
             against="torch DCP", readme=True),
    Headline(id="data.1b", kind="peer", what=_IMAGES, against="DataLoader and h5py, 2 workers", readme=True),
    Headline(id="data.1c", kind="peer", what=_IMAGES, against="MosaicML streaming, 2 workers"),
)  # fmt: skip
NAMES = {"limit": "cost / the limit's", "peer": "times as fast"}


def refresh(repository: Path = REPOSITORY) -> None:
    """Writes docs/results.md and the README's table from the files in benchmarks/results."""
    contents = read_results(repository / "benchmarks" / "results")
    results_page.fill(repository / "docs" / "results.md", page_tables(contents))
    results_page.fill(repository / "README.md", {"measured": readme_table(contents)})


def read_results(directory: Path) -> dict[str, Content]:
    """Returns name of the benchmark -> content of its file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def page_tables(contents: Mapping[str, Content]) -> dict[str, str]:
    """Returns the tables of docs/results.md, by marker; only `limits` and `peers` without a file of the quick run."""
    tables = {f"{kind}s": _table(kind, contents) for kind in ("limit", "peer")}
    quick = contents.get(QUICK)
    if quick is not None:
        tables["about"] = (
            f"{quick['date']}, load of the machine before it {quick['load']:g}. {results_page.about(quick)}"
        )
        tables["parts"] = _parts(quick)
        tables["history"] = _history(quick["history"][-SHOWN_RUNS:])
        starts = {
            f"{figure}, {part}": launches
            for figure, entry in quick["figures"].items()
            for part, launches in entry.get("started", {}).items()
        }
        if starts:
            tables["started"] = results_page.started(starts)
    return tables


def readme_table(contents: Mapping[str, Content]) -> str:
    """Returns the README's table, of the long benchmarks."""
    rows = ["| measured | compared with | result | page |", "| --- | --- | --- | --- |"]
    for headline in HEADLINES:
        record = _record(contents.get(headline.suite), headline.id)
        if headline.readme and record is not None:
            words = "times as long" if headline.kind == "limit" else "times as fast"
            rows.append(
                f"| {headline.what} | {headline.against} | {_shown(headline, record)} {words} "
                f"| [{headline.suite}](docs/benchmarks/{headline.suite}.md) |"
            )
    return "\n".join(rows)


def _table(kind: str, contents: Mapping[str, Content]) -> str:
    rows = [
        f"| | {kind} | {NAMES[kind]} | rounds: least to greatest | goal | in the long benchmark |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    quick = contents.get(QUICK)
    for headline in (one for one in HEADLINES if one.kind == kind):
        record = _record(quick, headline.id)
        cells = ["not measured", "", ""]
        if record is not None:
            cells = [_shown(headline, record), _rounds(headline, record), _goal(headline, record)]
        elif quick is not None and "failed" in quick["figures"].get(figure_of(headline.id), {}):
            cells[0] = "failed"
        rows.append(
            f"| {headline.what} | {headline.against} | {' | '.join(cells)} | {_long(headline, contents)} |"
        )
    return "\n".join(rows)


def _record(content: Content | None, record_id: str) -> Mapping[str, Any] | None:
    records: Sequence[Mapping[str, Any]] = content["records"] if content is not None else ()
    return next((record for record in records if record["id"] == record_id), None)


def _shown(headline: Headline, record: Mapping[str, Any]) -> str:
    return _number(headline.factor(record["value"], record["sense"]))


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _commit(content: Content, record: Mapping[str, Any]) -> str:
    return results_page.short(record.get("commit", content["commit"]), digits=7)


def _rounds(headline: Headline, record: Mapping[str, Any]) -> str:
    if "range" not in record:
        return ""
    ends = sorted(headline.factor(value, record["sense"]) for value in record["range"])
    return f"{record['rounds']}: {_number(ends[0])} to {_number(ends[1])}"


def _goal(headline: Headline, record: Mapping[str, Any]) -> str:
    bound = "at most" if headline.kind == "limit" else "at least"
    held = "" if record["holds"] else ": **missed**"
    return f"{bound} {_number(headline.factor(record['bar'], record['sense']))}{held}"


def _long(headline: Headline, contents: Mapping[str, Content]) -> str:
    record = _record(contents.get(headline.suite), headline.id)
    if record is None:
        return ""
    commit = _commit(contents[headline.suite], record)
    return f"[{_shown(headline, record)}](benchmarks/{headline.suite}.md) at `{commit}`"


def _parts(quick: Content) -> str:
    rows = ["| part | seconds | |", "| --- | --- | --- |"]
    for name, part in quick["parts"].items():
        rows.append(f"| {name} | {part['seconds']:.0f} | {part['outcome']} |")
    return "\n".join(rows)


def _history(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with a column for each run, the last one first."""
    shown = list(reversed(runs))
    heads = [
        f"{run['date']}, `{results_page.short(run['commit'], digits=7)}`, {run['cores']} cores of {run['processor']}"
        for run in shown
    ]
    rows = [f"| | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for headline in HEADLINES:
        values = [run["values"].get(headline.id) for run in shown]
        if any(value is not None for value in values):
            cells = " | ".join("" if value is None else _number(value) for value in values)
            rows.append(f"| `{headline.id}` | {cells} |")
    return "\n".join(rows)


def values_of(records: Sequence[Any]) -> dict[str, float]:
    """Returns id -> the number shown, for the headline figures among the records."""
    by_id = {record.id: record for record in records}
    return {
        headline.id: float(f"{headline.factor(by_id[headline.id].value, by_id[headline.id].sense):.4g}")
        for headline in HEADLINES
        if headline.id in by_id
    }


if __name__ == "__main__":
    refresh()
