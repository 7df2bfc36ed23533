"""`run.compile`: compiles the model's forward with torch.compile, on one rank of each node before the others.

All gradients of compiled code are ready at once, at the end of its backward, since autograd sees one operation. So that
they are summed while backward continues, each repeated block of a model is compiled by itself. The reasons and
measurements are in docs/adr/0078-compiled-models.md.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch

from hpctrain.data import Batch, Loader, PositionRange
from hpctrain.distributed import repeated_blocks
from hpctrain.errors import LaunchError, RecipeError
from hpctrain.reduce import DEFAULT_BUCKET_BYTES, gradient_bytes
from hpctrain.resilience import shortage
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session
from hpctrain.storage import filesystem_of
from hpctrain.telemetry import tell
from hpctrain.train import Runner, TaskRunner, capture_generators, restore_generators

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILER_VARIABLE = "CXX"
_THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
# Each shape has its own code, so that the code of a step does not depend on earlier steps: torch's default, 8, is soon
# reached by the last batch of an epoch, evaluations and micro-batches. Beyond the limit torch does not compile.
_MAX_SHAPES = 64
_WITHOUT = "leave run.compile out"


# Before the run: a compiler, and a folder for what is compiled.


def prepare_to_compile(session: Session, *, environ: MutableMapping[str, str] = os.environ) -> None:
    """Checks that this rank can compile, and sets the folder of torch's cache in `environ`. Not collective.

    Raises LaunchError if the rank has no compiler, or no folder that belongs to the user alone.
    """
    if session.device.type == "cuda":
        if find_spec("triton") is None:
            raise LaunchError(
                "run.compile = true on a GPU needs the package triton, which is not installed for this Python: "
                f"install PyTorch's build for CUDA or ROCm, which depends on it, or {_WITHOUT}"
            )
    else:
        _check_compiler(environ)
    if not session.leads_node:  # it finds in the cache what the node's first rank has compiled
        environ.setdefault(_THREADS_VARIABLE, "1")
    if environ.get(CACHE_VARIABLE):
        return
    directory = _private_folder(environ)
    environ[CACHE_VARIABLE] = str(directory)
    kind = filesystem_of(directory)
    if kind.is_shared:
        session.note(
            f"run.compile: {directory}, where compiled code is kept, is on a filesystem that nodes share "
            f"({kind.kind}): set TMPDIR to a folder on the node's own disk"
        )


def _check_compiler(environ: MutableMapping[str, str]) -> None:
    """Raises LaunchError if torch will find no C++ compiler."""
    given = environ.get(_COMPILER_VARIABLE)
    usual = "clang++" if sys.platform == "darwin" else "g++"  # as in torch's `torch._inductor.config.cpp.cxx`
    if shutil.which(given or usual, path=environ.get("PATH")) is not None:
        return
    looked_for = (
        f"{_COMPILER_VARIABLE} = {given}" if given else f"{usual}, as {_COMPILER_VARIABLE} is not set"
    )
    raise LaunchError(
        f"run.compile = true needs a C++ compiler on every node. Looked for: {looked_for}; it is not in the folders of "
        f"PATH. Load a module with a compiler in the job, set {_COMPILER_VARIABLE} to a compiler, or {_WITHOUT}"
    )


def _private_folder(environ: MutableMapping[str, str]) -> Path:
    """Creates and returns a folder on the node's own disk, in which only this user can write.

    torch runs, and unpickles, the files of this folder. All runs of the user on the node share the folder: there is a
    subfolder per PyTorch version and number of threads, and torch finds files by what was compiled.
    """
    parent = Path(environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    own = parent / f"hpctrain-compiled-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if own.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise LaunchError(
            f"run.compile: others can write to {own}, whose files torch runs: remove it, or set {CACHE_VARIABLE} to a "
            "folder of your own on the node's disk"
        )
    # Code is made for a number of threads, which old releases of torch do not compare.
    directory = own / f"torch-{torch.__version__}-{torch.get_num_threads()}-threads"
    directory.mkdir(exist_ok=True)
    return directory


# The compiled model.


@final
class _CompiledForward:
    """The compiled `forward` of a module, which replaces the method. A copy of the module has the plain method."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # `dynamic=None` would replace the code of the first shape as soon as there is a second one, and a run that
        # resumes in between would calculate with other code than a run without interruption.
        self._call = torch.compile(module.forward, dynamic=False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def compile_pieces(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Replaces `forward` of each repeated block by its compiled form; without blocks, `forward` of the model.

    Returns the modules whose `forward` was replaced. torch compiles at the first call with each shape. Equal blocks
    have the same code. Hooks of the modules run as before, outside of the compiled code. Parameters, buffers and their
    names stay.
    """
    from torch._dynamo import config  # takes a second, and nothing else needs it

    config.recompile_limit = max(config.recompile_limit, _MAX_SHAPES)
    pieces = list(repeated_blocks(model).values()) or [model]
    for piece in pieces:
        # Not `piece.compile()`, with which torch skips modules that only consist of its own, such as a Sequential.
        piece.forward = _CompiledForward(piece)
    return pieces


def check_compilable(model: torch.nn.Module, runner: Runner, *, target: str) -> None:
    """Raises RecipeError if the task's model cannot be compiled, or if one rank cannot compile it before the others."""
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        which = f"its module {scripted[0]!r} is" if scripted[0] else "it is"
        raise RecipeError(
            f"run.compile = true: the model of {target} cannot be compiled, since {which} already compiled by "
            f"torch.jit.script: return the model without torch.jit, or {_WITHOUT}"
        )
    if runner.communicates:
        raise RecipeError(
            f"run.compile = true: forward of the model of {target} communicates (batch normalisation over the ranks), "
            f"so one rank cannot compile it before the others: {_WITHOUT}"
        )


# Once per node.


def compile_on_each_node(
    recipe: Recipe, model: torch.nn.Module, *, session: Session, runner: Runner, loader: Loader, epoch: int
) -> None:
    """Compiles the model's forward and backward for the first batch of `epoch`. Collective.

    The first rank of each node compiles, while the others wait no longer than the time limit of the start. Then the
    others load the code from the node's cache. The task's `loss` is called once on each rank for each size of a
    micro-batch. Nothing of the model, its gradients or the random generators changes.

    Raises RecipeError on every rank if the model cannot be compiled, DataError if the batch cannot be read.
    """
    target = recipe.task.target
    session.agreed(lambda: check_compilable(model, runner, target=target), os_error=RecipeError)
    assert isinstance(runner, TaskRunner)
    first = session.agreed(lambda: _first_batch(loader, epoch=epoch), os_error=LaunchError)
    parts = {part.num_samples: part for part in first.split(recipe.data.micro_batches) if part.num_samples}

    def compute() -> int:
        pieces = compile_pieces(model)
        _try_out(runner, list(parts.values()), target=target)
        return len(pieces)

    began = time.perf_counter()
    with session.doing("run.compile: the first rank of each node compiles the model"):
        num_pieces = session.agreed(lambda: compute() if session.leads_node else None, os_error=LaunchError)
    compiled = time.perf_counter()
    with session.doing("run.compile: the other ranks of each node load the compiled model"):
        session.agreed(lambda: None if session.leads_node else compute(), os_error=LaunchError)
    ended = time.perf_counter()
    if session.rank == 0:
        what = "its blocks one by one" if num_pieces != 1 else "as a whole"
        others = f", on the others in {ended - compiled:.1f} s" if session.world_size > 1 else ""
        tell(
            f"compiled the model, {what}, on the first rank of each node in {compiled - began:.1f} s{others}; cache: "
            f"{os.environ[CACHE_VARIABLE]}"
        )
    if num_pieces == 1 and session.world_size > 1 and gradient_bytes(model) > _bucket_bytes(recipe):
        session.note(
            "run.compile: the model has no repeated blocks and is compiled as a whole, so its gradients are summed "
            f"after backward, not during it. If {target} has a method parallel_blocks(self) that returns names of "
            "modules, each of these is compiled by itself"
        )


def _bucket_bytes(recipe: Recipe) -> int:
    given = recipe.reduction.bucket_mb
    return DEFAULT_BUCKET_BYTES if given is None else int(given * 1e6)


def _first_batch(loader: Loader, *, epoch: int) -> Batch:
    """Reads this rank's part of the first batch of an epoch. Reading a `CollectiveDataset` is collective."""
    order = loader.order.for_epoch(epoch, num_samples=loader.dataset.num_samples, seed=loader.seed)
    return loader.load(order, span=PositionRange(0, min(loader.global_batch, loader.num_positions)))


def _try_out(runner: TaskRunner, parts: list[Batch], *, target: str) -> None:
    """Computes loss and gradients of each micro-batch, and drops them. Raises RecipeError if torch cannot compile."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    trained = [parameter for parameter in runner.model.parameters() if parameter.requires_grad]
    with _unchanged(runner.model, device=runner.device):
        try:
            for part in parts:
                loss = runner.loss(part)
                if loss.requires_grad:
                    # Unlike `backward` this changes no `.grad` and calls no hook of an updater.
                    torch.autograd.grad(loss, trained, allow_unused=True)
        except (TorchDynamoException, CppCompileError, InvalidCxxCompiler) as error:
            traceback.print_exc()
            raise RecipeError(
                f"run.compile = true: torch.compile cannot compile the model of {target}: {_in_short(error)}. The "
                f"whole error is above. {_WITHOUT[0].upper()}{_WITHOUT[1:]}, or change the model"
            ) from error
        except (RuntimeError, MemoryError) as error:
            if shortage(error) is None:  # otherwise training computes smaller micro-batches
                raise


def _in_short(error: Exception) -> str:
    """Returns the first line of an error of torch's compiler, and the first line of the C++ compiler's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines[1:] if "error:" in line.lower()), None)
    first = lines[0] if lines else ""
    return " ".join(filter(None, [type(error).__name__, first, said])).rstrip(".")[:500]


@contextmanager
def _unchanged(model: torch.nn.Module, *, device: torch.device) -> Iterator[None]:
    """Restores buffers and random generators after the `with` block."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    generators = capture_generators(device)
    try:
        yield
    finally:
        restore_generators(generators, device=device, otherwise=0)
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer  # forward may have replaced it
                buffer.copy_(before)
