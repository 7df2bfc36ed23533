"""Checks recipes on ranks, all in one start: `python -m tests.check.faulty_recipes FILE.toml ...` prints a line of JSON
for each."""

import sys
from pathlib import Path

import hpctrain
from hpctrain.run.check import check_with
from tests.check.faulty_loops import print_line


def main() -> None:
    with hpctrain.init(timeout_s=300) as session:
        for path in map(Path, sys.argv[1:]):
            recipe = hpctrain.load_recipe(path)
            report = check_with(session, recipe, recipe_path=path, steps=4, scratch=Path(), quiet=True)
            if session.rank == 0:
                print_line(path.stem, report)


if __name__ == "__main__":
    main()
