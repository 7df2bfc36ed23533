"""The command group `hpctrain data` and its commands."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.ranks import LINE_INTERVAL_S, all_ranks, this_rank
from hpctrain.data import codec_names
from hpctrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from hpctrain.data import Damage, Manifest

# Helpers of the dataset commands: a one-line summary of a dataset, and progress on stderr.


def summary_of(manifest: Manifest) -> str:
    """Returns the numbers of samples and shards and the size, for example `1,437 samples in 4 shards, 0.5 MB`."""
    shards = len(manifest.shards)
    what = "samples" if manifest.tokens is None else "token windows"
    megabytes = f"{manifest.file_bytes / 1e6:,.1f} MB"
    return f"{manifest.samples:,} {what} in {shards} shard{'s' if shards > 1 else ''}, {megabytes}"


class Meter:
    """Shows progress on stderr: bars on a terminal, else a plain line every few seconds."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._next_line = time.monotonic() + LINE_INTERVAL_S

    def __enter__(self) -> Meter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def part(self, directory: Path) -> Callable[[int, int | None], None]:
        """Returns a callback that takes (amount done, total or None) and shows the progress of one dataset."""
        if self._bars is None:
            return lambda done, total: self._line(directory, done, total)
        task = self._bars.add_task(str(directory), total=None)
        return lambda done, total: self._bars.update(task, completed=done, total=total)

    def _line(self, directory: Path, done: int, total: int | None) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_INTERVAL_S
            share = f" of {total:,}, {100 * done / total:.0f}%" if total else ""
            typer.echo(f"{directory}: {done:,}{share}", err=True)


# `hpctrain data index`: makes a dataset of existing HDF5 files without copying them.


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
        raise UsageError("--stride and --documents need --tokens")
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


# `hpctrain data pack`: makes HDF5 shards from files, tables, images, text or an iterator.


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
    compress: Annotated[str | None, typer.Option(help=f"{codec_names()} [default: contiguous].")] = None,
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
        parse_image_size,
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
        image_size=None if size is None else parse_image_size(size),
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


# `hpctrain data`: pack, info, verify.


data_app = typer.Typer(
    help="""Make, describe and check datasets: HDF5 shards with a manifest.

\b
  hpctrain data pack digits data/digits        handwritten digits -> data/digits/train and data/digits/test
  hpctrain data info data/digits               fields, samples, shards
  hpctrain data verify data/digits             hash every byte again
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)


data_app.command("pack")(pack_command)
data_app.command("index")(index_command)


@data_app.command("info")
def info_command(
    directory: Annotated[Path, typer.Argument(help="A dataset, or the directory above train and test.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the fields, samples and shards of a dataset. Checks the shards' sizes and headers, not their content.

    \b
    hpctrain data info data/digits
    hpctrain data info data/digits/train --json
    """
    from hpctrain.data import Dataset, decoding_in_words, find_datasets, meanings_in_words

    datasets = [Dataset.open(found) for found in find_datasets(directory)]
    if this_rank() != 0:
        return
    if as_json:
        typer.echo(json.dumps([_as_json(d.directory, d.manifest) for d in datasets], indent=1))
        return
    for dataset in datasets:
        manifest = dataset.manifest
        typer.echo(f"{dataset.directory}: {summary_of(manifest)}")
        said = meanings_in_words(dataset.directory, manifest)
        for name, spec in dataset.fields.items():
            typer.echo(f"  field {name}: {spec.dtype} {spec.shape}")
            if decoded := name in manifest.fields and decoding_in_words(manifest, name):
                typer.echo(f"    {decoded}")
            if said.get(name):
                typer.echo(f"    the file says: {said[name]}")
        if manifest.tokens is not None:
            typer.echo(f"  windows of {manifest.tokens.window} + 1 tokens, {manifest.tokens.stride} apart")
        for key, value in manifest.attributes.items():
            typer.echo(f"  {key}: {value}")


@data_app.command("verify")
def verify_dataset_command(
    directory: Annotated[Path, typer.Argument(help="A dataset, or the directory above train and test.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every byte and compare it with the manifest's hashes. Exit code 3 if anything is damaged.

    Several ranks share the work.

    \b
    hpctrain data verify data/digits
    mpirun -n 8 hpctrain data verify data/large
    """
    from hpctrain.comm import agreed, all_gather_json

    with all_ranks() as world:
        part = agreed(
            world,
            lambda: _verify_part(directory, rank=world.rank, num_ranks=world.num_ranks),
            os_error=DataError,
        )
        found = _join(all_gather_json(world, part))
        _report(directory, found, as_json=as_json, is_rank_0=world.rank == 0)


def _verify_part(directory: Path, *, rank: int, num_ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Verifies this rank's part of each dataset. Returns, by dataset directory, the damage that it found, as JSON."""
    from hpctrain.data import find_datasets, verify_dataset

    found: dict[str, list[dict[str, Any]]] = {}
    with Meter() as meter:
        for dataset in find_datasets(directory):
            progress = meter.part(dataset) if rank == 0 else None
            damages = verify_dataset(dataset, rank=rank, num_ranks=num_ranks, progress=progress)
            found[str(dataset)] = [damage.as_json() for damage in damages]
    return found


def _join(parts: list[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Joins the findings of the ranks, in rank order. Damage that continues in the next rank's part is one finding."""
    from hpctrain.data import Damage, merge_damage

    joined: dict[str, list[Damage]] = {}
    for part in parts:
        for dataset, damages in part.items():
            joined.setdefault(dataset, []).extend(Damage(**damage) for damage in damages)
    return {
        dataset: [damage.as_json() for damage in merge_damage(found)] for dataset, found in joined.items()
    }


def _report(
    directory: Path, found: dict[str, list[dict[str, Any]]], *, as_json: bool, is_rank_0: bool
) -> None:
    """Prints the findings on rank 0. Raises DataError on every rank if there are any."""
    from hpctrain.data import Damage

    count = sum(len(damages) for damages in found.values())
    if is_rank_0 and as_json:
        typer.echo(json.dumps({"damaged": count > 0, "datasets": found}, indent=1))
    elif is_rank_0:
        for dataset, damages in found.items():
            typer.echo(f"{dataset}: {'undamaged' if not damages else f'{len(damages)} damaged'}")
            for damage in damages:
                typer.echo(f"  {Damage(**damage).describe()}")
    if count:
        raise DataError(
            f"{directory} is damaged in {count} place{'s' if count > 1 else ''}: "
            "restore the shards, or pack again",
            agreed=True,
        )


def _as_json(directory: Path, manifest: Manifest) -> dict[str, Any]:
    document = manifest.model_dump(mode="json", exclude={"shards"})
    shards = [
        shard.model_dump(mode="json", include={"file", "samples", "file_bytes"}) for shard in manifest.shards
    ]
    return {"directory": str(directory), **document, "file_bytes": manifest.file_bytes, "shards": shards}
