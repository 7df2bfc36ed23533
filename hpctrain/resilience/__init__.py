"""What keeps a run alive, or ends it with its work saved."""

from hpctrain.resilience.save_signal import SaveSignal
from hpctrain.resilience.stop import StopRequest

__all__ = ["SaveSignal", "StopRequest"]
