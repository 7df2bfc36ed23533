"""`hpctrain data index`: makes a dataset of existing HDF5 files without copying them."""

from __future__ import annotations

import warnings
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
            help="NAME=/PATH of each field, with ':MEMBER' of tables and '*' for groups, as x=/*/image. "
            r"NAME:cf= and NAME:raw= decode one field; '\:' and '\,' belong to a name."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the index.")],
    samples: Annotated[
        str | None,
        typer.Option(help="Unit of a sample: rows, file or groups [default: groups with '*', else rows]."),
    ] = None,
    pad: Annotated[
        str,
        typer.Option(help="Fields to pad where the samples' first dimension differs, separated by commas."),
    ] = "",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The field is a stream of tokens: tokens that a sample predicts."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from one sample to the next [default: --tokens].")
    ] = None,
    documents: Annotated[
        str | None, typer.Option(help="HDF5 dataset with each document's first token: no sample spans two.")
    ] = None,
    read_content: Annotated[
        bool, typer.Option("--hash", help="Read all content once, for verify's hashes and field statistics.")
    ] = False,
    relative: Annotated[
        bool, typer.Option("--relative", help="Record the files' paths relative to OUT.")
    ] = False,
    decode: Annotated[
        str | None,
        typer.Option(
            help="cf: decode values as the files' attributes and masks say; raw: read them as stored, without a note."
        ),
    ] = None,
    missing: Annotated[
        str,
        typer.Option(
            help="With cf, what missing values become: nan, a number, or mask (a field NAME.mask); auto: nan, but "
            "netCDF's integers without a fill value stay integers."
        ),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing index.")] = False,
) -> None:
    """Make a dataset of existing HDF5 files without copying them. A sample is a row, a file or a group.

    Several ranks share the work.

    \b
    hpctrain data index 'files/*.h5' --fields x=/images,y=/labels --out data/mine
    hpctrain data index 'scans/*.h5' --fields x=/volume,y=/label --samples file --out data/scans
    hpctrain data index all.h5 --fields 'x=/*/image,y=/*/label' --out data/groups
    hpctrain data index 'era5/*.nc' --fields t=/t2m --decode cf --out data/weather
    mpirun -n 8 hpctrain data index 'many/**/*.h5' --fields x=/x --samples file --hash --out data/many
    hpctrain data index 'text/*.h5' --fields tokens=/tokens --tokens 1024 --documents /starts --out data/text
    """
    from hpctrain.data import (
        IndexPaths,
        IndexReading,
        OldIndex,
        SampleIs,
        TokenRequest,
        ValuesWarning,
        decoding_in_words,
        index_files,
        parse_decode,
        parse_field_paths,
        parse_missing,
    )

    if samples is not None and samples not in [kind.value for kind in SampleIs]:
        raise UsageError(f"--samples {samples}: rows, file or groups is expected")
    if tokens is None and (stride is not None or documents is not None):
        raise UsageError("--stride and --documents belong to --tokens")
    with all_ranks() as world, Meter() as meter, warnings.catch_warnings():
        warnings.simplefilter("ignore", ValuesWarning)  # printed below, as notes
        indexed = index_files(
            out,
            files=files,
            fields=parse_field_paths(
                fields,
                padded=[name for name in pad.split(",") if name],
                decode=None if decode is None else parse_decode(decode),
                missing=parse_missing(missing),
            ),
            samples=None if samples is None else SampleIs(samples),
            tokens=None
            if tokens is None
            else TokenRequest(window=tokens, stride=stride or tokens, documents=documents),
            reading=IndexReading.CONTENT if read_content else IndexReading.HEADERS,
            paths=IndexPaths.RELATIVE if relative else IndexPaths.ABSOLUTE,
            old=OldIndex.REPLACE if overwrite else OldIndex.REFUSE,
            progress=meter.part(out) if world.rank == 0 else None,
            comm=world,
        )
    if world.rank != 0:
        return
    typer.echo(f"{out}: {summary_of(indexed.manifest)}")
    for name in indexed.manifest.decoding:
        typer.echo(f"field {name} is {decoding_in_words(indexed.manifest, name)}")
    if indexed.too_short:
        names = ", ".join(indexed.too_short[:3]) + (", ..." if len(indexed.too_short) > 3 else "")
        typer.echo(f"{len(indexed.too_short)} files are shorter than one window and were left out: {names}")
    for note in indexed.notes:
        typer.echo(note, err=True)
