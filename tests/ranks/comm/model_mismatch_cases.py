"""What ranks do in the tests of models that differ between them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hpctrain.comm import World
from hpctrain.errors import HpctrainError
from hpctrain.reduce import AllReduceUpdater
from hpctrain.run import Session
from tests.sessions import session_over

ALGORITHMS = ("auto", "hierarchical", "flat")
# What rank 1 has instead of six float32 layers that are all trained. The last two are the same model, so that ranks
# choose by other numbers of bytes, and differ only in the plan of the reduction.
MODELS = ("another size", "another dtype", "another dtype of as many bytes", "one more dtype")
TRAINED = ("another size is trained", "another dtype is trained")


def _open(world: World) -> Session:
    """A session on two nodes, of two ranks and of one. Nothing is published: the ranks must find out by themselves."""
    return session_over(world, nodes=["a", "a", "b"], emulated=True)


def _model(kind: str) -> torch.nn.Sequential:
    """2.2 MB of layers, several buckets for `auto`."""
    layers = [torch.nn.Linear(300, 300, bias=False) for _ in range(6)]
    if kind == "another size":
        layers[5] = torch.nn.Linear(300, 301, bias=False)
    elif kind == "another dtype of as many bytes":
        layers = layers[:3]
    elif kind == "one more dtype":
        layers.append(torch.nn.Linear(3, 3, bias=False).double())
    model = torch.nn.Sequential(*layers)
    if kind == "another size is trained":
        model[:5].requires_grad_(False)
    return model.double() if kind.startswith("another dtype") and kind in MODELS else model


def _making(session: Session, kind: str, *, algorithm: str) -> Callable[[], AllReduceUpdater]:
    model = _model(kind)
    trained = _model("another dtype") if kind == "another dtype is trained" else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
    return lambda: session.distributed_optimizer(model, optimizer, algorithm=algorithm)


def _stepping(updater: AllReduceUpdater, *, num_sums: int) -> Callable[[], object]:
    sums = {f"sum {number}": 1.0 for number in range(num_sums)}
    return lambda: updater.step(sums=sums)


def models_that_differ(world: World) -> dict[str, str]:
    """Rank 1 brings something else to one updater after the other; what this rank is told each time."""
    session, odd, reported = _open(world), world.rank == 1, {}

    def tell(name: str, call: Callable[[], object]) -> None:
        begin_s = time.monotonic()
        try:
            call()
            reported[name] = "nothing raised"
        except HpctrainError as error:
            took = "in time" if time.monotonic() - begin_s < 200 else "late"
            reported[name] = f"{type(error).__name__} {error.agreed} {took} {error}"

    for algorithm in ALGORITHMS:
        for kind in (*MODELS, *TRAINED):
            making = _making(session, kind if odd else "", algorithm=algorithm)
            tell(f"{algorithm}, {kind}", making)
    for algorithm in ALGORITHMS[1:]:
        updater = _making(session, "", algorithm=algorithm)()
        updater.step()  # and the ranks go on
        tell(f"{algorithm}, another number of sums", _stepping(updater, num_sums=2 if odd else 1))
    session.close()
    return reported
