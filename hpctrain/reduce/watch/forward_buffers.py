"""Copies a model's buffers at the start of each step, to restore them if the step is dropped.

A forward pass in training changes buffers (running statistics, a user's own averages). If the gradients of a step are
not finite, the step's data may have written NaN or infinity into the buffers too. Without this module, these values
would stay there.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from hpctrain.distributed import local_part

# Buffers up to this size are copied in every step: torch's batch normalization changes running statistics without
# changing their version counters. Larger ones are copied when their counters have changed.
ALWAYS_BYTES = 64 << 10
# A larger buffer is not copied until it has changed once: most are tables of constants.
SMALL_BYTES = 1 << 20
# A changing buffer above this size, and above a quarter of the parameters, is not copied: perhaps little of it changes.
LARGEST_BYTES = 64 << 20


@final
class ForwardBuffers:
    """Keeps copies of the buffers of `model` that change, and restores them. No method is collective.

    The copies are made at the first forward pass of a step: when the model, or a module in it that has buffers, is
    called with gradients enabled. So changes between two steps, for example by an evaluation, are not undone. Values
    that `load_state_dict` has loaded are never undone. If a step runs only compiled code, no call is noticed; the
    copies are then those from the end of the previous step.

    If forward replaces a buffer (`self.mean = ...`), the old tensor is put back.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._slots: list[_Slot] = []
        self._noted = False  # in this step
        self._num_steps = 0
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._largest = max(LARGEST_BYTES, parameter_bytes // 4)
        self._hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks)
        self._find_slots()
        self._note()

    def begin_step(self) -> None:
        """Copies the buffers that may have changed since they were copied, unless already done in this step."""
        if not self._noted:
            self._note()
            self._noted = True

    def end_step(self, *, applied: bool) -> list[str]:
        """Ends a step.

        If the step was not applied, restores the buffers that have changed since the first forward pass of the step.

        Returns the names of the buffers that have changed, but could not be restored.
        """
        lost = []
        if not applied:
            lost = [slot.name for slot in self._slots if slot.may_have_changed() and not slot.put_back()]
        elif not self._noted:
            self._note()
        self._noted = False
        self._num_steps += 1
        if (
            self._num_steps & (self._num_steps - 1) == 0
        ):  # modules and buffers may have been added: rarely looked for
            self._find_slots()
        return lost

    def mend(self) -> None:
        """Restores the buffers that are not finite, but were finite when they were copied. The step continues.

        Call it for a model that was used in the training of another model, after a step of that training was dropped.
        """
        for slot in self._slots:
            if slot.is_spoiled():
                slot.put_back()

    def loaded(self, module: torch.nn.Module) -> None:
        """Copies the buffers of `module` after `load_state_dict` has loaded them.

        If `module` is the whole model, the next forward pass counts as the first forward pass of a step.
        """
        self._note([slot for slot in self._slots if slot.module is module])
        if module is self._model:
            self._noted = False

    def constants(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that no forward pass has changed so far, by name.

        Call it between forward and `end_step`. The values of small buffers are compared, which takes time, so call it
        in few steps only.
        """
        found = {}
        for slot in self._slots:
            slot.changes = slot.changes or slot.has_changed()
            if slot.held is not None and not slot.changes:
                found[slot.name] = slot.held
        return found

    def _find_slots(self) -> None:
        known = {(id(slot.module), slot.key): slot for slot in self._slots}
        self._slots = [
            known.get((id(module), key)) or _Slot(module, key, name=f"{name}.{key}" if name else key)
            for name, module in self._model.named_modules()
            for key in list(module._buffers.keys())
        ]
        for module in [self._model, *(slot.module for slot in self._slots)]:
            # Scripted modules take no hooks.
            if module not in self._hooked and not isinstance(module, torch.jit.ScriptModule):
                self._hooked.add(module)
                self._hooks.append(module.register_forward_pre_hook(_FirstForward(self)))
                self._hooks.append(module.register_load_state_dict_post_hook(_Loaded(self)))

    def _note(self, slots: Sequence[_Slot] | None = None) -> None:
        copies: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        values: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for slot in self._slots if slots is None else slots:
            now = slot.buffers.get(slot.key)
            if now is not slot.held or not slot.is_small:
                if now is slot.held and (now is None or _version(now) == slot.version):
                    continue
                slot.hold(now, largest=self._largest)
            if slot.copy is not None and now is not None:
                kind = slot.copy.dtype, slot.copy.device
                copies.setdefault(kind, []).append(slot.copy)
                values.setdefault(kind, []).append(local_part(now))
        with torch.no_grad():
            for kind, into in copies.items():
                torch._foreach_copy_(into, values[kind])


@final
class _Slot:
    """The place of one buffer in its module, `buffers[key]`, and what it contained at the last copy.

    held: tensor that was in the place at the last copy.
    version: autograd version of `held` at the last copy.
    copy: values of `held` at the last copy; None if they are not copied.
    changes: True if a forward pass has ever changed the buffer.
    """

    __slots__ = (
        "buffers",
        "changes",
        "copy",
        "held",
        "is_small",
        "key",
        "module",
        "name",
        "version",
        "was_seen",
    )

    def __init__(self, module: torch.nn.Module, key: str, *, name: str) -> None:
        self.module = module
        self.buffers: Any = (
            _ScriptBuffers(module) if isinstance(module, torch.jit.ScriptModule) else module._buffers
        )
        self.key = key
        self.name = name
        self.held: torch.Tensor | None = None
        self.version = math.nan
        self.copy: torch.Tensor | None = None
        self.is_small = False
        self.was_seen = False
        self.changes = False

    def may_have_changed(self) -> bool:
        """Returns False if it is certain that the place still contains `held`, and that `held` was not written to."""
        now = self.buffers.get(self.key)
        if now is not self.held or self.is_small:
            return True
        return now is not None and _version(now) != self.version

    def has_changed(self) -> bool:
        """Returns True if the buffer has changed; small buffers are compared by their values."""
        if not self.is_small or self.held is None or self.copy is None:
            return self.may_have_changed()
        return self.buffers.get(self.key) is not self.held or not torch.equal(
            local_part(self.held.detach()), self.copy
        )

    def is_spoiled(self) -> bool:
        """Returns True if the buffer is not finite, but its copy is."""
        now = self.buffers.get(self.key)
        if now is None or self.copy is None or not self.may_have_changed():
            return False
        return not is_finite(local_part(now.detach())) and is_finite(self.copy)

    def hold(self, now: torch.Tensor | None, *, largest: int) -> None:
        """Remembers `now`, the current tensor, as the tensor to restore.

        Afterwards the caller copies the values of `now` into `copy`, if `copy` is not None.
        """
        first, self.was_seen = not self.was_seen, True
        self.held, self.is_small = now, False
        if now is None or now.is_meta or now.layout != torch.strided:
            self.copy = None
            return
        self.version = _version(now)
        value = local_part(now.detach())
        self.is_small = value.nbytes <= ALWAYS_BYTES
        if value.nbytes > (SMALL_BYTES if first else largest):
            self.copy = None
        elif self.copy is None or not _alike(self.copy, value):
            self.copy = torch.empty_like(value)

    def put_back(self) -> bool:
        """Restores the buffer. Returns False if its earlier values were not copied."""
        held = self.held
        if held is not None:
            if self.copy is None:
                return False
            if held.is_inference():  # may not be written to
                held = self.copy.clone()
            elif self.is_small or _version(held) != self.version:
                with torch.no_grad():
                    local_part(held).copy_(self.copy)
            self.held, self.version = held, _version(held)
        if self.buffers.get(self.key) is not held:
            self.buffers[self.key] = held
        return True


@final
class _ScriptBuffers:
    """A dictionary-like view of the buffers of a scripted module, by name."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def get(self, key: str) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(self._module, key)
        return found

    def __setitem__(self, key: str, tensor: torch.Tensor | None) -> None:
        setattr(self._module, key, tensor)


def is_finite(tensor: torch.Tensor) -> bool:
    """Returns True if no element is NaN or infinite. Needs no memory, and reads `tensor` once."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or not tensor.numel():
        return True
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor, ord=float("inf"))))


def _version(tensor: torch.Tensor) -> float:
    """Returns the tensor's autograd version. Returns NaN for an inference tensor, so that it counts as changed."""
    return math.nan if tensor.is_inference() else tensor._version


def _alike(copy: torch.Tensor, now: torch.Tensor) -> bool:
    return copy.shape == now.shape and copy.dtype == now.dtype and copy.device == now.device


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class _Hook:
    """Base class of the hooks on the model and on its modules with buffers.

    The hooks are removed when the `ForwardBuffers` is freed.

    A copy of the model (`deepcopy`, pickle) gets a hook that does nothing.
    """

    def __init__(self, buffers: ForwardBuffers) -> None:
        self._buffers = weakref.ref(buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of Python's own that returns None, so that reading a pickled model does not need hpctrain.
        return getattr, (contextlib.nullcontext(), "__exit__")


@final
class _FirstForward(_Hook):
    """Forward pre-hook that starts a step at the first forward pass."""

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        buffers = self._buffers()
        if buffers is not None:
            buffers.begin_step()


@final
class _Loaded(_Hook):
    """Hook that copies a module's buffers after `load_state_dict`."""

    def __call__(self, module: torch.nn.Module, incompatible: Any) -> None:
        buffers = self._buffers()
        if buffers is not None:
            buffers.loaded(module)
