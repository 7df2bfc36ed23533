"""Reads the files of a run directory, in any state of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.telemetry.records import STEP, read_records

Document = dict[str, Any]


@final
class RunDirectory:
    """Reads the files of one run directory. Each call of a method reads its file again.

    Args:
        error: The class of the errors that are raised for files that cannot be read.
    """

    def __init__(self, path: Path, *, error: type[HpctrainError] = UsageError) -> None:
        self.path = path
        self._error = error

    def environment(self) -> Document:
        """Returns the content of environment.json: software and machine of the newest start of the run.

        Raises an error if the run has no such file.
        """
        found = self.document("environment.json")
        if found is None:
            raise self._error(
                f"{self.path} is not the directory of a run: it has no environment.json; give the directory of a run, "
                "run.directory of its recipe"
            )
        return found

    def starts(self) -> list[Document]:
        """Returns the lines of starts.jsonl, one JSON object per start of the run, oldest first.

        Returns an empty list if training has never begun.
        """
        path = self.path / "starts.jsonl"
        try:
            return list(read_records(path))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise self._error(f"{path} cannot be read: {error}") from error

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    def summary(self) -> Document | None:
        """Returns the content of summary.json; None if no start of the run has ended normally."""
        return self.document(self.summary_path.name)

    def document(self, name: str) -> Document | None:
        """Returns the JSON object in the file `name`; None if there is no such file, or no object in the file."""
        path = self.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._error(f"{path} cannot be read: {error}") from error
        return found if isinstance(found, dict) else None

    def records_path(self, rank: int) -> Path:
        return self.path / "metrics" / f"rank-{rank:05}.jsonl"

    def all_records(self) -> Iterator[list[Document]]:
        """Yields, in the order of the ranks, the records of each rank that has a file of records."""
        for path in sorted((self.path / "metrics").glob("rank-*.jsonl")):
            try:
                yield list(read_records(path))
            except (OSError, ValueError) as error:
                raise self._error(f"the records in {path} cannot be read: {error}") from error

    def steps(self, rank: int, *, num_ranks: int, advice: str) -> dict[int, Document]:
        """Returns a rank's records of steps, by the number of the step. Of a repeated step, the later record counts.

        Raises an error that contains `advice` if the records cannot be read.
        """
        path = self.records_path(rank)
        try:
            return {record["step"]: record for record in read_records(path) if record["kind"] == STEP}
        except (OSError, ValueError) as error:
            raise self._error(
                f"the records of rank {rank} of {num_ranks} cannot be read ({path}: {error}): {advice}"
            ) from error

    def newest_steps(self, *, max_bytes: int) -> list[Document]:
        """Returns the records of steps in the last `max_bytes` bytes of rank 0's file of records, oldest first."""
        path = self.records_path(0)
        try:
            with path.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
                file.seek(start)
                lines = file.read().split(b"\n")
            # The last piece is empty or a line that is being written, the first one may have been cut.
            records = [json.loads(line) for line in lines[1 if start else 0 : -1]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise self._error(f"the records in {path} cannot be read: {error}") from error
        return [record for record in records if record.get("kind") == STEP]
