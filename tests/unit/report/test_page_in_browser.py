"""The page as headless Chromium lays it out: at phone and desktop width, light and dark."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from report_picture import HEIGHT, WIDTH, screenshot

from hpctrain.report import make_report, write_html
from tests.ranks_launcher import REPOSITORY

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(
        BROWSER is None and os.environ.get("HPCTRAIN_BROWSER") != "required",
        reason="Chromium is not installed",
    ),
]

# A page that shows the report in a frame of some width, measures it there, and leaves the result in its title.
MEASURE = """<!doctype html><title></title><iframe src="report.html" style="width:%dpx;height:2000px;border:0"></iframe>
<script>
const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
onload = () => {
  const page = document.querySelector("iframe").contentDocument, view = page.defaultView;
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = numbers(view.getComputedStyle(node).backgroundColor);
      if (colour.length == 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const contrast = [...page.querySelectorAll("h1, h2, li, td, th, p, figcaption, .source")].map(node => {
    const [a, b] = [numbers(view.getComputedStyle(node).color), behind(node)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
  const drawn = [...page.querySelectorAll("figure svg")].map(svg => [svg.getBoundingClientRect().width,
    svg.getBoundingClientRect().height, svg.querySelectorAll("path").length]);
  const colours = [...new Set([...page.querySelectorAll("figure svg path")].map(p => view.getComputedStyle(p).stroke))];
  document.title = JSON.stringify({width: page.documentElement.scrollWidth, client: page.documentElement.clientWidth,
    contrast: Math.min(...contrast), drawn, colours, paper: view.getComputedStyle(page.body).backgroundColor,
    labelled: [...page.querySelectorAll("figure")].every(f => f.getAttribute("aria-label").length > 20)});
};
</script>"""


def measure(folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    assert BROWSER is not None, "HPCTRAIN_BROWSER=required, and Chromium is not installed"
    (folder / "measure.html").write_text(MEASURE % width)
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=5000", "--window-size=1400,2200", "--dump-dom", (folder / "measure.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, flags=re.DOTALL)
    assert title is not None, done.stderr
    return json.loads(html.unescape(title[1]))


@pytest.fixture(scope="module")
def folder(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("page")
    write_html(make_report(runs), where / "report.html")
    return where


def test_the_picture_of_a_report_has_a_fixed_size(folder: Path, tmp_path: Path) -> None:
    screenshot(folder / "report.html", tmp_path / "report.png")
    for path in (tmp_path / "report.png", REPOSITORY / "docs" / "pictures" / "report.png"):
        assert path.stat().st_size < 250_000
        with Image.open(path) as image:
            assert image.size == (WIDTH, HEIGHT)
            assert len(image.convert("RGB").getcolors(1 << 20)) > 10  # something is drawn


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overflows_and_everything_is_readable_in_light_and_dark(folder: Path, width: int) -> None:
    light, dark = (measure(folder, width=width, dark=dark) for dark in (False, True))
    for found in (light, dark):
        assert found["width"] <= found["client"] <= width
        assert found["contrast"] >= 4.5  # WCAG 2.1, level AA
        assert len(found["drawn"]) >= 4
        assert all(shown > 300 and high > 60 and paths > 10 for shown, high, paths in found["drawn"])
        assert found["labelled"]
    assert (light["paper"], dark["paper"]) == ("rgb(255, 255, 255)", "rgb(13, 17, 23)")
    assert light["colours"] != dark["colours"]
