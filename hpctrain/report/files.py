"""Writes a report: a page, Markdown, or files for papers."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import jinja2

from hpctrain.errors import UsageError
from hpctrain.report.contents import Report
from hpctrain.report.plots import PALETTE
from hpctrain.report.table import Table
from hpctrain.storage import replace_file


def write_html(report: Report, path: Path) -> None:
    """Writes one page that needs nothing else: no network, no JavaScript. Raises UsageError if it cannot."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpctrain.report", "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    text = environment.get_template("report.html.j2").render(report=report, palette=PALETTE)
    _write(path, text.encode())


def write_markdown(report: Report, path: Path) -> None:
    """Writes conclusions and tables as GitHub's Markdown. Raises UsageError if it cannot."""
    lines = [f"# {report.title}", "", f"Made {report.made}.", ""]
    for label, conclusions in report.conclusions:
        lines += [f"## {label}", "", *(f"- {each.text} ({each.source})" for each in conclusions)]
        lines += ["Nothing stands out, or too little was recorded."] * (not conclusions) + [""]
    for table in report.tables:
        heads = [table.head, *table.columns]
        lines += [f"## {table.title}", "", _line(heads), _line(["---"] * len(heads))]
        for row in table.rows:
            name = "&nbsp;" * 2 * row.indent + row.name + (f", {row.unit}" if row.unit else "")
            lines.append(_line([name, *row.shown()]))
        lines += ["", *([table.note, ""] if table.note else [])]
    _write(path, "\n".join(lines).encode())


def write_csv(report: Report, directory: Path) -> None:
    """Writes each table as a CSV file, with the numbers in full. Raises UsageError if it cannot."""
    for table in report.tables:
        _write(directory / f"{_file_name(table.name)}.csv", _csv(table).encode())


def write_png(report: Report, directory: Path) -> None:
    """Writes each figure as a PNG file, on white. Raises UsageError if it cannot."""
    for plot in report.plots:
        _write(directory / f"{_file_name(plot.name)}.png", plot.png())


def _csv(table: Table) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([table.head, "unit", *table.columns])
    writer.writerows(
        [row.name, row.unit, *("" if each is None else each for each in row.values)] for row in table.rows
    )
    return written.getvalue()


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _file_name(name: str) -> str:
    return name.replace("/", "-")


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, partial=path.with_name(f".{path.name}.partial"))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
