"""Reads a recipe file and applies overrides from the command line, without validating it.

Loads neither torch nor the schema, for programs that need a single key.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import RecipeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_recipe_document(path: Path, *, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the recipe as nested dictionaries, with the overrides applied.

    overrides: `section.key=value`, the value as in TOML; a bare word counts as a string.
    Raises RecipeError if the file cannot be read, is not TOML, or an override does not fit.
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
