"""What a node costs, from a file of the user's."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Prices(BaseModel):
    """per_node_hour: price of a node for an hour. currency: as it is to be shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_node_hour: float = Field(ge=0, allow_inf_nan=False)
    currency: str = Field(min_length=1, max_length=12)


def read_prices(path: Path) -> Prices:
    """Returns the prices in a TOML file with `per_node_hour` and `currency`. Raises UsageError if it has others."""
    try:
        return Prices.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--prices {path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"--prices {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; it has two lines, as "
            'per_node_hour = 1.5 and currency = "EUR"'
        ) from error
