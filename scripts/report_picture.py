"""`make report-picture`: a scaling sweep of the digits on this machine, and the begin of its report as a picture.

    python scripts/report_picture.py docs/pictures/report.png
    python scripts/report_picture.py docs/pictures/report.png --page report.html

The sweep runs as a user runs it, by one command, in a temporary folder, on as many ranks as there are cores. With
--page a page that was written before is drawn. It needs Chromium; the picture always has WIDTH x HEIGHT pixels.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from picture import REPOSITORY, run
from PIL import Image

WIDTH, HEIGHT = 1180, 1430
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWEEP = "hpctrain bench scaling examples/digits.toml --ranks {ranks} --report report.html"


def make_page(directory: Path) -> Path:
    """Measures a sweep in `directory`. Returns its report. Raises CalledProcessError if a command fails."""
    (directory / "examples").symlink_to(REPOSITORY / "examples")
    most = len(os.sched_getaffinity(0))
    ranks = [2**power for power in range(most.bit_length())]
    for command in ("hpctrain data pack digits data/digits", SWEEP.format(ranks=",".join(map(str, ranks)))):
        print(run(command, directory=directory))
    return directory / "report.html"


def screenshot(page: Path, target: Path) -> None:
    """Writes the first WIDTH x HEIGHT pixels of a page as a PNG file of 256 colours.

    Raises SystemExit without Chromium, and CalledProcessError if it fails.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"report_picture: needs one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory(prefix="hpctrain-picture-") as name:
        drawn = Path(name) / "drawn.png"
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--force-device-scale-factor=1", "--blink-settings=preferredColorScheme=1",
                f"--user-data-dir={Path(name) / 'profile'}", f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={drawn}", page.absolute().as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        with Image.open(drawn) as image:
            # The method keeps colours of small areas, as those in a legend.
            few = image.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    target.parent.mkdir(parents=True, exist_ok=True)
    few.save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpctrain-sweep-") as name:
        screenshot(asked.page or make_page(Path(name)), asked.target)
    print(f"{asked.target}: {asked.target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
