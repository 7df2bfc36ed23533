"""Every optimizer of torch over every layout: equal to one process, or refused by name when the updater is made.

The table of the guide is what these tests have found. To write it anew:
`python -m tests.ranks.parallel.test_optimizers docs/guides/optimizers.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.reduce import check_optimizer
from tests.ranks.parallel import optimizer_cases
from tests.ranks.parallel.optimizer_cases import NAMES, PLANS, model_of, options_of
from tests.ranks_launcher import run_ranks

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "optimizers.md"
BEGIN, END = "<!-- written by tests/ranks/parallel/test_optimizers.py -->\n", "\n<!-- end -->"


def table_in(guide: str) -> str:
    return guide.split(BEGIN)[1].split(END)[0]


def results_in(guide: str) -> dict[str, dict[str, str]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table_in(guide).splitlines()[2:]
    ]
    return {name: dict(zip(PLANS, cells, strict=True)) for name, *cells in rows}


def test_the_guide_names_every_optimizer_and_what_is_refused() -> None:
    results = results_in(GUIDE.read_text())
    assert list(results) == NAMES
    for name in NAMES:
        model = model_of(name)
        optimizer = getattr(torch.optim, name)(list(model.parameters()), lr=0.01, **options_of(name))
        for layout, result in results[name].items():
            if result == "refused":
                with pytest.raises(UsageError, match=name):
                    check_optimizer(optimizer, layout=layout, model=model)  # type: ignore[arg-type]
            else:
                check_optimizer(optimizer, layout=layout, model=model)  # type: ignore[arg-type]


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_every_optimizer_trains_as_in_one_process_or_is_refused() -> None:
    found: list[dict[str, Any]] = run_ranks(2, optimizer_cases.everything, timeout_s=900).outputs
    assert found[0] == found[1]
    assert optimizer_cases.table(found[0]) == table_in(GUIDE.read_text())


def _write(path: Path) -> None:
    found = run_ranks(2, optimizer_cases.everything, timeout_s=900).outputs[0]
    before, after = path.read_text().split(BEGIN)
    path.write_text(before + BEGIN + optimizer_cases.table(found) + END + after.split(END, 1)[1])


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
