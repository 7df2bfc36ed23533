"""Imports a user's function that transforms batches, calls it, and checks its result.

    def augment(fields: dict[str, np.ndarray], context: TransformContext) -> dict[str, np.ndarray]: ...

The function receives the arrays of one rank's part of a batch, shape (num_rows, *sample_shape), and returns arrays
with the same number of rows. Names, dtypes and sample shapes may differ from those of the input. The function may
modify its input. The parameter `context` is optional. This module imports neither torch nor the rest of the package,
so that worker processes start faster and use less memory.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError, RecipeError

Arrays = dict[str, NDArray[Any]]
TransformFunction = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TransformContext:
    """States which samples a transform receives, and makes random number generators for them.

    Attributes:
        seed: Seed of the loader.
        epoch: Number of the epoch, from 0.
        start: Position in the epoch of the first sample of the global batch, in samples over all ranks.
        indices: For each row, the index of its sample in the dataset: int64, shape (num_rows,).
    """

    seed: int
    epoch: int
    start: int
    indices: NDArray[np.int64]

    def generator(self, row: int) -> np.random.Generator:
        """Returns a new random number generator for the sample in one row of the batch.

        The generator of a sample yields the same numbers for any number of ranks, and after a resume.

        Args:
            row: Index of the row in the batch.
        """
        return np.random.default_rng([self.seed, self.epoch, self.start, int(self.indices[row])])


class BatchTransform:
    """Calls the user's transform function and checks its result. Thread-safe if the function is thread-safe."""

    def __init__(self, function: TransformFunction, *, name: str) -> None:
        self.name = name
        self.input_copies = 1
        self._function = function
        self._wants_context = _takes_two(function)
        self._without_rows: Arrays | None = None

    def place(self, thread: int) -> str:
        """Returns "": the transform runs in the thread that calls it."""
        return ""

    def __call__(self, arrays: Arrays, *, context: TransformContext) -> Arrays:
        """Returns the transformed arrays, C-contiguous and native-endian, with as many rows as the input.

        A batch without rows is not passed to the function. The result then has no rows. Its names, dtypes and sample
        shapes are those of an earlier result, or else those of the function's result for one row of zeros. Raises
        DataError if the function raises an error, or if its result is not a dict of arrays with that number of rows.
        """
        num_rows = len(context.indices)
        if num_rows:
            made = self._call(arrays, context)
            if self._without_rows is None:
                self._without_rows = {name: array[:0].copy() for name, array in made.items()}
            return made
        if self._without_rows is None:
            zeros = {name: np.zeros((1, *array.shape[1:]), array.dtype) for name, array in arrays.items()}
            one = TransformContext(
                seed=context.seed, epoch=context.epoch, start=context.start, indices=np.zeros(1, np.int64)
            )
            made = self._call(zeros, one)
            self._without_rows = {name: array[:0].copy() for name, array in made.items()}
        return {name: array.copy() for name, array in self._without_rows.items()}

    def _call(self, arrays: Arrays, context: TransformContext) -> Arrays:
        try:
            made = self._function(arrays, context) if self._wants_context else self._function(arrays)
        except DataError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise DataError(
                f"the transform {self.name} raised {type(error).__name__}: {error} (samples "
                f"{_some(context.indices)}, epoch {context.epoch})"
            ) from error
        if not isinstance(made, Mapping) or not made or not all(isinstance(name, str) for name in made):
            raise DataError(
                f"the transform {self.name} returned {type(made).__name__}, but must return a dict of field names "
                "and arrays"
            )
        return {name: self._checked(name, array, len(context.indices)) for name, array in made.items()}

    def _checked(self, field: str, value: Any, num_rows: int) -> NDArray[Any]:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or array.dtype.name in ("uint64", "float128", "longdouble"):
            raise DataError(
                f"the transform {self.name} returned field {field!r} of dtype {array.dtype}: a dtype that torch "
                "supports is needed (bool, int8 to int64, uint8 to uint32, float16 to float64)"
            )
        if array.ndim == 0 or len(array) != num_rows:
            raise DataError(
                f"the transform {self.name} returned field {field!r} of shape {array.shape} for {num_rows} "
                f"samples: the first dimension must be {num_rows}"
            )
        return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def find_transform(name: str) -> BatchTransform:
    """Imports the function with the given name, "module:function". Raises RecipeError if that fails."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise RecipeError(f"the name of a transform must have the form 'module:function', not {name!r}")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except SystemExit as error:
        raise RecipeError(f"the transform {name!r} cannot be imported: SystemExit: {error}") from error
    except Exception as error:  # importing the user's code may raise anything
        raise RecipeError(f"the transform {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise RecipeError(f"the transform {name!r} is not a function, but {type(found).__name__}")
    return BatchTransform(found, name=name)


def import_name(function: TransformFunction) -> str:
    """Returns the name "module:function" by which another process can import a function.

    Raises RecipeError if another process cannot import the function.
    """
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not qualified or "<" in qualified:
        raise RecipeError(
            f"workers cannot import the transform {qualified or function!r} of {module}: put it at the top level "
            "of a module other than the script, or use workers = 0"
        )
    return f"{module}:{qualified}"


def _takes_two(function: TransformFunction) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) >= 2


def _some(indices: NDArray[np.int64]) -> str:
    text = ", ".join(str(index) for index in indices[:4])
    return text + (f" and {len(indices) - 4} more" if len(indices) > 4 else "")
