"""Energy, load and memory of NVIDIA's GPUs, as their driver reports them through NVML."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from hpctrain.telemetry.energy.counter import Increase


@final
class NvmlCounter:
    """All GPUs that the driver shows to this process: in a job whose devices Slurm confines, those of the job.

    Raises OSError if nvidia-ml-py is not installed, there is no driver or no GPU, or a GPU does not count its energy
    (older than Volta).
    """

    source = "NVML"
    covers = "NVIDIA GPUs"

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise OSError("nvidia-ml-py is not installed") from error
        self._asked(self._nvml.nvmlInit)
        count = self._asked(self._nvml.nvmlDeviceGetCount)
        self._gpus = [self._asked(self._nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        if not self._gpus:
            raise OSError("NVML knows no GPU")
        self._increases = [Increase(self._millijoules(gpu)) for gpu in self._gpus]

    def read_j(self) -> float:
        increases = zip(self._gpus, self._increases, strict=True)
        return sum(increase.to(self._millijoules(gpu)) for gpu, increase in increases) / 1e3

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        """Returns of each GPU `index`, `utilisation` (share of the last moment in which a kernel ran) and
        `memory_bytes` in use; None for what a GPU does not tell, as a divided one (MIG)."""
        found = []
        for index, gpu in enumerate(self._gpus):
            load = self._known(self._nvml.nvmlDeviceGetUtilizationRates, gpu)
            memory = self._known(self._nvml.nvmlDeviceGetMemoryInfo, gpu)
            found.append({
                "index": index,
                "utilisation": None if load is None else load.gpu / 100,
                "memory_bytes": None if memory is None else int(memory.used),
            })  # fmt: skip
        return found

    def _millijoules(self, gpu: Any) -> int:
        return int(self._asked(self._nvml.nvmlDeviceGetTotalEnergyConsumption, gpu))

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def _known(self, ask: Callable[..., Any], gpu: Any) -> Any:
        try:
            return ask(gpu)
        except self._nvml.NVMLError:
            return None
