"""Names of devices in a recipe. Apart from `device`, so that reading a recipe does not load torch."""

DEVICE_NAMES = r"auto|cpu|cuda(:[0-9]+)?"
