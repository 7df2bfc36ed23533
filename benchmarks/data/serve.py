"""A process that opens and times readers on request: it reads one line of JSON per request and answers with another.

It runs in the project's environment or in the peers', so this module imports neither hpctrain nor a peer.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.kinds import Kind, numbers_of


class Reader(Protocol):
    """A reader to be timed. `epoch` yields the batches of an epoch: (number of samples, samples of shape (n, *shape),
    or None if the method does not return them)."""

    def epoch(self, number: int) -> Iterator[tuple[int, NDArray[Any] | None]]: ...

    def close(self) -> None: ...


def timed(reader: Reader, *, first_epoch: int, least_s: float) -> dict[str, float]:
    """Reads whole epochs until `least_s` have passed. Returns `seconds` and `samples`; the time includes what the
    reader starts for an epoch."""
    num_samples = epochs = 0
    begin = time.perf_counter()
    while True:
        for count, _ in reader.epoch(first_epoch + epochs):
            num_samples += count
        epochs += 1
        seconds = time.perf_counter() - begin
        if seconds >= least_s:
            return {"seconds": seconds, "samples": num_samples}


def checked(reader: Reader, kind: Kind, *, epoch: int) -> dict[str, int]:
    """Returns for one epoch the number of `samples`, of `different` ones, and the `largest` sample number in them."""
    seen: list[NDArray[np.int64]] = []
    for count, samples in reader.epoch(epoch):
        if samples is None or len(samples) != count:
            raise RuntimeError("the reader returned a batch without its samples")
        seen.append(numbers_of(kind, samples))
    numbers = np.concatenate(seen)
    return {"samples": len(numbers), "different": len(np.unique(numbers)), "largest": int(numbers.max())}


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    # stdout goes to stderr, so that text printed by a library is not taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    readers: dict[str, Reader] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        key, what = asked.get("key", ""), asked["do"]
        answer: Any = None
        try:
            if what == "open":
                kind = Kind.from_json(asked["kind"])
                readers[key] = module.open_reader(asked["method"], kind, directory=asked["directory"])
            elif what == "check":
                answer = checked(readers[key], Kind.from_json(asked["kind"]), epoch=asked["epoch"])
            elif what == "time":
                answer = timed(readers[key], first_epoch=asked["epoch"], least_s=asked["least_s"])
            elif what == "close":
                readers.pop(key).close()
                gc.collect()
            else:
                answer = getattr(module, what)(**asked["arguments"])
            reply = {"answer": answer}
        except Exception as error:
            import traceback

            reply = {"error": f"{error}\n{traceback.format_exc()}"}
        print(json.dumps(reply), file=answers, flush=True)
    for reader in readers.values():
        reader.close()


if __name__ == "__main__":
    main()
