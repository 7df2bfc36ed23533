"""Random valid HDF5 files of a wider kind are read as h5py reads them, or refused by name: each batch in a process."""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Number of files of the thorough test, and the number of the first.
COUNT = int(os.environ.get("HPCTRAIN_WIDE_FILES", "20000"))
FIRST = int(os.environ.get("HPCTRAIN_WIDE_FIRST", "0"))
BATCH = 250
LIMIT_S = 600
_LATER = 20


def batch(folder: Path, *, first: int, count: int, plain: bool = False) -> tuple[list[list[str]], str]:
    """Returns the lines of a batch, and what its process said when it died; "" if it did not."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.unit.data.indexing.wide_batch",
        str(folder),
        str(first),
        str(count),
    ]
    with open(folder / "errors", "w") as errors:
        try:
            ended = subprocess.run(
                [*command, *(["plain"] if plain else [])],
                stdout=errors,
                stderr=errors,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            ended = -1
    found = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    said = (folder / "errors").read_text()[-2000:] if ended else ""
    shutil.rmtree(folder)
    return found, f"ended with {ended}: {said}" if ended else ""


def run(folder: Path, *, first: int, count: int) -> tuple[collections.Counter[str], list[str]]:
    """Returns the outcomes, and what is wrong. Files on which h5py alone dies count as "HDF5 died"."""
    counts: collections.Counter[str] = collections.Counter()
    wrong, number = [], first
    while number < first + count:
        begin = number
        lines, died = batch(folder / "batch", first=number, count=min(BATCH, first + count - number))
        for _, said, text in lines:
            counts[said] += said != "begun"
            if said == "WRONG":
                wrong.append(text)
        number = int(lines[-1][0]) + 1 if lines else number
        if not died:
            continue
        last = int(lines[-1][0]) if lines else number
        # Memory that one file damaged may end the process at a later one, with h5py alone still later.
        alone = {"first": begin, "count": last - begin + 1 + _LATER, "plain": True}
        if any(batch(folder / "alone", **alone)[1] for _ in range(3)):
            counts["HDF5 died"] += 1
        else:
            wrong.append(f"wide {last}: died, and h5py alone does not: {died}")
        number = last + 1
    return +counts, wrong


@pytest.mark.thorough
@pytest.mark.timeout(4 * 3600)
def test_20000_wide_random_files_are_read_as_h5py_reads_them_or_refused_by_name(tmp_path: Path) -> None:
    counts, wrong = run(tmp_path, first=FIRST, count=COUNT)
    print(dict(counts))
    assert not wrong, f"{len(wrong)} files, the first: " + "\n".join(wrong[:10])
    assert counts["equal"] > COUNT // 10
    assert counts["refused"] > COUNT // 10
