"""Hooks of mkdocs for `make site` (see `mkdocs.yml`): add the README as home page, the API reference, the decisions.

Files outside `docs/` that pages link to are copied into the site unchanged.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from structure import public_modules, public_names

REPOSITORY = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    reference: list[dict[str, Any]] = next(
        entry["Reference"] for entry in config.nav or [] if "Reference" in entry
    )
    development: list[dict[str, Any]] = next(
        entry["Development"] for entry in config.nav or [] if "Development" in entry
    )
    for entry in reference:
        if "API" in entry:
            entry["API"] = [
                {_dotted(package): f"reference/{package or 'hpctrain'}.md"} for package in public_modules()
            ]
    for entry in development:
        if "Decisions" in entry:
            decisions = sorted(path.name for path in (REPOSITORY / "docs" / "adr").glob("0*.md"))
            entry["Decisions"] = ["adr/README.md", *(f"adr/{name}" for name in decisions)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "index.md", content=_home()))
    for package in public_modules():
        files.append(
            File.generated(config, f"reference/{package or 'hpctrain'}.md", content=_reference(package))
        )
    for path in sorted({target for file in files.documentation_pages() for target in _outside(file)}):
        if not path.endswith(".md"):
            there = str(REPOSITORY / path)
            files.append(File.generated(config, f"repository/{path}", abs_src_path=there))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Replaces links to files outside `docs/` by links to their copies; links to Markdown pages and folders outside
    `docs/` become plain text."""
    here = PurePosixPath(page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        path = _outside_path(match[2], here=here)
        if path is None or path.endswith(".md") or (REPOSITORY / path).is_dir():
            return match[0] if path is None else f"]({'../' * len(here.parts)}index.md)"
        return f"]({'../' * len(here.parts)}repository/{path})"

    return _LINK.sub(rewritten, markdown)


def _home() -> str:
    """Returns the README with links relative to `docs/`."""

    def from_docs(match: re.Match[str]) -> str:
        path = match[2]
        if "://" in path:
            return match[0]
        return (
            f"{match[1]}{path.removeprefix('docs/') if path.startswith('docs/') else f'../{path}'}{match[3]}"
        )

    text = (REPOSITORY / "README.md").read_text()
    return _LINK.sub(from_docs, text)


def _reference(package: str) -> str:
    module = _dotted(package)
    names = [name for name in public_names(package) if package or name not in public_modules()]
    entries = "\n\n".join(f"::: {module}.{name}" for name in names)
    folder = REPOSITORY / "hpctrain" / package
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(source.read_text()))
    return f"# {module}\n\n{doc}\n\n{entries}\n"


def _dotted(package: str) -> str:
    return f"hpctrain.{package}" if package else "hpctrain"


def _outside(file: File) -> set[str]:
    here = PurePosixPath(file.src_uri).parent
    found = {_outside_path(match[2], here=here) for match in _LINK.finditer(file.content_string)}
    return {path for path in found if path is not None and (REPOSITORY / path).is_file()}


def _outside_path(link: str, *, here: PurePosixPath) -> str | None:
    """Returns the path in the repository that `link` leads to, None if it is in `docs/` or no path."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    path = (REPOSITORY / "docs" / here / link).resolve()
    inside = path.is_relative_to(REPOSITORY / "docs")
    return None if inside or not path.is_relative_to(REPOSITORY) else str(path.relative_to(REPOSITORY))
