"""Section [stop] of the recipe."""

from __future__ import annotations

from pydantic import Field, field_validator

from hpctrain.resilience import DEFAULT_STOP_SIGNALS, SignalName
from hpctrain.run.recipe.section import Section


class StopSection(Section):
    """When the run stops before its last step, with its state saved and exit code 75; see guides/stopping.md."""

    signals: list[SignalName] = Field(
        list(DEFAULT_STOP_SIGNALS),
        min_length=1,
        description="Signals that ask for a stop; one rank that receives one is enough. A second one, 2 s later or "
        "more, ends the rank at once without a save.",
    )
    after_s: float | None = Field(
        None,
        gt=0,
        description="The run has to have stopped this long after its start, s; each start counts anew. The earliest of "
        "this, HPCTRAIN_DEADLINE and Slurm's time limit counts.",
    )
    margin_s: float = Field(
        30.0,
        ge=0,
        description="A run stops when less time is left than a step and a save take (95% of the recent ones) and this "
        "many seconds.",
    )

    @field_validator("signals")
    @classmethod
    def _different(cls, signals: list[SignalName]) -> list[SignalName]:
        if len(set(signals)) < len(signals):
            raise ValueError(f"names {', '.join(signals)}: each signal once")
        return signals
