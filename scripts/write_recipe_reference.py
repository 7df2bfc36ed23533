"""Writes docs/recipe.md from the fields of the recipe: `make docs`. `--check` fails if the file is not up to date."""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpctrain.run.recipe.load import tables_of
from hpctrain.run.recipe.schema import Recipe

HEAD = """# Recipe reference

Generated from `hpctrain/run/recipe/schema.py` by `make docs`; do not edit.

A recipe is one TOML file, and one TOML file is one run. It is validated before anything communicates; unknown
keys are refused with the nearest valid one. Any key can be overridden on the command line:
`hpctrain train recipe.toml --set optimizer.lr=0.01`. Relative paths are relative to the working directory. The
recipe as it was run, with every default filled in, is written to `recipe.toml` in the run directory.
"""

HEADER = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]


def type_text(annotation: Any) -> str:
    """`int`, `"a" or "b"`, `float, or absent`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(args[0])
    if origin is typing.Literal:
        return " or ".join(f'`"{value}"`' for value in args)
    if origin in (typing.Union, types.UnionType):
        known = [a for a in args if a is not type(None)]
        return ", ".join(type_text(a) for a in known) + (", or absent" if len(known) < len(args) else "")
    if origin is list:
        return f"list of {type_text(args[0])}"
    return "table" if origin is dict else getattr(annotation, "__name__", str(annotation))


def kind_text(field: FieldInfo) -> str:
    """The type; for a text with known values, which may have more at a site, these values."""
    extra = field.json_schema_extra
    values = extra.get("enum") if isinstance(extra, dict) else None
    return (
        type_text(typing.Literal[tuple(values)]) if isinstance(values, list) else type_text(field.annotation)
    )


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value if value != {} else '{}'}`"


def limits_text(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = []
    for limit in field.metadata:
        for name, word in words.items():
            value = getattr(limit, name, None)
            if value is not None and abs(value) < 2**62:
                found.append(f"{word} {value}")
    return f" ({', '.join(found)})" if found else ""


def reference() -> str:
    lines = [HEAD]
    for name, section in Recipe.model_fields.items():
        kind = section.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        lines += [
            f"## `[{name}]`",
            "",
            (kind.__doc__ or "").strip(),
            "",
            *HEADER,
        ]
        lines += rows_of(kind)
        lines.append("")
        for key, field in kind.model_fields.items():
            for chosen, table in tables_of(field.annotation).items():
                lines += [
                    f'### `[{name}.{key}]`, `{next(iter(table.model_fields))} = "{chosen}"`',
                    "",
                    (table.__doc__ or "").strip(),
                    "",
                    *HEADER,
                    *rows_of(table),
                    "",
                ]
    return "\n".join(lines)


def rows_of(kind: type[BaseModel]) -> list[str]:
    """One row per key."""
    rows = []
    for key, field in kind.model_fields.items():
        meaning = (field.description or "").replace("|", "\\|")
        of_type = "table" if tables_of(field.annotation) else kind_text(field) + limits_text(field)
        rows.append(f"| `{key}` | {of_type} | {default_text(field)} | {meaning} |")
    return rows


if __name__ == "__main__":
    target = Path(next(a for a in sys.argv[1:] if not a.startswith("--")))
    if "--check" in sys.argv:
        sys.exit(0 if target.read_text() == reference() else f"{target} is not up to date: run `make docs`")
    target.write_text(reference())
