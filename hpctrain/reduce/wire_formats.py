"""Table of the wire formats, in which gradients are encoded when they are sent, with the properties of each format.

To add a format, add an entry to `_TABLE`, and write the `Codec` (`codecs.py`) or the reducer (`collective_reducers/`)
that the entry names. Another package adds a format by an entry point of the group `hpctrain.wire_formats`. The entry
point has the name of the format, and refers to a `hpctrain.WireFormat`. Entry points are looked up when a name is
requested that the table does not have, or when all names are listed. The module of an entry point is imported when its
format is requested.

This module does not load torch, because recipes and predictions read the table too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "hpctrain.wire_formats"
# The faster one of `AUTO_WIRES` is chosen. Also an algorithm's name.
AUTO = "auto"
# Bytes of a gradient before it is encoded: float32.
ELEMENT_BYTES = 4
# `roundings` of formats that lose more than the rounding of each value, and of unknown ones.
MOST_ROUNDINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """One wire format, in which gradients are encoded when they are sent, and its properties.

    Args:
        name: The name in the recipe.
        description: Text that follows the name in the reference of recipes.
        codec: `module:name` of a class or function that is called without arguments and returns the format's codec,
            which encodes every value (`hpctrain.testing.CodecContract` tests a codec). None: `reducer` is given
            instead.
        reducer: `module:name` of a class such as `TopKReducer`: a `BucketReducer` that is made from a communicator,
            with `topology` and `start_step`, and has the function `needs(buckets, num_ranks=...)`. None: `codec` is
            given instead.
        bytes_per_element: Encoded bytes per float32 value, including a value's share of the scales. None: the size
            depends on the gradients.
        roundings: Place in the order of exactness: 0 if values arrive unchanged, larger for a format that rounds more.
        needs_feedback: True if the part of the gradients that is not sent in a step is added to the gradients of the
            next step (error feedback).
        loss_scale: First value of the dynamic loss scale that the format needs because of its range. None: the format
            needs no loss scale.
        library_dtype: torch's name of the dtype in which a backend's own operation can send the values; `own`: the
            dtype of the bucket. None: no backend's own operation can send the values.
        summed: True if algorithms that use the backends' own operations are available for the format. False: their
            fallbacks run, which exchange bytes and sum in hpctrain.
        tried_by_auto: True if `wire = "auto"` measures the format. Only for formats of hpctrain's table.
        smaller: Name of the format with the next fewer bytes, which a report recommends; None if no format has fewer
            bytes.
        price: The loss of precision with this format, in words. A prediction that recommends the format states this
            text. Empty: predictions never recommend the format. Only for formats of hpctrain's table.
    """

    name: str
    description: str = ""
    codec: str | None = None
    reducer: str | None = None
    bytes_per_element: float | None = None
    roundings: int = MOST_ROUNDINGS
    needs_feedback: bool = False
    loss_scale: float | None = None
    library_dtype: str | None = None
    summed: bool = False
    tried_by_auto: bool = False
    smaller: str | None = None
    price: str = ""

    def __post_init__(self) -> None:
        if (self.codec is None) == (self.reducer is None):
            raise UsageError(f"wire format {self.name!r}: give one of codec and reducer, not both")
        if self.codec is not None and self.bytes_per_element is None:
            raise UsageError(
                f"wire format {self.name!r}: give bytes_per_element, the bytes that its codec makes of one element"
            )

    def imported(self) -> Any:
        """Imports and returns the object that `codec` or `reducer` names."""
        return resolve_name(self.codec or self.reducer or "")


_TABLE = (
    WireFormat(
        name="fp32", codec="hpctrain.reduce.codecs:OwnPrecisionCodec", bytes_per_element=4, roundings=0,
        library_dtype="own", summed=True, tried_by_auto=True, smaller="fp16",
    ),
    WireFormat(
        name="fp16", codec="hpctrain.reduce.codecs:float16_codec", bytes_per_element=2, roundings=1,
        description="two bytes per element, scaled; steps that overflow are skipped on all ranks",
        loss_scale=2.0**10, library_dtype="float16", summed=True, tried_by_auto=True, smaller="int8",
        price="rounding to 16 bits",
    ),
    WireFormat(
        name="bf16", codec="hpctrain.reduce.codecs:bfloat16_codec", bytes_per_element=2, roundings=2,
        description="two bytes", library_dtype="bfloat16", smaller="int8",
    ),
    WireFormat(
        name="int8", codec="hpctrain.reduce.codecs:BlockCodec", bytes_per_element=1 + 4 / 256, needs_feedback=True,
        description="one byte, with a scale per 256 elements and error feedback",
        price="rounding to 8 bits, with error feedback",
    ),
    WireFormat(
        name="top-k", reducer="hpctrain.reduce.collective_reducers.top_k:TopKReducer", needs_feedback=True,
        description="the largest 1 % with error feedback",
    ),
    WireFormat(
        name="low-rank", reducer="hpctrain.reduce.collective_reducers.power_sgd:LowRankReducer", needs_feedback=True,
        description="PowerSGD with error feedback",
    ),
)  # fmt: skip
WIRE_FORMATS: Mapping[str, WireFormat] = {entry.name: entry for entry in _TABLE}
# Formats of hpctrain that encode every value, and those that do not and use the backend's collective operations.
CODEC_WIRES = tuple(entry.name for entry in _TABLE if entry.codec is not None)
SPARSE_WIRES = tuple(entry.name for entry in _TABLE if entry.codec is None)
# Candidates of `wire = "auto"`: they lose at most one rounding of a gradient.
AUTO_WIRES = tuple(entry.name for entry in _TABLE if entry.tried_by_auto)


@lru_cache(maxsize=1)
def _of_sites() -> Mapping[str, EntryPoint]:
    """Returns the entry points of wire formats by name, without importing them."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


