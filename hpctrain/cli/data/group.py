"""`hpctrain data`: pack, info, verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.data.index import index_command
from hpctrain.cli.data.pack import pack_command
from hpctrain.cli.data.progress import Meter, summary_of
from hpctrain.cli.ranks import all_ranks, this_rank
from hpctrain.errors import DataError

if TYPE_CHECKING:
    from hpctrain.data import Damage, Manifest

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
def verify_command(
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
    """Verifies this rank's part. Returns the damages found, as JSON, by dataset directory."""
    from hpctrain.data import find_datasets, verify

    found: dict[str, list[dict[str, Any]]] = {}
    with Meter() as meter:
        for dataset in find_datasets(directory):
            progress = meter.part(dataset) if rank == 0 else None
            damages = verify(dataset, rank=rank, num_ranks=num_ranks, progress=progress)
            found[str(dataset)] = [damage.as_json() for damage in damages]
    return found


def _join(parts: list[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Joins the ranks' findings, in rank order; damages that touch at the border of two parts become one."""
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
