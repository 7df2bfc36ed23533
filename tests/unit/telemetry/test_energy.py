"""Energy counters, read from trees as the kernel shows them, and from a driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hpctrain.telemetry import EnergyMeter, open_counters, total_j
from hpctrain.telemetry.energy import Increase, NvmlCounter, RaplCounter
from tests.unit.telemetry.counter_trees import RANGE_UJ, set_cray, set_rapl, write_rapl, xeon

REPOSITORY = Path(__file__).resolve().parents[3]

# The functions of NVML that are used, for two GPUs: the second counts 1500 mJ at each call, the first stands still.
DRIVER = """
#include <string.h>
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static unsigned long long counted[2] = {7000, 9000};
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &counted[index]; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) {
  unsigned long long *mine = device;
  if (mine == &counted[1]) *mine += 1500;
  *mj = *mine;
  return ENERGY;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *found) {
  if (device == &counted[1]) return 3;
  found->gpu = 75; found->memory = 20;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *found) {
  found->total = 1ull << 34; found->used = 5ull << 30; found->free = found->total - found->used;
  return 0;
}
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Unknown Error"; }
"""


@given(st.lists(st.integers(0, 999), max_size=30), st.integers(0, 999))
def test_the_increase_of_a_counter_that_wraps_is_what_was_counted(counted: list[int], first: int) -> None:
    """Less than a round between two readings: the counter begins again at 0 after 1000."""
    increase, value, total = Increase(first, wraps_after=1000), first, 0
    for step in counted:
        total += step
        value = value + step if value + step < 1000 else value + step - 1000
        assert increase.to(value) == total


def test_a_counter_without_a_range_was_reset_when_it_falls() -> None:
    increase = Increase(100)
    assert [increase.to(value) for value in (130, 20, 50)] == [30, 50, 80]


def test_rapl_counts_packages_and_memory_and_goes_on_after_a_wrap(tmp_path: Path) -> None:
    xeon(tmp_path)
    (counter,) = open_counters(tmp_path)
    assert (counter.source, counter.covers) == ("RAPL", "processors and memory")
    assert counter.read_j() == 0
    set_rapl(tmp_path, "intel-rapl:0", 3_000_000)  # 1 J to the end of the range, 3 J after it
    set_rapl(tmp_path, "intel-rapl:0:0", 8_000_000)  # the cores are in the package
    set_rapl(tmp_path, "intel-rapl:0:1", 2_500_000)
    set_rapl(tmp_path, "intel-rapl:2", 99_000_000)  # as are the packages in psys
    assert counter.read_j() == pytest.approx(4.5)
    set_rapl(tmp_path, "intel-rapl:0", 2_000_000)
    assert counter.read_j() == pytest.approx(4.5 + RANGE_UJ / 1e6 - 1)


def test_rapl_without_leave_to_read_is_no_counter(tmp_path: Path) -> None:
    xeon(tmp_path)
    file = tmp_path / "sys/class/powercap/intel-rapl:1/energy_uj"
    file.unlink()
    file.mkdir()  # an error also for root, whom modes do not stop
    assert open_counters(tmp_path) == []
    with pytest.raises(OSError):
        RaplCounter(tmp_path)


def test_cray_counts_the_whole_node_so_that_others_are_not_added(tmp_path: Path) -> None:
    xeon(tmp_path)
    set_cray(tmp_path, 5_461_213)
    counters = open_counters(tmp_path)
    assert [counter.source for counter in counters] == ["Cray pm_counters", "RAPL"]
    set_cray(tmp_path, 5_461_513)
    set_rapl(tmp_path, "intel-rapl:1", 107_000_000)
    joules = {counter.source: counter.read_j() for counter in counters}
    assert joules == {"Cray pm_counters": 300.0, "RAPL": pytest.approx(100.0)}
    assert total_j(joules) == 300.0
    assert total_j({"RAPL": 100.0, "NVML": 50.0}) == 150.0


def test_a_file_in_another_unit_is_no_counter(tmp_path: Path) -> None:
    set_cray(tmp_path, 250, unit="W")
    assert open_counters(tmp_path) == []


def test_without_counters_there_are_none(tmp_path: Path) -> None:
    write_rapl(tmp_path, {})
    assert open_counters(tmp_path) == []


def test_the_records_of_a_meter_add_up_to_what_was_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xeon(tmp_path)
    set_cray(tmp_path, 1000)
    meter = EnergyMeter(open_counters(tmp_path), every_s=0.01)
    meter.start()
    records = []
    for joules in range(1100, 2100, 100):
        set_cray(tmp_path, joules)
        while not (found := meter.take()):
            pass
        records += found
    set_cray(tmp_path, 2500)
    set_rapl(tmp_path, "intel-rapl:1", 9_000_000)
    meter.close()
    records += meter.take()
    assert sum(record["total_j"] for record in records) == 1500
    assert sum(record["joules"]["RAPL"] for record in records) == pytest.approx(2)
    assert all(record["kind"] == "energy" and record["seconds"] > 0 for record in records)
    assert meter.take() == []
    assert capsys.readouterr().err == ""


def test_a_counter_that_fails_later_is_reported_once_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xeon(tmp_path)
    set_cray(tmp_path, 1000)
    meter = EnergyMeter(open_counters(tmp_path), every_s=0.01)
    meter.start()
    shutil.rmtree(tmp_path / "sys/cray")
    records = []
    while sum("Cray pm_counters" not in record["joules"] for record in records) < 3:
        records += meter.take()
    meter.close()
    assert capsys.readouterr().err.count("the energy counter of Cray pm_counters") == 1
    assert set(records[-1]["joules"]) == {"RAPL"}


def test_without_a_driver_there_is_no_counter_of_gpus() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    with pytest.raises(OSError, match="NVML"):
        NvmlCounter()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize("counts", [True, False])
def test_gpus_are_read_through_the_drivers_library(tmp_path: Path, counts: bool) -> None:
    """A library with NVML's functions, in place of the driver's: what Python passes and gets is real."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    (tmp_path / "driver.c").write_text(DRIVER)
    library, source = tmp_path / "libnvidia-ml.so.1", tmp_path / "driver.c"
    asked = ["gcc", "-shared", "-fPIC", f"-DENERGY={0 if counts else 3}", "-o", library, source]
    subprocess.run(asked, check=True, timeout=300)
    program = """
import json, pathlib
from hpctrain.telemetry import open_counters
counters = open_counters(pathlib.Path("/nowhere"))
print(json.dumps([[c.source, c.read_j(), c.read_j(), list(c.devices())] for c in counters]))
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    devices = [
        {"index": 0, "utilisation": 0.75, "memory_bytes": 5 << 30},
        {"index": 1, "utilisation": None, "memory_bytes": 5 << 30},
    ]
    assert json.loads(done.stdout) == ([["NVML", 1.5, 3.0, devices]] if counts else [])
