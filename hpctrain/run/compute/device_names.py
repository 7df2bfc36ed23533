"""The names of devices in a recipe. A separate module, so that reading a recipe does not import torch."""

DEVICE_NAMES = r"auto|cpu|cuda(:[0-9]+)?"
