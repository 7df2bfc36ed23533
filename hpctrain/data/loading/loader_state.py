"""Position in the data, saved as JSON values and valid for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hpctrain.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """position: samples of the epoch, over all ranks, that were consumed. order: the name of an `OrderSpec`."""

    order: str
    num_samples: int
    seed: int
    epoch: int
    position: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> LoaderState:
        """Returns the state of an `as_json` document. Raises DataError if it is not one."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            kind = str if field.name == "order" else int
            value: Any = document.get(field.name) if isinstance(document, Mapping) else None
            if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
                raise DataError(
                    f"this is not a state of a loader: its {field.name} is {value!r}, not "
                    f"{'a string' if kind is str else 'an integer of at least 0'}; pass what state_dict() returned"
                )
            values[field.name] = value
        return cls(**values)

    def check_fits(self, *, order: str, num_samples: int) -> None:
        """Raises DataError if the state belongs to another order or another number of samples."""
        if self.order != order:
            raise DataError(
                f"the state was saved with order {self.order!r}, this loader has {order!r}, in which the same position "
                "means another sample. Use the order of the state, or start the epoch again"
            )
        if self.num_samples != num_samples:
            raise DataError(
                f"the state was saved with {self.num_samples} samples, this dataset has {num_samples}: it is another "
                "dataset. Use the one that the state was saved with"
            )
