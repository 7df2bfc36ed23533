"""Seeds random generators, and saves and restores their exact state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import xxhash

from hpctrain.errors import CheckpointError


def derive_seed(seed: int, *labels: str | int) -> int:
    """Returns a 63-bit seed that is derived from the run's seed and from labels that name the purpose.

    The result is the same on every machine.
    """
    text = ":".join(map(str, (seed, *labels)))
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def seed_generators(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_generators(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the states of this rank's random generators as 1-d integer tensors, of the same shapes on every rank.

    device: the run's device. For a GPU, the state of the GPU's generator is included. For the CPU, no state of a GPU is
    included, even if this rank has a GPU: otherwise the ranks would save different sets of tensors if only some
    machines have GPUs.
    """
    twister: dict[str, Any] = np.random.get_state(legacy=False)
    numpy_state = np.concatenate([
        twister["state"]["key"].astype(np.int64), [twister["state"]["pos"], twister["has_gauss"]],
        [_bits(twister["gauss"])],
    ])  # fmt: skip
    version, words, gauss = random.getstate()
    python_state = [version, *words, gauss is not None]
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy_state),
        "python": torch.tensor([*python_state, _bits(gauss or 0.0)], dtype=torch.int64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, torch.Tensor], *, device: torch.device, otherwise: int) -> None:
    """Restores this rank's generators to a captured state. Raises CheckpointError if the state is invalid.

    states: the result of `capture_generators`.
    device: the run's device.
    otherwise: the seed of the generator of a GPU, if the states were captured in a run on CPUs.
    """
    try:
        torch.set_rng_state(states["torch"])
        numpy_state = states["numpy"].numpy()
        np.random.set_state((
            "MT19937", numpy_state[:-3].astype(np.uint32), int(numpy_state[-3]), int(numpy_state[-2]),
            float(numpy_state[-1:].view(np.float64)[0]),
        ))  # fmt: skip
        version, *words, has_gauss, gauss = states["python"].tolist()
        random.setstate((version, tuple(words), _float(gauss) if has_gauss else None))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
        elif device.type == "cuda":
            torch.cuda.manual_seed(otherwise)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint's random generator state cannot be restored: {error}"
        ) from error


def _bits(value: float) -> int:
    return int(np.array([value], np.float64).view(np.int64)[0])


def _float(bits: int) -> float:
    return float(np.array([bits], np.int64).view(np.float64)[0])
