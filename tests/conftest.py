"""Settings for all tests: hypothesis has no time limits (the machine is shared) and always the same seeds."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "hpctrain",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hpctrain")
