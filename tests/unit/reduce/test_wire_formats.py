"""The table of wire formats agrees with what the formats do, and takes entries of a site's packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpctrain.errors import RecipeError, UsageError
from hpctrain.reduce import wire_formats
from hpctrain.reduce.autotune.link_speed import Candidate, LinkFloor
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducers.collective_reducer import wire_dtype
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.wire_formats import (
    CODEC_WIRES,
    SPARSE_WIRES,
    WIRE_FORMATS,
    WireFormat,
    check_wire,
    find_wire,
    listed_wires,
    needs_feedback,
    roundings,
    share_of_float32,
    wire_format,
    wire_names,
)
from hpctrain.run.recipe.load import parse_recipe
from hpctrain.run.recipe.schema import ReductionSection
from hpctrain.scaling.model.machine import wire_share

DOCS = Path(__file__).parents[3] / "docs"
# A multiple of every codec's block.
MANY = 1 << 16


@pytest.mark.parametrize("name", CODEC_WIRES)
def test_the_tables_bytes_are_those_that_the_codec_writes(name: str) -> None:
    codec, entry = codec_named(name), wire_format(name)
    values = torch.linspace(-1, 1, MANY)
    data = torch.full((codec.num_bytes(MANY),), 0xA5, dtype=torch.uint8)
    codec.encode(values, out=data)
    assert entry.bytes_per_element == data.numel() / MANY
    # Every byte is written: another filling leaves the same data.
    again = torch.full_like(data, 0x5A)
    codec.encode(values, out=again)
    assert torch.equal(data, again)


@pytest.mark.parametrize("name", CODEC_WIRES)
def test_a_codec_has_its_formats_name_and_is_exact_where_the_table_says_so(name: str) -> None:
    codec = codec_named(name)
    assert codec.name == name
    assert codec.exact == (roundings(name) == 0)
    assert not (codec.exact and needs_feedback(name))


@pytest.mark.parametrize("name", CODEC_WIRES)
def test_bounds_and_predictions_have_the_tables_bytes(name: str) -> None:
    share = share_of_float32(name)
    assert share is not None
    assert wire_share(name) == share
    floor = LinkFloor(num_ranks=2, num_nodes=2, ranks_per_node=1, bytes_per_s=1.0)
    assert floor.sent(Candidate("direct", name)) == share


@pytest.mark.parametrize("name", SPARSE_WIRES)
def test_bytes_that_depend_on_the_gradients_are_not_predicted(name: str) -> None:
    assert share_of_float32(name) is None
    with pytest.raises(UsageError, match=f"the wire format {name} cannot be predicted"):
        wire_share(name)
    with pytest.raises(
        UsageError, match=f"there is no codec '{name}': give one of {', '.join(CODEC_WIRES)}$"
    ):
        codec_named(name)


def test_a_recommended_format_has_fewer_bytes() -> None:
    recommended = {name: entry.smaller for name, entry in WIRE_FORMATS.items() if entry.smaller is not None}
    assert recommended
    for name, smaller in recommended.items():
        assert wire_share(smaller) < wire_share(name)


def test_what_a_backend_sums_has_a_dtype_of_the_formats_bytes() -> None:
    for name, entry in WIRE_FORMATS.items():
        if entry.library_dtype is not None:
            assert wire_dtype(name, bucket=torch.float32).itemsize == entry.bytes_per_element
        else:
            assert not entry.summed


def test_a_format_of_small_range_begins_with_a_moving_loss_scale() -> None:
    assert LossScale.for_wire("fp16") == LossScale(value=1024.0, dynamic=True)
    assert LossScale.for_wire("fp32", max_skipped_in_row=3) == LossScale(max_skipped_in_row=3)


def test_the_guides_table_has_every_format() -> None:
    guide = (DOCS / "guides" / "reduction.md").read_text()
    _, *rows = guide.partition("\n## Wires\n\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split("`")[1] for row in rows if "`" in row] == list(WIRE_FORMATS)


# A site's formats.


MODULE = """
from hpctrain.reduce import WireFormat
from hpctrain.reduce.codecs import CastCodec
import torch

HALF = WireFormat(name="site-half", codec="site_wires:codec", bytes_per_element=2, needs_feedback=True)
OTHER = WireFormat(name="misnamed", codec="site_wires:codec", bytes_per_element=2)

