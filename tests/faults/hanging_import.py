"""A module of a transform whose import hangs in the loader's workers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

if os.environ.get("HANGING_IMPORT"):
    time.sleep(3600)


def never(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields
