"""Checks the examples of the guide on ranks, all in one start: `python -m tests.check.guide_examples FILE ...`, of
recipes (NAME.toml) and of loops (loop_NAME.py), prints a line of JSON for each."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.run.check import check_with


def check(session: Any, path: Path) -> Any:
    if path.suffix == ".toml":
        recipe = hpctrain.load_recipe(path)
        return check_with(session, recipe, recipe_path=path, steps=4, scratch=Path(), quiet=True)
    return session.check(importlib.import_module(path.stem).training, show=False)


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    with hpctrain.init(timeout_s=300) as session:
        for path in map(Path, sys.argv[1:]):
            report = check(session, path)
            if session.rank == 0:
                causes = [f.cause.value for f in report.findings if f.is_difference]
                text = " ".join(" ".join(report.lines()).split())
                print(json.dumps({"name": path.stem, "causes": causes, "text": text}), flush=True)


if __name__ == "__main__":
    main()