def codec():
    return CastCodec("site-half", torch.float16)
"""
ENTRY_POINTS = """
[hpctrain.wire_formats]
site-half = site_wires:HALF
site-other = site_wires:OTHER
site-broken = site_wires_broken:ANY
fp32 = site_wires_broken:ANY
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with entry points. Two of them cannot be used."""
    (tmp_path / "site_wires.py").write_text(MODULE)
    (tmp_path / "site_wires_broken.py").write_text("import a_module_that_is_missing")
    metadata = tmp_path / "site_wires-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: site-wires\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    _forget()
    yield tmp_path
    _forget()
    sys.modules.pop("site_wires", None)


def _forget() -> None:
    wire_formats._of_sites.cache_clear()
    wire_formats._imported.cache_clear()


@pytest.mark.usefixtures("site")
def test_a_sites_format_is_encoded_and_listed_like_any_other() -> None:
    assert find_wire("site-half") is not None
    assert needs_feedback("site-half")
    assert wire_share("site-half") == 0.5
    values = torch.tensor([0.5, -2.0])
    codec = codec_named("site-half")
    data = torch.zeros(codec.num_bytes(2), dtype=torch.uint8)
    codec.encode(values, out=data)
    assert torch.equal(data.view(torch.float16).float(), values)
    names = ", ".join(("auto", *WIRE_FORMATS, "site-half", "site-other", "site-broken"))
    with pytest.raises(UsageError, match=f"^wire format 'nothing': choose one of {names}$"):
        check_wire("nothing")


@pytest.mark.usefixtures("site")
def test_an_entry_point_that_cannot_be_used_is_named() -> None:
    point = "the entry point site-broken = site_wires_broken:ANY of hpctrain.wire_formats cannot be imported"
    with pytest.raises(
        UsageError, match=f"^wire format 'site-broken': {point}: ModuleNotFoundError: No module"
    ):
        wire_format("site-broken")
    with pytest.raises(
        UsageError, match=r"site-other = site_wires:OTHER .* must be a .*WireFormat of that name"
    ):
        wire_format("site-other")
    assert wire_format("fp32").codec == "hpctrain.reduce.codecs:OwnPrecisionCodec"  # a site replaces none


@pytest.mark.usefixtures("site")
def test_a_recipe_may_name_a_sites_format() -> None:
    assert ReductionSection(wire="site-half").model_dump()["wire"] == "site-half"
    with pytest.raises(RecipeError, match=r"reduction\.wire: wire format 'site-broken': the entry point"):
        parse_recipe({"reduction": {"wire": "site-broken"}})
    with pytest.raises(
        RecipeError, match=r"found \"fp64\": input should be 'auto', .*'site-other' or 'site-broken'"
    ):
        parse_recipe({"reduction": {"wire": "fp64"}})


@pytest.mark.parametrize("value", ["fp64", 3, None, ["fp32"]])
def test_a_recipe_with_an_unknown_format_lists_the_known_ones(value: object) -> None:
    known = listed_wires(("auto", *WIRE_FORMATS), mark="'")
    with pytest.raises(RecipeError, match=rf"reduction\.wire: found .*: input should be {known}$"):
        parse_recipe({"reduction": {"wire": value}})


def test_neither_torch_nor_entry_points_are_loaded_for_formats_of_the_table() -> None:
    code = (
        "import sys; from hpctrain.reduce import check_wire, needs_feedback; check_wire('auto'); check_wire('int8'); "
        "assert needs_feedback('int8'); from hpctrain.reduce import wire_formats; "
        "assert wire_formats._of_sites.cache_info().misses == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_entry_without_an_encoding_is_refused() -> None:
    with pytest.raises(UsageError, match="one of codec and reducer"):
        WireFormat(name="x")
    with pytest.raises(UsageError, match="give bytes_per_element"):
        WireFormat(name="x", codec="a:b")


def test_names_begin_with_auto() -> None:
    assert wire_names()[: 1 + len(WIRE_FORMATS)] == ("auto", *WIRE_FORMATS)


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "'a'"), (["a", "b"], "'a' or 'b'"), (["a", "b", "c"], "'a', 'b' or 'c'")]
)
def test_names_are_listed_as_pydantic_lists_those_of_a_literal(names: list[str], text: str) -> None:
    assert listed_wires(names, mark="'") == text
