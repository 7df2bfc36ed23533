"""Makes a checkpoint from a safetensors file or a torch state dict, which is memory-mapped, not read into memory."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first, step_of
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.state import Replicated, State
from hpctrain.checkpoint.loading.check_structure import is_checkpoint
from hpctrain.checkpoint.loading.partial_load import MODEL_PREFIX
from hpctrain.checkpoint.operations.mapped_tensors import save_in_files
from hpctrain.checkpoint.saving.save import SaveResult
from hpctrain.comm import Collective, agreed, on_rank_0
from hpctrain.errors import CheckpointError, UsageError

INDEX_SUFFIX = ".safetensors.index.json"
STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_INDEX_BYTES = 256 << 20
MAX_REPEATED = 16
MIN_CLAIM_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Foreign:
    """Content of another program's file. step, document: set only if `export_safetensors` wrote the file, with all
    tensors."""

    tensors: Mapping[str, torch.Tensor]
    step: int | None = None
    document: Mapping[str, Any] | None = None


def import_tensors(
    source: Path | str,
    directory: Path | str,
    *,
    comm: Collective,
    step: int | None = None,
    prefix: str | None = None,
    key: str | None = None,
    files: int = 1,
    replace: bool = False,
    **options: Any,
) -> SaveResult:
    """Makes the checkpoint `directory/step-<step>` from the tensors in `source`. Collective.

    The files are memory-mapped; only torch's file format before 1.6 is read into memory, on every rank. Other
    checkpoints in `directory` are kept.

    Args:
        source: x.safetensors, x.safetensors.index.json (several files), or a state dict written by torch.save (x.pt,
            .pth, .bin, .ckpt), which is read with weights_only=True, so it cannot run code.
        step: required unless the file is a whole checkpoint written by `export_safetensors`.
        prefix: prepended to every name. Default: `model/`, where a run looks for weights; "" for a whole checkpoint.
        key: key of the state dict in a file that holds several objects.
        files: 1: one file; a larger number: a folder of so many files.
        replace: replace a checkpoint of the same step.
        options: options of `save`.

    Raises UsageError or CheckpointError on every rank.
    """
    source, directory = Path(source), Path(directory)
    foreign = agreed(comm, lambda: read_foreign(source, key=key), os_error=CheckpointError)
    step = foreign.step if step is None else step
    if step is None:
        raise UsageError(f"{source} does not record a step: give --step", agreed=True)
    on_rank_0(comm, lambda: refuse_existing(directory, step=step, replace=replace))
    if prefix is None:
        prefix = MODEL_PREFIX if foreign.document is None else ""
    document = foreign.document
    if document is None:
        document = {"imported": {"file": source.name, "num_tensors": len(foreign.tensors)}}
    items = [
        Replicated(name=f"{prefix}{name}", tensor=tensor.detach()) for name, tensor in foreign.tensors.items()
    ]
    state = State(items=items, document=document)
    return save_in_files(
        lambda rank, num_ranks: state, directory=directory, step=step, files=files, comm=comm, **options
    )


def refuse_existing(directory: Path, *, step: int, replace: bool) -> None:
    """Raises CheckpointError if there is a checkpoint of this step and `replace` is False, and UsageError if
    `directory` is a checkpoint or is named like one. Rank 0."""
    if directory.suffix == ".h5" or is_checkpoint(directory):
        raise UsageError(
            f"{directory}: give the directory to put it in; a checkpoint is named after its step"
        )
    there = [path for path in finished_newest_first(directory) if step_of(path) == step]
    if there and not replace:
        raise CheckpointError(f"{there[0]} exists: choose another step or directory, or give --replace")


def read_foreign(source: Path, *, key: str | None = None) -> Foreign:
    """Returns the content of a file, with memory-mapped tensors. Not collective. Raises CheckpointError if the file is
    invalid, and UsageError if its kind is not supported."""
    if not source.is_file():
        raise CheckpointError(f"{source} is not a file")
    if source.name.endswith(STATE_DICT_SUFFIXES):
        return Foreign(tensors=_read_state_dict(source, key=key))
    if key is not None:
        raise UsageError(f"--key is only for files written by torch.save; {source.name} is not one")
    if source.name.endswith(INDEX_SUFFIX):
        return _read_index(source)
    if source.suffix == ".safetensors":
        return _read_safetensors(source)
    raise UsageError(
        f"{source.name}: a name ending in .safetensors, {INDEX_SUFFIX} or {', '.join(STATE_DICT_SUFFIXES)} is expected"
    )


def _read_safetensors(source: Path) -> Foreign:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"reading {source.name} needs safetensors (pip install 'hpctrain[formats]'): {error}"
        ) from error
    try:
        with explained(action="read", path=source), safe_open(source, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{source} is not a valid safetensors file: {error}") from error
    if "document" not in about or "hpctrain" not in about:
        return Foreign(tensors=tensors)
    try:
        document, step = json.loads(about["document"]), int(about["step"])
    except (ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{source}: its step or document is invalid: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{source}: its document is not a JSON object")
    return Foreign(tensors=tensors, step=step, document=document)


def _read_index(source: Path) -> Foreign:
    """Reads tensors from several files: the index maps each name to a file in its folder."""
    try:
        with explained(action="read", path=source), open(source, "rb") as file:
            by_name = json.loads(file.read(MAX_INDEX_BYTES))["weight_map"]
        files = sorted(set(by_name.values()))
        # The index must not make us open files outside its folder.
        if not all(isinstance(name, str) and name == Path(name).name and name != ".." for name in files):
            raise ValueError("a file in it is not a plain file name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{source} is not an index of safetensors files: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        found = _read_safetensors(source.with_name(name)).tensors
        tensors.update((tensor, found[tensor]) for tensor in found if by_name.get(tensor) == name)
    missing = sorted(by_name.keys() - tensors.keys())
    if missing:
        raise CheckpointError(
            f"{source}: {by_name[missing[0]]} should hold {missing[0]!r}, but it does not"
            + (f"; and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return Foreign(tensors=tensors)


def _read_state_dict(source: Path, *, key: str | None) -> dict[str, torch.Tensor]:
    with explained(action="open", path=source), open(source, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # otherwise torch's format before 1.6, which cannot be mapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    # Any exception: a malicious file can make the restricted unpickler raise anything.
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:300]
        raise CheckpointError(
            f"{source} cannot be read as a state dict: {type(error).__name__}: {text} (only tensors and plain "
            "containers are accepted: weights_only=True)"
        ) from error
    where = source.name
    if key is not None:
        if not isinstance(value, Mapping) or key not in value:
            raise CheckpointError(f"{where} has no entry {key!r}; {_entries(value)}")
        value, where = value[key], f"{where}[{key!r}]"
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} is a {type(value).__name__}, not a state dict")
    others = [name for name, item in value.items() if not isinstance(item, torch.Tensor)]
    if others or not value:
        raise CheckpointError(
            f"{where} is not a plain state dict: {_entries(value)}. Name the entry to import with --key"
        )
    _refuse_odd(value, source=source)
    return {str(name): tensor for name, tensor in value.items()}


def _refuse_odd(tensors: Mapping[Any, torch.Tensor], *, source: Path) -> None:
    """Raises CheckpointError for names that collide, nested tensors, and tensors far larger than the file."""
    if len({str(name) for name in tensors}) < len(tensors):
        raise CheckpointError(f"{source}: two of its keys are equal as strings, such as 1 and '1'")
    nested = [name for name, tensor in tensors.items() if tensor.is_nested]
    if nested:
        raise CheckpointError(f"{source}: {nested[0]!r} is a nested tensor: only dense ones can be stored")
    # With strides of 0 a tensor can repeat a few bytes any number of times, and several tensors can share bytes.
    claimed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    file_bytes = source.stat().st_size
    if claimed_bytes > max(MAX_REPEATED * file_bytes, MIN_CLAIM_BYTES):
        raise CheckpointError(
            f"{source} is {file_bytes} bytes long, but the total size of its tensors is {claimed_bytes}: more than "
            f"{MAX_REPEATED} times as long"
        )


def _entries(value: Any) -> str:
    """Describes the content of `value` for a message."""
    if not isinstance(value, Mapping):
        return f"it is a {type(value).__name__}"
    kinds = [f"{name!r} ({type(item).__name__})" for name, item in list(value.items())[:8]]
    more = f", and {len(value) - 8} more" if len(value) > 8 else ""
    return f"it holds {', '.join(kinds)}{more}" if kinds else "it is empty"
