"""The commands `hpctrain checkpoint export`, `import`, `export-dcp` and `import-dcp`, for other formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.ranks import all_ranks, progress
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hpctrain.checkpoint import Exported
    from hpctrain.comm import World

# What the commands print of an export.


def print_export(done: Exported, *, as_json: bool) -> None:
    """Prints what was exported and where to, as one line of text or a JSON object."""
    if as_json:
        about = {
            "path": str(done.path),
            "step": done.step,
            "tensors": done.num_tensors,
            "bytes": done.num_bytes,
        }
        typer.echo(json.dumps(about, indent=1))
    else:
        typer.echo(
            f"{done.path}: {done.num_tensors} tensors of step {done.step}, {done.num_bytes / 1e6:.1f} MB"
        )


# `hpctrain checkpoint export` and `import`: convert to and from safetensors files and state dicts.


def export_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a directory, for its newest checkpoint.")],
    target: Annotated[
        Path, typer.Option("--to", help="x.safetensors, or x.pt for a state dict written by torch.save.")
    ],
    weights: Annotated[
        bool, typer.Option("--weights", help="Only the model: the same as --prefix model/.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(help="Only tensors whose names begin with this; it is removed from the names."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a checkpoint's tensors to a safetensors file or a state dict. Verifies the hashes of the bytes it reads.

    safetensors is streamed, and ranks share the work. A state dict is written by rank 0, which holds all of its tensors
    in memory; read it back with torch.load(..., weights_only=True).

    \b
    hpctrain checkpoint export runs/lm/checkpoints --to lm.safetensors --weights
    hpctrain checkpoint export runs/lm/checkpoints/step-00005000.h5 --to lm.pt --prefix model/
    mpirun -n 4 hpctrain checkpoint export runs/lm/checkpoints --to everything.safetensors
    """
    from hpctrain.checkpoint import MODEL_PREFIX, STATE_DICT_SUFFIXES, export_safetensors, export_state_dict

    if weights and prefix is not None:
        raise UsageError("--weights stands for --prefix model/: give one of them", agreed=True)
    as_state_dict = target.name.endswith(STATE_DICT_SUFFIXES)
    if not as_state_dict and target.suffix != ".safetensors":
        raise UsageError(
            f"--to {target}: a name ending in .safetensors or {', '.join(STATE_DICT_SUFFIXES)} is expected",
            agreed=True,
        )
    chosen = MODEL_PREFIX if weights else prefix or ""
    with all_ranks() as world, progress("exported", rank=world.rank) as report:
        _refuse_existing(target, replace=replace, world=world)
        if as_state_dict:
            done = export_state_dict(path, target, comm=world, prefix=chosen)
        else:
            done = export_safetensors(path, target, comm=world, prefix=chosen, progress=report)
        rank = world.rank
    if rank == 0:
        print_export(done, as_json=as_json)


def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="x.safetensors, x.safetensors.index.json, or a state dict of torch.save (.pt, .pth, .bin, .ckpt)."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="The directory to write the checkpoint into.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint [default: the step in a full export].")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Prefix for every name [default: model/; none for a full export]."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Key of the state dict, if the file holds more than that [default: state_dict, as in Lightning's "
            "files]."
        ),
    ] = None,
    strip: Annotated[
        str,
        typer.Option(
            help="Only tensors whose names begin with this; it is removed, before --prefix is added."
        ),
    ] = "",
    files: Annotated[
        int, typer.Option(min=1, help="Number of files; more than 1: a folder of this many files.")
    ] = 1,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing checkpoint of this step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a checkpoint from a safetensors file or a state dict, for `checkpoint.weights_from` in a recipe.

    No code in the file can run: only tensors and plain containers are unpickled, and other objects, as in Lightning's
    checkpoints, are not created. Files are mapped, not read into memory; ranks share the work. Do
    not import into the directory of a running run.

    \b
    hpctrain checkpoint import lm.safetensors start --step 0
    hpctrain checkpoint import pytorch_model.bin start --step 0 --prefix model/backbone.
    hpctrain checkpoint import training.pt start --step 0 --key state_dict
    hpctrain checkpoint import lightning.ckpt start --step 0 --strip model.
    """
    from hpctrain.checkpoint import import_tensors

    with all_ranks() as world:
        saved = import_tensors(
            source,
            directory,
            comm=world,
            step=step,
            prefix=prefix,
            key=key,
            strip=strip,
            files=files,
            replace=replace,
        )
        rank = world.rank
    if rank != 0:
        return
    if as_json:
        typer.echo(json.dumps({"path": str(saved.path), "bytes": saved.bytes}, indent=1))
    else:
        typer.echo(f"{saved.path}: {saved.bytes / 1e6:.1f} MB")


def _refuse_existing(target: Path, *, replace: bool, world: World) -> None:
    """Raises UsageError on every rank if `target` exists and `replace` is False. Rank 0 checks. Collective."""
    from hpctrain.comm import on_rank_0

    if not replace and on_rank_0(world, target.exists, os_error=CheckpointError):
        raise UsageError(f"{target} exists: choose another name, or give --replace", agreed=True)


# `hpctrain checkpoint export-dcp` and `import-dcp`: convert to and from torch.distributed.checkpoint (DCP).


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
    files: Annotated[
        int, typer.Option(min=1, help="Number of files; more than 1: a folder of this many files.")
    ] = 1,
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
