"""Tensor names as HDF5 link names: any text, and back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from hpctrain.checkpoint.format.dtypes import escape


def unescape(link: str) -> str:
    """The tensor name that `escape` encoded as `link`."""
    raw = re.sub(rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), link.encode("utf-8"))
    return "" if link == "%" else raw.decode("utf-8", "surrogatepass")


any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=30)


@given(any_text)
def test_any_name_comes_back(name: str) -> None:
    link = escape(name)
    assert unescape(link) == name
    assert link not in ("", ".", "..")
    assert "/" not in link
    assert "\0" not in link
    link.encode("utf-8")


@given(any_text, any_text)
def test_different_names_have_different_links(first: str, second: str) -> None:
    assert (escape(first) == escape(second)) == (first == second)


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("model.0.weight", "model.0.weight"),
        ("a/b", "a%2Fb"),
        ("100%", "100%25"),
        ("..", "%2E%2E"),
        ("", "%"),
        ("größe", "größe"),
    ],
)
def test_ordinary_names_stay_readable(name: str, link: str) -> None:
    assert escape(name) == link
