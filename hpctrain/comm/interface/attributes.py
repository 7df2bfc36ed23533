"""Values that belong to a communicator and live as long as it does: attribute caching, as in MPI 4.0, section 7.7."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Attributes:
    """Base class of communicators: see `Collective.attribute`."""

    def attribute(self, kind: type[T]) -> T:
        found: dict[type, Any] = self.__dict__.setdefault("_attributes", {})
        if kind not in found:
            found[kind] = kind()
        value: T = found[kind]
        return value
