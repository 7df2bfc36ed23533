"""The private names of PyTorch that hpctrain uses: all of them, each with a test that fails in words without it.

What to do when one fails: docs/dependencies.md, "A new release of PyTorch".
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpctrain.distributed.process_group import CommunicatorGroup

SOURCE = Path(__file__).parents[2] / "hpctrain"


def module(path: str) -> Any:
    return importlib.import_module(path)


def root_mesh() -> object:
    """A mesh's own method, or, in PyTorch 2.8, what knows all meshes."""
    meshes = module("torch.distributed.device_mesh")
    return getattr(meshes.DeviceMesh, "_get_root_mesh", None) or meshes._mesh_resources.get_root_mesh


def scheduled_step() -> Any:
    """The method that a learning rate scheduler puts in place of an optimizer's step."""
    optimizer = torch.optim.SGD([torch.ones(1)])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer.step


# Where each is.
NAMES: dict[str, Callable[[], object]] = {
    "_BatchNorm": lambda: module("torch.nn.modules.batchnorm")._BatchNorm,
    "_C": lambda: torch._C,
    "_DropoutNd": lambda: module("torch.nn.modules.dropout")._DropoutNd,
    "_NormBase": lambda: module("torch.nn.modules.batchnorm")._NormBase,
    "_LazyNormBase": lambda: module("torch.nn.modules.batchnorm")._LazyNormBase,
    "_StorageInfo": lambda: module("torch.distributed.checkpoint.filesystem")._StorageInfo("file", 0, 1),
    "_Work": lambda: dist._Work,  # type: ignore[attr-defined]
    "_backward_hooks": lambda: torch.ones(1)._backward_hooks,
    "_buffers": lambda: nn.Module()._buffers,
    "_current_graph_task_id": lambda: torch._C._current_graph_task_id(),
    "_disabled_torch_function_impl": lambda: torch._C._disabled_torch_function_impl,
    "_distributed_c10d": lambda: [getattr(torch._C._distributed_c10d, n) for n in ("HashStore", "Store", "TCPStore")],
    # Not through sys.modules, where another test may have left what stands for it.
    "_dynamo": lambda: importlib.machinery.PathFinder.find_spec("torch._dynamo", torch.__path__).name,  # type: ignore[union-attr]
    "_execution_engine": lambda: torch.autograd.Variable._execution_engine.queue_callback,
    "_foreach_copy_": lambda: torch._foreach_copy_,
    "_foreach_lerp_": lambda: torch._foreach_lerp_,
    "_foreach_mul_": lambda: torch._foreach_mul_,
    "_get_root_mesh": root_mesh,
    "_global_optimizer_post_hooks": lambda: module("torch.optim.optimizer")._global_optimizer_post_hooks.values,
    "_global_optimizer_pre_hooks": lambda: module("torch.optim.optimizer")._global_optimizer_pre_hooks.values,
    "_inductor": lambda: importlib.util.find_spec("torch._inductor").name,  # type: ignore[union-attr]
    "_is_profiler_enabled": lambda: module("torch.autograd.profiler")._is_profiler_enabled,
    "_make_wrapper_subclass": lambda: torch.Tensor._make_wrapper_subclass,
    "_mesh_resources": root_mesh,
    "_modules": lambda: nn.Module()._modules,
    "_non_persistent_buffers_set": lambda: nn.Module()._non_persistent_buffers_set,
    "_optimizer_step_post_hooks": lambda: torch.optim.SGD([torch.ones(1)])._optimizer_step_post_hooks.values,
    "_optimizer_step_pre_hooks": lambda: torch.optim.SGD([torch.ones(1)])._optimizer_step_pre_hooks.items,
    "_parameters": lambda: nn.Module()._parameters,
    "_plugins": lambda: dist.Backend._plugins,
    "_post_accumulate_grad_hooks": lambda: torch.ones(1)._post_accumulate_grad_hooks,
    "_python_dispatch": lambda: module("torch.utils._python_dispatch").TorchDispatchMode,
    "_pytree": lambda: [getattr(module("torch.utils._pytree"), n) for n in ("tree_leaves", "tree_map")],
    "_schema": lambda: torch.ops.aten.mm.default._schema.arguments,
    "_set_deterministic_algorithms": lambda: torch._C._set_deterministic_algorithms,
    "_wrapped_by_lr_sched": lambda: scheduled_step()._wrapped_by_lr_sched,
    "_utils": lambda: module("torch.distributed.tensor._utils").compute_local_shape_and_global_offset,
    "_version": lambda: torch.ones(1)._version,
    "_world": lambda: dist.distributed_c10d._world.group_count,
}  # fmt: skip
# In some releases only: the code asks before.
NAMES_OF_RELEASES: dict[str, tuple[tuple[int, int], Callable[[], object]]] = {
    "_FR_SELF_RECORDING_BACKENDS": ((2, 15), lambda: dist.distributed_c10d._FR_SELF_RECORDING_BACKENDS.add),  # type: ignore[attr-defined]
    "_clear_sharding_prop_cache": ((2, 9), lambda: module("torch.distributed.tensor.debug")._clear_sharding_prop_cache),
    "_op_dispatcher": ((2, 5), lambda: module("torch.distributed.tensor").DTensor._op_dispatcher.sharding_propagator),
}  # fmt: skip
# Of a module, a state and a parameter of FSDP2.
NAMES_OF_FSDP: dict[str, Callable[[Any, Any, Any], object]] = {
    "_fsdp_param_groups": lambda module, state, parameter: state._fsdp_param_groups[0],
    "_get_fsdp_state": lambda module, state, parameter: module._get_fsdp_state,
    "_is_root": lambda module, state, parameter: state._is_root,
    "_root_post_backward_final_callback": lambda _, state, parameter: state._root_post_backward_final_callback,
    "_state_ctx": lambda module, state, parameter: (
        state._state_ctx.post_backward_final_callback_queued, state._state_ctx.iter_forward_root,
    ),
    "_unsharded_param": lambda module, state, parameter: parameter._unsharded_param.grad,
}  # fmt: skip
# Of other libraries.
OTHERS = {
    "_addressof",
    "_asdict",
    "_value_",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_objects",
    "_run_module_as_main",
    "_sizeof",
}
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def uses() -> dict[str, list[str]]:
    """Returns where hpctrain uses private names that it has not defined itself, by name."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    defined_in = {path: set(defined(tree)) for path, tree in trees.items()}
    anywhere = set().union(*defined_in.values())
    found = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name, own in used(node):
                known = anywhere if own else defined_in[path]
                if re.match(r"_[A-Za-z]", name) and name not in known:
                    found[name].append(f"{path.relative_to(SOURCE.parent)}:{node.lineno}")  # type: ignore[attr-defined]
    return dict(found)


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def used(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields names that `node` uses, with whether it may be an attribute of this or of a base class."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            yield name, True
        case ast.Attribute(attr=name):
            yield name, False
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
            yield name, False
        case ast.ImportFrom(module=str(path)) if not path.startswith("hpctrain"):
            yield from ((name, False) for name in [*path.split("."), *(alias.name for alias in node.names)])


USES = uses()


def look(name: str, find: Callable[[], object]) -> None:
    try:
        find()
    except (AttributeError, ImportError, TypeError) as error:
        pytest.fail(
            f"PyTorch {torch.__version__} has no {name} any more, or another one ({error}). It is used in "
            f'{", ".join(USES.get(name, ["?"]))}. See "A new release of PyTorch" in docs/dependencies.md'
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there(name: str) -> None:
    look(name, NAMES[name])


@pytest.mark.parametrize("name", NAMES_OF_RELEASES)
def test_a_private_name_of_some_releases_is_there(name: str) -> None:
    since, find = NAMES_OF_RELEASES[name]
    if since > RELEASE:
        pytest.skip(f"from PyTorch {'.'.join(map(str, since))} on")
    look(name, find)


def test_private_names_of_fsdp2_are_there() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"):
        pytest.skip("hpctrain does not use an FSDP2 this old")
    dist.init_process_group("gloo", store=module("torch.distributed").HashStore(), rank=0, world_size=1)
    try:
        model: Any = nn.Linear(2, 2)
        fsdp.fully_shard(model, mesh=module("torch.distributed").init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 2)).sum().backward()
        state = model._get_fsdp_state()
        parameter = state._fsdp_param_groups[0].fsdp_params[0]
        for name, find in NAMES_OF_FSDP.items():
            look(name, lambda find=find: find(model, state, parameter))  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


def test_no_private_name_is_missing_from_the_list() -> None:
    listed = {*NAMES, *NAMES_OF_RELEASES, *NAMES_OF_FSDP, *OTHERS}
    unlisted = {name: places for name, places in USES.items() if name not in listed}
    assert not unlisted, f"private names of another library: add them to the list above: {unlisted}"
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert [name for name in sorted(listed) if not re.search(rf"\b{name}\b", text)] == []


# What PyTorch calls on a group, by the names of two releases.
CALLED = [
    ("_device_types",), ("_get_backend",), ("_start_coalescing",), ("_end_coalescing",),
    ("all_gather_single", "_allgather_base"), ("reduce_scatter_single", "_reduce_scatter_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), ("all_to_all_single", "alltoall_base"),
]  # fmt: skip


@pytest.mark.parametrize("names", CALLED, ids=lambda names: names[0])
def test_a_method_of_groups_has_the_name_by_which_pytorch_calls_it(names: tuple[str, ...]) -> None:
    assert all(name in vars(CommunicatorGroup) for name in names)
    assert any(hasattr(dist.ProcessGroup, name) for name in names), (
        f"PyTorch {torch.__version__} has another name for {names[0]} of a ProcessGroup: add it to CommunicatorGroup"
    )


def test_no_text_is_given_to_xxhash() -> None:
    """xxhash 4 takes bytes only."""
    texts = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="xxhash")),
                    args=[
                        ast.Constant(value=str())
                        | ast.JoinedStr()
                        | ast.Call(func=ast.Name(id="repr" | "str")),
                        *_,
                    ],
                ):
                    texts.append(f"{path.relative_to(SOURCE.parent)}:{node.lineno}")
    assert texts == []
