"""`hpctrain data index`: HDF5 files of others as a dataset, where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.data.progress import Meter, summary_of
from hpctrain.cli.ranks import all_ranks
from hpctrain.errors import UsageError


def index_command(
    files: Annotated[list[str], typer.Argument(help="HDF5 files, globs in quotes ('**' too), directories.")],
    fields: Annotated[
        str,
        typer.Option(
            help="NAME=/PATH of each field, with ':MEMBER' of tables and '*' for groups, as x=/*/image."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the index.")],
    samples: Annotated[
        str | None,
        typer.Option(help="What a sample is: rows, file or groups [default: groups with '*', else rows]."),
    ] = None,
    pad: Annotated[
        str, typer.Option(help="Fields, by comma, padded where the first dimension of samples differs.")
    ] = "",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="The field is a stream of tokens: how many a sample predicts.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from one sample to the next [default: --tokens].")
    ] = None,
    documents: Annotated[
        str | None, typer.Option(help="Dataset with the tokens at which documents begin: none is crossed.")
    ] = None,
    read_content: Annotated[
        bool, typer.Option("--hash", help="Read everything once: hashes for verify, statistics of fields.")
    ] = False,
    relative: Annotated[
        bool, typer.Option("--relative", help="Note the files' paths relative to OUT.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an index that is there.")] = False,
) -> None:
    """Make a dataset of HDF5 files where they lie, without copying them: rows, files or groups are samples.

    Started as several ranks, they share the work.

    \b
    hpctrain data index 'files/*.h5' --fields x=/images,y=/labels --out data/mine
    hpctrain data index 'scans/*.h5' --fields x=/volume,y=/label --samples file --out data/scans
    hpctrain data index all.h5 --fields 'x=/*/image,y=/*/label' --out data/groups
    mpirun -n 8 hpctrain data index 'many/**/*.h5' --fields x=/x --samples file --hash --out data/many
    hpctrain data index 'text/*.h5' --fields tokens=/tokens --tokens 1024 --documents /starts --out data/text
    """
    from hpctrain.data.indexing.index_files import OldIndex, Paths, Reading, index_files
    from hpctrain.data.indexing.request import SampleIs, parse_fields
    from hpctrain.data.indexing.token_files import TokenRequest

    if samples is not None and samples not in [kind.value for kind in SampleIs]:
        raise UsageError(f"--samples {samples}: rows, file or groups is expected")
    if tokens is None and (stride is not None or documents is not None):
        raise UsageError("--stride and --documents belong to --tokens")
    with all_ranks() as world, Meter() as meter:
        indexed = index_files(
            out,
            files=files,
            fields=parse_fields(fields, padded=[name for name in pad.split(",") if name]),
            samples=None if samples is None else SampleIs(samples),
            tokens=None
            if tokens is None
            else TokenRequest(window=tokens, stride=stride or tokens, documents=documents),
            reading=Reading.CONTENT if read_content else Reading.HEADERS,
            paths=Paths.RELATIVE if relative else Paths.ABSOLUTE,
            old=OldIndex.REPLACE if overwrite else OldIndex.REFUSE,
            progress=meter.part(out) if world.rank == 0 else None,
            comm=world,
        )
    if world.rank != 0:
        return
    typer.echo(f"{out}: {summary_of(indexed.manifest)}")
    if indexed.too_short:
        names = ", ".join(indexed.too_short[:3]) + (", ..." if len(indexed.too_short) > 3 else "")
        typer.echo(f"{len(indexed.too_short)} files are too short for a window and left out: {names}")
