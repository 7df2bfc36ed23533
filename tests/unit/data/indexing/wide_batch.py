"""Judges wide random files: `python -m tests.unit.data.indexing.wide_batch FOLDER FIRST COUNT [plain]`.

Writes into FOLDER/lines a line of JSON for each file: its number, "begun"; then number, outcome and text. With `plain`
h5py alone writes and reads the files, to find out whether HDF5 itself crashes.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

from tests.unit.data.hdf5.h5py_reads import wanted
from tests.unit.data.hdf5.random_files import CannotMakeError
from tests.unit.data.hdf5.wide_files import make_wide_file


def main(folder: Path, first: int, count: int, *, plain: bool) -> None:
    faulthandler.enable()
    lines = (folder / "lines").open("w")  # HDF5 writes to stdout
    for number in range(first, first + count):
        print(json.dumps([number, "begun", ""]), file=lines, flush=True)
        if plain:
            said, text = "read", ""
            try:
                path = folder / f"{number}.h5"
                wanted(path, make_wide_file(path, number=number))
            except CannotMakeError as error:
                said, text = "not made", str(error)
        else:
            from tests.unit.data.indexing.test_random_files import outcome

            said, text = outcome(folder, number=number, make=make_wide_file)
        print(json.dumps([number, said, text]), file=lines, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), plain="plain" in sys.argv[4:])
