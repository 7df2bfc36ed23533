"""The site: built strictly, with every public name and its docstring in the reference."""

from __future__ import annotations

import html
import importlib.util
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from structure import public_modules, public_names

from tests.ranks_launcher import REPOSITORY

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="requirements/site.txt is not installed"
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(where)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr  # without -q, which hides warnings from --strict
    return where


def test_every_public_name_is_in_the_reference_with_its_docstring(site: Path) -> None:
    for short in public_modules():
        text = (site / "reference" / f"{short or 'hpctrain'}.html").read_text()
        package = f"hpctrain.{short}".rstrip(".")
        module = import_module(package)
        for name in public_names(short):
            public = getattr(module, name)
            if inspect.isclass(public) or inspect.isfunction(public):
                assert public.__doc__, f"{package}.{name} has no docstring"
            assert f"{package}.{name}" in html.unescape(text), f"{package}.{name} is not on its page"


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(https?:[^\"]+)\"", page.read_text()
        )
        assert [url for url in loaded if "canonical" not in url] == [], page
