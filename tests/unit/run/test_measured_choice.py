"""A loop of one's own continues with the reduction of its checkpoint, whatever later measurements choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.reduce import Reduction, ReductionRequest
from hpctrain.run import Session
from hpctrain.train import Position
from tests.sessions import session_over

STEPS = 6
NODES = {2: ["a", "b"], 3: ["a", "a", "b"], 4: ["a", "a", "b", "b"]}
# Ranks, what the measurements of the first start choose, and of the second.
CASES = [
    (2, {"algorithm": "ring", "bucket_bytes": 1024}, {"algorithm": "direct", "bucket_bytes": 4096}),
    (3, {"algorithm": "hierarchical", "bucket_bytes": 2048}, {"algorithm": "ring", "bucket_bytes": 512}),
    (4, {"algorithm": "direct", "bucket_bytes": 4096}, {"algorithm": "hierarchical", "bucket_bytes": 1024}),
]  # fmt: skip


def chosen(session: Session, choice: dict[str, object], *, wire: str) -> Reduction:
    """Returns a measured reduction as if the measurements had preferred `choice`."""
    reduction = session.reductions.make(ReductionRequest(wire=wire), gradient_bytes=1 << 14)
    wanted = {**reduction.document(), "wire": wire, **choice}
    if reduction.can_become(wanted):
        reduction.become(wanted)
    assert reduction.document() == wanted
    return reduction


def train(
    session: Session, reduction: Reduction, *, folder: Path, until: int, saves_at: int | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    """Trains from the checkpoint in `folder`, if there is one. Returns the gradient norms and the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 29), torch.nn.Tanh(), torch.nn.Linear(29, 23))
    for index, parameter in enumerate(
        model.parameters()
    ):  # ranks that are threads share one random generator
        values = torch.linspace(-0.3, 0.3, parameter.numel()) * (index + 1)
        parameter.data.copy_(values.sin().reshape(parameter.shape))
    updater = session.distributed_optimizer(
        model, torch.optim.Adam(model.parameters(), lr=1e-2), reduction=reduction
    )
    position = session.load_state(folder, updater)
    norms = []
    for step in range(position.step, until):
        generator = torch.Generator().manual_seed(100 * step + session.rank)
        inputs = torch.randn(8, 37, generator=generator)
        updater.backward(model(inputs).square().mean(), weight=1 / session.world_size)
        norms.append(updater.step().grad_norm)
        if step + 1 == saves_at:
            session.save_state(folder, updater, Position(step=step + 1))
    return norms, [parameter.detach().clone() for parameter in model.parameters()]


def on_ranks(num_ranks: int, rank_main: Callable[[Session], object]) -> list[object]:
    def main(world: World) -> object:
        with session_over(world, nodes=NODES[num_ranks]) as session:
            return rank_main(session)

    return run_threads(num_ranks, main, timeout_s=300)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])  # int8: residuals of error feedback are loaded too
@pytest.mark.parametrize(("num_ranks", "first", "second"), CASES)
def test_a_resumed_loop_sums_as_before(
    tmp_path: Path, num_ranks: int, first: dict[str, object], second: dict[str, object], wire: str
) -> None:
    def whole(session: Session) -> object:
        return train(session, chosen(session, first, wire=wire), folder=tmp_path, until=STEPS, saves_at=3)

    def resumed(session: Session) -> object:
        reduction = chosen(session, second, wire=wire)
        found = train(session, reduction, folder=tmp_path, until=STEPS)
        assert reduction.document()["algorithm"] == first["algorithm"]
        assert reduction.bucket_bytes == first["bucket_bytes"]
        assert reduction.record["source"] == "as in the checkpoint"
        assert "as in the checkpoint" in session.notes[-1]
        return found

    before, after = on_ranks(num_ranks, whole), on_ranks(num_ranks, resumed)
    for (norms, parameters), (norms_after, parameters_after) in zip(before, after, strict=True):  # type: ignore[misc]
        assert norms_after == norms[3:]
        assert all(map(torch.equal, parameters, parameters_after))


def test_other_ranks_or_another_wire_format_keep_their_own_choice(tmp_path: Path) -> None:
    saved, own = {"algorithm": "ring"}, {"algorithm": "direct"}
    on_ranks(
        4,
        lambda session: train(
            session, chosen(session, saved, wire="fp16"), folder=tmp_path, until=2, saves_at=2
        ),
    )

    def other(session: Session, wire: str) -> None:
        reduction = chosen(session, own, wire=wire)
        train(session, reduction, folder=tmp_path, until=3)
        assert reduction.document()["algorithm"] == own["algorithm"]

    on_ranks(2, lambda session: other(session, "fp16"))
    on_ranks(4, lambda session: other(session, "fp32"))


def test_a_bucket_size_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    def trained(session: Session, algorithm: str, bucket_bytes: int) -> None:
        request = ReductionRequest(bucket_bytes=bucket_bytes)
        reduction = session.reductions.make(request, gradient_bytes=1 << 14)
        wanted = {**reduction.document(), "algorithm": algorithm}
        if reduction.can_become(wanted):
            reduction.become(wanted)
        train(session, reduction, folder=tmp_path, until=2, saves_at=2)
        assert reduction.document()["algorithm"] == "ring"
        assert reduction.bucket_bytes == bucket_bytes

    on_ranks(2, lambda session: trained(session, "ring", 1024))
    on_ranks(2, lambda session: trained(session, "direct", 2048))
