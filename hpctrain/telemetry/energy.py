"""Reads the energy counters of a node at intervals."""

from __future__ import annotations

import contextlib
import importlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

# The interface of the energy counters.


class EnergyCounter(Protocol):
    """The interface of an energy counter of this node.

    source: the name of the kind of counter, such as `RAPL`. covers: the devices whose energy the counter measures, as
    text.
    """

    source: str
    covers: str

    def read_j(self) -> float:
        """Returns the joules since the counter was opened. Raises OSError or ValueError if reading fails now."""
        ...

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        """Returns the present state of each device, such as its load; empty for counters without devices."""
        ...


@final
class Increase:
    """Computes how much a counter has increased since its first value, even if the counter restarts at 0.

    wraps_after: the largest value of the counter, after which it continues at 0. None: the counter does not wrap; if a
    value is smaller than the previous value, the counter was reset, and the increase between the previous value and the
    reset is not counted.
    """

    def __init__(self, first: int, *, wraps_after: int | None = None) -> None:
        self._last = first
        self._wraps_after = wraps_after
        self._total = 0

    def to(self, value: int) -> int:
        """Returns the increase from the counter's first value to `value`, its value now.

        The counter may restart at 0 at most once between two calls.
        """
        step = value - self._last
        if step < 0:
            step = value if self._wraps_after is None else value + self._wraps_after - self._last
        self._last = value
        self._total += step
        return self._total


# Energy of an HPE Cray node, counted by its controller.
#
# Source of the format: HPE, "User Access to Compute Node Power Data": a value, its unit, and the time of
# the reading.


_FILE = "sys/cray/pm_counters/energy"


@final
class CrayCounter:
    """The counter `/sys/cray/pm_counters/energy`, updated ten times per second.

    The file has a line such as `5461213 J 1398360352187765 us`. root: the directory that contains `sys`. Raises OSError
    or ValueError if the file cannot be read.
    """

    source = "Cray pm_counters"
    covers = "the whole node"

    def __init__(self, root: Path = Path("/")) -> None:
        self._path = root / _FILE
        self._increase = Increase(self._read())

    def read_j(self) -> float:
        return float(self._increase.to(self._read()))

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        return ()

    def _read(self) -> int:
        words = self._path.read_text(encoding="ascii").split()
        if len(words) < 2 or words[1] != "J":
            raise ValueError(f"{self._path} holds {' '.join(words)!r}, which is not an energy in J")
        return int(words[0])


# Energy, load and memory of NVIDIA's GPUs, as their driver reports them through NVML.


