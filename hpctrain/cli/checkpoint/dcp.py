"""`hpctrain checkpoint export-dcp` and `import-dcp`: convert to and from torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.checkpoint.print_export import print_export
from hpctrain.cli.ranks import all_ranks, progress

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def export_dcp_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a directory, for its newest checkpoint.")],
    directory: Annotated[Path, typer.Argument(help="The directory to make: it must not exist, or be empty.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Only the model, under the keys of its own state dict.")
    ] = False,
    under: Annotated[str, typer.Option(help="Put this and a dot before every key, such as app.")] = "",
    as_json: _AsJson = False,
) -> None:
    """Write a checkpoint for torch.distributed.checkpoint: dcp.load reads it on any ranks, with FSDP or without.

    Keys are those of {"model": ..., "optim": ...} as get_state_dict makes them. Ranks share the work. The hashes of the
    bytes are verified.

    \b
    hpctrain checkpoint export-dcp runs/lm/checkpoints fsdp/start
    hpctrain checkpoint export-dcp runs/lm/checkpoints fsdp/weights --weights
    mpirun -n 8 hpctrain checkpoint export-dcp runs/lm/checkpoints/step-00005000.h5 fsdp/start --under app
    """
    from hpctrain.checkpoint import export_dcp

    with all_ranks() as world, progress("exported", rank=world.rank) as report:
        done = export_dcp(path, directory, comm=world, weights=weights, under=under, progress=report)
        rank = world.rank
    if rank == 0:
        print_export(done, as_json=as_json)


def import_dcp_command(
    source: Annotated[Path, typer.Argument(help="The directory that torch.distributed.checkpoint saved to.")],
    directory: Annotated[Path, typer.Argument(help="The directory to write the checkpoint into.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint [default: the step in an export].")
    ] = None,
    under: Annotated[
        str, typer.Option(help="Import only the keys below this one, such as app or model.")
    ] = "",
    files: Annotated[int, typer.Option(min=1, help="More than 1: a folder of this many files.")] = 1,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing checkpoint of this step.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            " /--no-verify",
            help="Skip the CRC-32 of tensors: for files written with set_crc32_options(False).",
        ),
    ] = True,
    as_json: _AsJson = False,
) -> None:
    """Make a checkpoint from one of torch.distributed.checkpoint, for `checkpoint.weights_from` or your own loop.

    Nothing in it is unpickled, so no code in it can run. Files are mapped, not read into memory; ranks share the work.
    What is not a tensor goes into the document; objects that are not plain data are left out and named. Do not import
    into the directory of a running run.

    \b
    hpctrain checkpoint import-dcp fsdp/step-500 start --step 500
    hpctrain checkpoint import-dcp fsdp/step-500 start --step 500 --under app
    mpirun -n 8 hpctrain checkpoint import-dcp fsdp/step-500 start --step 500 --files 8
    """
    from hpctrain.checkpoint import import_dcp

    with all_ranks() as world:
        done = import_dcp(
            source,
            directory,
            comm=world,
            step=step,
            under=under,
            files=files,
            replace=replace,
            verify=verify,
        )
        rank = world.rank
    if rank != 0:
        return
    saved = done.saved
    if as_json:
        about = {
            "path": str(saved.path),
            "bytes": saved.bytes,
            "tensors": done.num_tensors,
            "left_out": dict(done.left_out),
        }
        typer.echo(json.dumps(about, indent=1))
        return
    for key, reason in done.left_out.items():
        typer.echo(f"left out: {json.dumps(key)[1:-1]}: {json.dumps(reason)[1:-1]}")
    typer.echo(f"{saved.path}: {done.num_tensors} tensors, {saved.bytes / 1e6:.1f} MB")
