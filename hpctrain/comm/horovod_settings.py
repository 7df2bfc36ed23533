"""The variables through which Horovod is told how to work. It reads them once, when it starts."""

from __future__ import annotations

from collections.abc import MutableMapping

# What hpctrain wants of Horovod, unless the user has set it.
SETTINGS = {
    # Fusion joins what is ready at the same moment, so the order of a sum would depend on timing, and a
    # resumed run would differ in the last bit. Our buckets are fused already.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Milliseconds between looks at the queue; every operation waits for the next one. The default of 1 is
    # made for many small tensors that can be fused; ours are few and waited for. At 0.1 the looking itself
    # takes time from ranks that share a core.
    "HOROVOD_CYCLE_TIME": "0.5",
}


def apply_settings(environ: MutableMapping[str, str]) -> None:
    """Put `SETTINGS` into `environ`, where the user has set nothing."""
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)
    # Not the user's to choose: groups are made after the start, when the ranks have told each other which
    # node they are on.
    environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
