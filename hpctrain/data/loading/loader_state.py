"""A place in the data that can be kept anywhere: plain JSON, good for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hpctrain.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """position: samples of the epoch, over all ranks, that were had. order: the name of an `OrderSpec`."""

    order: str
    num_samples: int
    seed: int
    epoch: int
    position: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> LoaderState:
        """Raises DataError unless it is what `as_json` made."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            kind = str if field.name == "order" else int
            value: Any = document.get(field.name) if isinstance(document, Mapping) else None
            if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
                raise DataError(
                    f"this is no place in the data: its {field.name} is {value!r}, not "
                    f"{'a text' if kind is str else 'a whole number'}; give what state_dict() returned"
                )
            values[field.name] = value
        return cls(**values)

    def check_fits(self, *, order: str, num_samples: int) -> None:
        """Raises DataError where the place belongs to another order, or to other data."""
        if self.order != order:
            raise DataError(
                f"the place was saved in the order {self.order!r}, this loader has {order!r}: positions of one mean "
                "other samples in the other. Use the order it was saved with, or begin the epoch anew"
            )
        if self.num_samples != num_samples:
            raise DataError(
                f"the place was saved with {self.num_samples} samples, this dataset has {num_samples}: it is other "
                "data, use the data it was saved with"
            )