@final
class NvmlCounter:
    """The energy counters of all GPUs that the driver shows to this process.

    In a job whose devices Slurm confines, these are the GPUs of the job. Raises OSError if nvidia-ml-py is not
    installed, if there is no driver or GPU, or if a GPU does not count energy (older than Volta).
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
            raise OSError("NVML lists no GPU")
        self._increases = [Increase(self._millijoules(gpu)) for gpu in self._gpus]

    def read_j(self) -> float:
        increases = zip(self._gpus, self._increases, strict=True)
        return sum(increase.to(self._millijoules(gpu)) for gpu, increase in increases) / 1e3

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        """Returns `index`, `utilisation` and `memory_bytes` of each GPU.

        `utilisation` is the fraction of the last sampling period in which a kernel ran, `memory_bytes` the memory in
        use. A value that a GPU does not report is None, as for a partitioned GPU (MIG).
        """
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


# Energy of processors and memory, as RAPL counts it and Linux shows it
# (Documentation/power/powercap/powercap.rst).


_FOLDER = "sys/class/powercap"


@final
class RaplCounter:
    """The sum of `energy_uj` over the zones `package-N` and `dram` in `/sys/class/powercap/intel-rapl:*`, also on AMD.

    Other zones are parts of packages (`core`, `uncore`) or contain packages (`psys`). A zone restarts at 0 after
    `max_energy_range_uj`; for a processor of 250 W this happens every 17 minutes.

    root: the directory that contains `sys`. Raises OSError or ValueError if there is no zone or a zone cannot be read.
    Since Linux 5.10 only the user root may read zones, unless the site gives other users access.
    """

    source = "RAPL"
    covers = "processors and memory"

    def __init__(self, root: Path = Path("/")) -> None:
        self._zones = []
        for folder in sorted((root / _FOLDER).glob("intel-rapl:*")):
            name = (folder / "name").read_text(encoding="ascii").strip()
            if name.startswith("package") or name == "dram":
                path = folder / "energy_uj"
                largest = _number(folder / "max_energy_range_uj")
                self._zones.append((path, Increase(_number(path), wraps_after=largest)))
        if not self._zones:
            raise FileNotFoundError(f"no RAPL zone in {root / _FOLDER}")

    def read_j(self) -> float:
        return sum(increase.to(_number(path)) for path, increase in self._zones) / 1e6

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        return ()


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


# Reads the energy counters of a node at intervals.


ENERGY = "energy"  # the kind of the records
_LAST_READING_S = 5.0


def open_counters(root: Path = Path("/")) -> list[EnergyCounter]:
    """Returns the energy counters of this node that can be read; often there are none.

    root: the directory that contains `sys`.
    """
    openers: tuple[Callable[[], EnergyCounter], ...] = (
        partial(CrayCounter, root), partial(RaplCounter, root), NvmlCounter,
    )  # fmt: skip
    found = []
    for open_counter in openers:
        with contextlib.suppress(OSError, ValueError):
            found.append(open_counter())
    return found


def total_j(joules: Mapping[str, float]) -> float:
    """Returns the energy of a node, in joules.

    joules: the joules that each kind of energy counter has measured, by the name of the kind.

    If a counter measures the whole node, its value is the result, since it includes the energy of all other counters.
    Otherwise the result is the sum.
    """
    whole = joules.get(CrayCounter.source)
    return sum(joules.values()) if whole is None else whole


@final
class EnergyMeter:
    """Reads the energy counters `counters` every `every_s` seconds on a thread, from `start` to `close`.

    The first reading includes the energy since the counters were opened. A thread is used because a call of the driver
    takes milliseconds, and because a step may last longer than a counter takes to wrap.
    """

    def __init__(self, counters: Sequence[EnergyCounter], *, every_s: float) -> None:
        self.sources = {counter.source: counter.covers for counter in counters}
        self._counters = list(counters)
        self._every_s = every_s
        self._before_j = dict.fromkeys(self.sources, 0.0)
        self._before = time.monotonic()
        self._records: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_until_closed, name="hpctrain-energy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[dict[str, Any]]:
        """Returns the records of the readings since the last call, with the fields that docs/metrics.md describes."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._records.get_nowait())
        return found

    def close(self) -> None:
        """Takes the last reading, which `take` then returns, and ends the thread."""
        self._closed.set()
        self._thread.join(_LAST_READING_S)

    def _read_until_closed(self) -> None:
        while not self._closed.wait(self._every_s):
            self._read()
        self._read()

    def _read(self) -> None:
        joules: dict[str, float] = {}
        devices: list[Mapping[str, float | int | None]] = []
        for counter in list(self._counters):
            try:
                now_j = counter.read_j()
            except (OSError, ValueError) as error:
                print(
                    f"hpctrain: the energy counter of {counter.source} is no longer read: {error}",
                    file=sys.stderr,
                    flush=True,
                )
                self._counters.remove(counter)
                continue
            joules[counter.source] = now_j - self._before_j[counter.source]
            self._before_j[counter.source] = now_j
            devices += counter.devices()
        now = time.monotonic()
        seconds, self._before = now - self._before, now
        if joules:
            self._records.put({
                "kind": ENERGY, "time": time.time(), "seconds": seconds, "joules": joules, "total_j": total_j(joules),
                "devices": devices,
            })  # fmt: skip
