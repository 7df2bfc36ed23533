from .save_signal import SaveSignal as SaveSignal
from .stop import StopRequest as StopRequest
