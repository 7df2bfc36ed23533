"""Reads and validates recipes from TOML, and reports all faults of a recipe at once."""

from __future__ import annotations

import difflib
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpctrain.errors import RecipeError
from hpctrain.run.recipe.schema import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Reads a recipe file and applies overrides from the command line, without validating it.
#
# Does not import torch or the schema, for programs that need a single key.


def read_recipe_document(path: Path, *, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the recipe of a file as nested dictionaries, with the overrides applied, but not validated.

    overrides: texts `section.key=value`, with the value as in TOML; a bare word counts as a string. Raises RecipeError
    if the file cannot be read or is not TOML, or if an override does not match the recipe's keys.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path} is not TOML: {error}") from error
    for override in overrides:
        _apply(document, override)
    return document


def _apply(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    sections = key.strip().split(".")
    if not equals or len(sections) < 2 or not all(sections):
        raise RecipeError(f"--set {override}: write it as section.key=value, for example optimizer.lr=0.01")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = document
    for name in sections[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {override}: {name} is a value, not a section")
    table[sections[-1]] = value


# Validates recipes, and reports all their faults.


def load_recipe(path: Path, *, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and validates a recipe.

    Args:
        path: The TOML file. Relative paths in it are relative to the working directory.
        overrides: Texts `section.key=value` that replace values of the file, with the value as in TOML; a bare word
            counts as a string.

    Returns:
        The recipe, with every default filled in.

    Raises:
        RecipeError: If the file cannot be read or the recipe is not valid. The message lists all faults.
    """
    document = read_recipe_document(path, overrides=overrides)
    return parse_recipe(document, source=str(path))


def parse_recipe(document: dict[str, Any], *, source: str = "recipe") -> Recipe:
    """Validates a recipe given as nested dictionaries. Raises RecipeError, whose message lists all faults."""
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        faults = "\n".join(f"  {line}" for line in _faults(error))
        raise RecipeError(f"{source} is not a valid recipe:\n{faults}") from error


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"]) or "recipe"
        if fault["type"] == "extra_forbidden":
            yield f"{where}: there is no such key{_nearest(fault['loc'])}"
        elif fault["type"] == "missing":
            yield f"{where}: missing"
        elif fault["type"] == "value_error":
            yield f"{where}: {fault['ctx']['error']}"
        else:
            found = json.dumps(fault["input"], default=str)
            yield f"{where}: found {found}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """Returns `; did you mean ...?` or the list of valid keys, for the message; empty if the section is unknown."""
    section: type[BaseModel] = Recipe
    tables: Mapping[str, type[BaseModel]] = {}  # among which the next part of the location chooses
    for part in location[:-1]:
        if tables:
            section, tables = tables[str(part)], {}
            continue
        annotation = section.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
        elif not (tables := tables_of(annotation)):
            return ""
    valid = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; valid here: {', '.join(valid)}"


def tables_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """Returns the tables among which a key's value is one, such as the methods of a schedule.

    They are named by the value of their first key, which chooses the table.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        chosen_by = next(iter(annotation.model_fields.values())).annotation
        return {str(value): annotation for value in typing.get_args(chosen_by)}
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType, typing.Annotated):
        return {}
    found = [tables_of(argument) for argument in typing.get_args(annotation)]
    return {name: table for tables in found for name, table in tables.items()}


def to_toml(recipe: Recipe) -> str:
    """Returns the recipe as TOML, with every default filled in. `load_recipe` reads it back as an equal recipe."""
    lines: list[str] = []
    for name, section in recipe.model_dump().items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in section.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None)
        return "{ " + inside + " }" if inside else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str | bool | int):
        # A JSON string is a TOML basic string, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value)
    return json.dumps(str(value))
