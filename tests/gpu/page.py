"""Writes the results of checks on a GPU from gpu.json into docs/gpu.md: `python -m tests.gpu.page`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

MARKED = re.compile(r"(<!-- begin runs -->\n).*?(<!-- end runs -->)", re.DOTALL)
NEVER = "**Nothing of hpctrain has been run on a GPU.** There are no figures."


def refresh(page: Path, content: Mapping[str, Any] | None) -> None:
    """Writes the results between the page's markers. content: of gpu.json; None if no check was run on a GPU."""
    lines = NEVER if content is None else runs(content)
    page.write_text(MARKED.sub(lambda found: f"{found[1]}{lines}\n{found[2]}", page.read_text()))


def runs(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    if machine["device"] != "cuda":
        return NEVER
    commit, _, changes = content["commit"].partition("+")
    rows = [
        f"Run on {content['when']} at commit `{commit[:12]}{changes and '+changes'}`: "
        f"{machine['gpu']} ({machine['gpu_memory_gb']} GB, compute capability {machine['compute_capability']}), CUDA "
        f"{machine['cuda']}, torch {machine['torch']}, Python {machine['python']}, Linux {machine['kernel']}.",
        "",
        "| check | result | what was compared, or why not | figures |",
        "| --- | --- | --- | --- |",
    ]
    for check in content["checks"]:
        figures = "; ".join(f"{name}: {value:,.4g}" for name, value in check["figures"].items())
        result = check["status"] if check["status"] != "failed" else "**failed**"
        rows.append(f"| `{check['name']}` | {result} | {check['text'].replace('|', '/')} | {figures} |")
    return "\n".join(rows)


def main() -> int:
    results = REPOSITORY / "benchmarks" / "results" / "gpu.json"
    refresh(REPOSITORY / "docs" / "gpu.md", json.loads(results.read_text()) if results.exists() else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
