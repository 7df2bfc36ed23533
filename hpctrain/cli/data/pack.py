"""`hpctrain data pack`: makes HDF5 shards from files, tables, images, text or an iterator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.data.progress import Meter, summary_of
from hpctrain.cli.ranks import all_ranks
from hpctrain.errors import UsageError


def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            help="digits, python-source, X.npz, X.npy, X.csv, X.parquet, text:DIR, images:DIR, npy:DIR (one array "
            "per field), npy-files:DIR (one file per sample), parquet:DIR, or module:function that yields dicts."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Directory of the dataset.")],
    window: Annotated[
        int | None, typer.Option(min=1, help="For text: tokens that a sample predicts [default: 128].")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from one sample to the next [default: the window].")
    ] = None,
    boundaries: Annotated[
        str | None,
        typer.Option(help="For text: ignore file boundaries, or split (no sample has tokens of two files)."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH of images [default: as they are, all of one size].")
    ] = None,
    colour: Annotated[str | None, typer.Option(help="For images: rgb or grey [default: rgb].")] = None,
    fields: Annotated[
        str | None,
        typer.Option(help="For tables: FIELD=COLUMN+COLUMN:DTYPE,... [default: a field for each column]."),
    ] = None,
    parts: Annotated[
        int | None,
        typer.Option(min=1, help="For module:function(part, num_parts): parts to pack [default: 1]."),
    ] = None,
    shard_mb: Annotated[
        float, typer.Option("--shard-mb", help="Maximum size of a shard in MB (10^6 bytes).")
    ] = 256.0,
    compress: Annotated[str | None, typer.Option(help="gzip or zstd [default: contiguous].")] = None,
    chunk_samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per compressed chunk [default: 256 KiB of them].")
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            "--held-out",
            help="Fraction of the samples held out as OUT/test; 0 packs all samples into OUT itself "
            "[default: digits 0.2, text 0.1, others 0].",
        ),
    ] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Pack samples in random order, for training that reads blocks.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the held-out choice and of the shuffled order.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted packing; complete shards are kept.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")] = False,
) -> None:
    """Pack SOURCE into HDF5 shards with a manifest. Several ranks share the work.

    \b
    hpctrain data pack digits data/digits
    hpctrain data pack python-source data/python --window 128
    hpctrain data pack arrays.npz data/mine --held-out 0.1 --shard-mb 512
    hpctrain data pack text:books data/books --stride 64 --boundaries split
    hpctrain data pack images:photos data/photos --size 224x224 --shuffle
    hpctrain data pack table.parquet data/table --fields x=a+b:float32,y=kind
    mpirun -n 8 hpctrain data pack simulation:samples data/simulated --compress zstd --resume
    """
    from hpctrain.data import (
        ChunkCodec,
        Colour,
        Existing,
        SourceOptions,
        pack_source,
        parse_size,
        parse_table_fields,
    )

    if shard_mb * 1e6 < 1:
        raise UsageError(f"--shard-mb {shard_mb}: a shard holds at least one byte")
    if resume and overwrite:
        raise UsageError(
            "--resume keeps existing shards, --overwrite replaces them: give only one of the two"
        )
    if boundaries not in (None, "ignore", "split"):
        raise UsageError(f"--boundaries {boundaries}: ignore or split is expected")
    options = SourceOptions(
        image_size=None if size is None else parse_size(size),
        colour=None if colour is None else Colour(_one_of("--colour", colour, [c.value for c in Colour])),
        fields=None if fields is None else parse_table_fields(fields),
        num_parts=parts,
    )
    codec = (
        None
        if compress is None
        else ChunkCodec(_one_of("--compress", compress, [c.value for c in ChunkCodec]))
    )
    with all_ranks() as world, Meter() as meter:
        manifests = pack_source(
            source,
            out=out,
            window=window,
            stride=stride,
            boundaries=boundaries,  # type: ignore[arg-type]  # checked above
            shard_bytes=int(shard_mb * 1e6),
            held_out=held_out,
            seed=seed,
            shuffle=shuffle,
            options=options,
            codec=codec,
            chunk_samples=chunk_samples,
            existing=Existing.RESUME if resume else Existing.REPLACE if overwrite else Existing.REFUSE,
            progress=meter.part,
            comm=world,
        )
    if world.rank == 0:
        for directory, manifest in manifests.items():
            typer.echo(f"{directory}: {summary_of(manifest)}")


def _one_of(option: str, value: str, possible: list[str]) -> str:
    if value not in possible:
        raise UsageError(f"{option} {value}: {' or '.join(possible)} is expected")
    return value
