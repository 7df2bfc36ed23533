"""Records what the energy counters of this rank's node count."""

from __future__ import annotations

from typing import final

from hpctrain.telemetry import EnergyMeter, RecordWriter


@final
class EnergyLog:
    """Writes the readings of `meter` as records. joules: of all readings so far, by source."""

    def __init__(self, records: RecordWriter, meter: EnergyMeter) -> None:
        self._records = records
        self._meter = meter
        self.joules = dict.fromkeys(meter.sources, 0.0)

    def start(self) -> None:
        self._meter.start()

    def write(self, *, step: int) -> None:
        """Records the readings since the last call. step: the last one that ended."""
        for record in self._meter.take():
            for source, joules in record["joules"].items():
                self.joules[source] += joules
            self._records.write({**record, "step": step})

    def close(self, *, step: int) -> None:
        """Reads for the last time."""
        self._meter.close()
        self.write(step=step)