@lru_cache
def _imported(point: EntryPoint) -> WireFormat:
    where = f"wire format {point.name!r}: the entry point {point.name} = {point.value} of {GROUP}"
    try:
        found = point.load()
    except Exception as error:  # a site's module may raise anything
        raise UsageError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(found, WireFormat) or found.name != point.name:
        raise UsageError(f"{where} must be a hpctrain.WireFormat of that name, and is {found!r}")
    return found


def find_wire(name: str | None) -> WireFormat | None:
    """Returns the wire format of this name; None for an unknown name.

    Raises UsageError if the entry point of this name cannot be imported.
    """
    if name is None or name in WIRE_FORMATS:
        return WIRE_FORMATS.get(name or "")
    return _imported(_of_sites()[name]) if name != AUTO and name in _of_sites() else None


def wire_format(name: str) -> WireFormat:
    """Returns the wire format of this name. Raises UsageError, with the valid names, for an unknown name."""
    found = find_wire(name)
    if found is None:
        raise UsageError(f"wire format {name!r}: choose one of {', '.join(wire_names())}")
    return found


def check_wire(name: str) -> None:
    """Raises UsageError, with the valid names, unless `name` is a wire format or `auto`."""
    if name != AUTO:
        wire_format(name)


def wire_names() -> tuple[str, ...]:
    """Returns `auto`, and the names of all wire formats, including those of entry points."""
    return tuple(dict.fromkeys((AUTO, *WIRE_FORMATS, *_of_sites())))


def encodes_every_value(name: str) -> bool:
    """Returns True if the wire format has a codec; False for `auto` and for an unknown name."""
    found = find_wire(name)
    return found is not None and found.codec is not None


def needs_feedback(name: str | None) -> bool:
    """Returns True if the wire format needs error feedback; False for an unknown name."""
    found = find_wire(name)
    return found is not None and found.needs_feedback


def roundings(name: str) -> int:
    """Returns the place of a wire format in the order of exactness: 0 means no rounding, a larger number means more."""
    found = find_wire(name)
    return MOST_ROUNDINGS if found is None else found.roundings


def share_of_float32(name: str) -> float | None:
    """Returns encoded bytes per byte of float32 values.

    Returns None for an unknown name, and for a format whose encoded bytes depend on the gradients.
    """
    found = find_wire(name)
    if found is None or found.bytes_per_element is None:
        return None
    return found.bytes_per_element / ELEMENT_BYTES


def listed_wires(names: Sequence[str], *, mark: str = "") -> str:
    """Returns the names as text, such as `a, b or c`. mark: text to put before and after each name."""
    *most, last = (f"{mark}{name}{mark}" for name in names)
    return f"{', '.join(most)} or {last}" if most else last
