"""What the tests on a GPU share: the device, comparisons with the CPU, kernels that run long, launches of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[2]
HPCTRAIN = (sys.executable, "-m", "hpctrain.cli.main")
LONG_S = 0.03
# Variables of an outer launcher: with them the ranks would consider themselves ranks of that launcher.
_OUTER = ("OMPI_COMM_", "PMIX_", "PMI_", "SLURM_", "PRTE_", "ORTE_", "HPCTRAIN_")


@dataclass(kw_only=True)
class Check:
    """A comparison on a device. scratch: an empty folder. Of the outcome, `text`: what was compared; figures: name with
    unit -> number; needs_gpu: parts that were left out because they need a GPU."""

    device: torch.device
    scratch: Path
    text: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    needs_gpu: list[str] = field(default_factory=list)

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def found(self, text: str, *, needs_gpu: Sequence[str] = ()) -> None:
        """Notes what was compared. needs_gpu: what the CPU does not show."""
        self.text = text
        self.needs_gpu += [] if self.has_gpu else list(needs_gpu)

    def of(self, *, gpu: int, cpu: int) -> int:
        """Returns a size: large enough to take a GPU some time, small enough for the CPU."""
        return gpu if self.has_gpu else cpu

    def wait(self) -> None:
        """Waits for all kernels."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)


def assert_equal(found: torch.Tensor, expected: torch.Tensor, *, what: str) -> None:
    """Asserts that both tensors have the same shape, dtype and bits. `found` may be on the device."""
    host = found.detach().cpu()
    kind = f"{tuple(host.shape)} {host.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    assert host.dtype == expected.dtype and host.shape == expected.shape, f"{what}: {kind}"  # noqa: PT018
    differing = int((host != expected).sum())
    assert differing == 0, f"{what}: {differing} of {expected.numel()} values differ from the CPU's"


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, within: float, what: str) -> float:
    """Returns the largest difference / the largest expected absolute value, and asserts that it is `within`.

    `found` may be on the device."""
    host, wanted = found.detach().double().cpu(), expected.detach().double().cpu()
    assert host.shape == wanted.shape, f"{what}: {tuple(host.shape)} instead of {tuple(wanted.shape)}"
    share = float((host - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if host.numel() else 0.0
    assert share <= within, f"{what}: differs by {share:.3g} of the largest value, more than {within:g}"
    return share


def largest_difference(
    found: Sequence[float], expected: Sequence[float], *, within: float, what: str
) -> float:
    """Returns the largest difference of two lists of losses, and asserts that it is `within`."""
    worst = max(abs(mine - wanted) for mine, wanted in zip(found, expected, strict=True))
    assert worst <= within, f"{what}: a loss differs from the CPU's by {worst:.3g}, more than {within:g}"
    return worst


class LongKernels:
    """`run` queues some 30 ms of work on the current stream of a GPU; on a CPU it computes for a moment."""

    def __init__(self, check: Check) -> None:
        size = check.of(gpu=2048, cpu=32)
        generator = torch.Generator(device=check.device).manual_seed(0)
        self._matrix = torch.randn(size, size, device=check.device, generator=generator) / size**0.5
        self._repeats = 1
        if check.has_gpu:
            self.run()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._repeats = 10
            self.run()
            end.record()
            torch.cuda.synchronize()
            self._repeats = max(10, int(LONG_S * 10 / (begin.elapsed_time(end) / 1e3)))

    def run(self) -> None:
        product = self._matrix
        for _ in range(self._repeats):
            product = product @ self._matrix


def assert_a_race_is_seen(check: Check, work: LongKernels) -> None:
    """Asserts that a copy without a wait reads old values; otherwise the tests of streams would prove nothing."""
    values = torch.arange(1 << 16, dtype=torch.float32, device=check.device)
    late = torch.zeros_like(values)
    torch.cuda.synchronize()
    work.run()
    late.copy_(values)
    with torch.cuda.stream(torch.cuda.Stream(check.device)):
        early = late.clone()
    torch.cuda.synchronize()
    assert not torch.equal(early, values), "a copy on a stream that waits for nothing found the new values"


def small_model(*, width: int, depth: int) -> nn.Sequential:
    """Returns a model with equal parameters at every call."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def samples(seed: int, *, size: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs of shape (size, width), float32, and labels of shape (size,), int64, a function of the inputs.
    They are made on the CPU, so that they are equal for every device."""
    inputs = torch.randn(size, width, generator=torch.Generator().manual_seed(seed))
    return inputs.to(device), inputs[:, :10].argmax(1).to(device)


def run(words: Sequence[str], *, num_ranks: int, timeout_s: float) -> None:
    """Runs a command on ranks, as a user does. Fails with the last lines of its output if it fails or takes longer."""
    launch = [*HPCTRAIN, "launch", "--launcher", "mpirun", "-n", str(num_ranks), "--", *words]
    done = subprocess.run(
        launch,
        env=_environment(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    tail = " | ".join((done.stdout + done.stderr).strip().splitlines()[-12:])
    assert done.returncode == 0, f"exit code {done.returncode} of {' '.join(words[-4:])}: {tail}"


def _environment() -> Mapping[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
    path = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    # TF32 rounds the factors of a product to 11 bits; convolutions would differ from the CPU's in the third digit.
    return environment | {"PYTHONPATH": os.pathsep.join(path), "NVIDIA_TF32_OVERRIDE": "0"}
