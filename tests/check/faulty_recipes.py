"""Checks recipes on ranks, all in one start: `python -m tests.check.faulty_recipes FILE.toml ...` prints a line of JSON
for each."""

import json
import sys
from pathlib import Path

import hpctrain
from hpctrain.run.check import check_with


def main() -> None:
    with hpctrain.init(timeout_s=300) as session:
        for path in map(Path, sys.argv[1:]):
            recipe = hpctrain.load_recipe(path)
            report = check_with(session, recipe, recipe_path=path, steps=4, scratch=Path(), quiet=True)
            if session.rank == 0:
                found = [f.cause.name for f in report.findings if f.is_difference]
                text = "\n".join(report.lines())
                print(
                    json.dumps({"name": path.stem, "equal": report.equal, "causes": found, "text": text}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
