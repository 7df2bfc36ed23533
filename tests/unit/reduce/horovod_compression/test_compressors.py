"""Compressions for a plain Horovod script, with the ranks' messages added up here as Horovod adds them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import hpctrain
from hpctrain.errors import UsageError
from hpctrain.reduce.horovod_compression import Compression, HvdCompression, pack, unpack

Make = Callable[..., HvdCompression]
KINDS: dict[str, Make] = {"fp16": Compression.fp16, "int8": Compression.int8}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


class Ranks:
    """`num_ranks` models of the same parameters, each with a compression of its own."""

    def __init__(self, kind: str, num_ranks: int, *, dtype: torch.dtype = torch.float32, **options: Any):
        self.kind, self.num_ranks = kind, num_ranks
        self.models = [
            {"weight": torch.zeros(7, 30, dtype=dtype), "bias": torch.zeros(5, dtype=dtype)}
            for _ in range(num_ranks)
        ]
        self.compressions = [KINDS[kind](m.items(), num_ranks=num_ranks, **options) for m in self.models]

    def mean(self, name: str, gradients: list[torch.Tensor], *, average: bool = False) -> list[torch.Tensor]:
        """What each rank's gradient is after a step."""
        for model, gradient in zip(self.models, gradients, strict=True):
            model[name].grad = gradient.clone()
        sent = [c.compress(m[name].grad) for c, m in zip(self.compressions, self.models, strict=True)]
        messages = [message for message, _ in sent]
        total = messages[0].clone()
        for message in messages[1:]:
            exact = total.double() + message.double()
            total += message
            if total.dtype == torch.int32:
                assert torch.equal(total.double(), exact), "int32 overflowed"
        if average:
            total = (total.double() / self.num_ranks).to(total.dtype)  # as Horovod does, truncating integers
        results = [
            c.decompress(total.clone(), ctx) for c, (_, ctx) in zip(self.compressions, sent, strict=True)
        ]
        if self.kind == "fp16":
            results = [r / self.num_ranks for r in results]  # op=hvd.Average
        return results


def gradients_of(
    num_ranks: int, step: int, *, shape: tuple[int, ...] = (7, 30), size: float = 1.0
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    common = torch.randn(shape, generator=random)
    return [size * (common + torch.randn(shape, generator=random)) for _ in range(num_ranks)]


@every_kind
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.floats(2.0**-20, 2.0**20), min_size=2, max_size=8))
def test_what_was_not_sent_is_sent_later(kind: str, num_ranks: int, sizes: list[float]) -> None:
    """After any gradients, however they grow and shrink: sum of the means + what is kept = sum of the gradients."""
    ranks = Ranks(kind, num_ranks)
    wanted = torch.zeros(7, 30, dtype=torch.float64)
    got = torch.zeros(7, 30, dtype=torch.float64)
    for step, size in enumerate(sizes):
        gradients = gradients_of(num_ranks, step, size=size)
        wanted += sum(g.double() for g in gradients) / num_ranks
        got += ranks.mean("weight", gradients)[0].double()
    kept = sum(c.state_dict()["residuals"]["weight"].double() for c in ranks.compressions) / num_ranks
    largest = max(sizes) * 10
    # fp16: what the sum itself rounds is not fed back
    tolerance = largest * len(sizes) * (2.0**-10 * num_ranks if kind == "fp16" else 1e-5)
    assert (got + kept.view(7, 30) - wanted).abs().max() <= tolerance


@every_kind
def test_every_rank_gets_the_same_bits(kind: str) -> None:
    ranks = Ranks(kind, 3)
    for step in range(6):
        results = ranks.mean("weight", gradients_of(3, step))
        assert all(torch.equal(r, results[0]) for r in results)
        assert results[0].shape == (7, 30)


def test_int8_takes_one_byte_a_value_after_the_first_step() -> None:
    ranks = Ranks("int8", 2)
    ranks.mean("weight", gradients_of(2, 0))
    message, _ = ranks.compressions[0].compress(ranks.models[0]["weight"].grad)
    assert message.numel() * message.dtype.itemsize == 7 * 30 + 36 + 2  # up to a multiple of four


def test_int8_is_close_once_its_range_is_known() -> None:
    ranks = Ranks("int8", 2)
    for step in range(20):
        gradients = gradients_of(2, step)
        found = ranks.mean("weight", gradients)[0]
    error = (found - (gradients[0] + gradients[1]) / 2).abs().max()
    assert 0 < error < 0.5


def test_int8_finds_the_range_of_gradients_that_suddenly_grow() -> None:
    ranks = Ranks("int8", 4)
    for step in range(5):
        ranks.mean("weight", gradients_of(4, step))
    for step in range(5, 12):
        gradients = gradients_of(4, step, size=1e6)
        found = ranks.mean("weight", gradients)[0]
    mean = sum(gradients) / 4
    assert (found - mean).norm() < 0.2 * mean.norm()


def test_int8_follows_gradients_that_shrink() -> None:
    ranks = Ranks("int8", 4)
    for step in range(80):
        gradients = gradients_of(4, step, size=max(1e-3, 0.8**step))
        found = ranks.mean("weight", gradients)[0]
    mean = sum(gradients) / 4
    assert (found - mean).norm() < 0.2 * mean.norm()


def test_fp16_holds_back_what_would_overflow_the_sum() -> None:
    ranks = Ranks("fp16", 2, scale=1024.0)
    gradient = torch.full((7, 30), 100.0)
    got = ranks.mean("weight", [gradient, gradient])[0]
    assert got.isfinite().all()
    for _ in range(20):
        got += ranks.mean("weight", [torch.zeros(7, 30)] * 2)[0]
    assert torch.allclose(got, gradient, rtol=1e-3)


def test_fp16_without_error_feedback_overflows_as_horovods_does() -> None:
    ranks = Ranks("fp16", 2, scale=1024.0, error_feedback=False)
    assert ranks.mean("weight", [torch.full((7, 30), 100.0)] * 2)[0].isinf().all()
    assert ranks.compressions[0].state_dict() == {"kind": "fp16"}


def test_a_scale_keeps_small_gradients_that_float16_would_lose() -> None:
    tiny = [torch.full((7, 30), 1e-9)] * 2
    assert Ranks("fp16", 2, error_feedback=False).mean("weight", tiny)[0].abs().max() == 0
    scaled = Ranks("fp16", 2, scale=2.0**20, error_feedback=False).mean("weight", tiny)[0]
    assert scaled.flatten().tolist() == pytest.approx([1e-9] * 210, rel=1e-3)


@every_kind
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at_step", [0, 1])
def test_a_bad_gradient_on_one_rank_is_seen_on_all_and_forgotten_after(
    kind: str, bad: float, at_step: int
) -> None:
    ranks = Ranks(kind, 3)
    for step in range(at_step):
        ranks.mean("weight", gradients_of(3, step))
    gradients = gradients_of(3, 10)
    gradients[1][2, 3] = bad
    for result in ranks.mean("weight", gradients):
        assert not result[2, 3].isfinite()
    for step in range(2):
        for result in ranks.mean("weight", gradients_of(3, step)):
            assert result.isfinite().all()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_keep_their_dtype(kind: str, dtype: torch.dtype) -> None:
    ranks = Ranks(kind, 2, dtype=dtype)
    for step in range(3):
        gradients = [g.to(dtype) for g in gradients_of(2, step)]
        found = ranks.mean("weight", gradients)[0]
        assert found.dtype == dtype
    assert (found - sum(gradients) / 2).abs().max() < 0.5


@every_kind
def test_empty_and_non_contiguous_gradients(kind: str) -> None:
    models = [{"none": torch.zeros(0), "image": torch.zeros(2, 3, 4, 5)} for _ in range(2)]
    compressions = [KINDS[kind](m.items(), num_ranks=2) for m in models]
    gradient = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for _ in range(2):
        for name, value in (("none", torch.zeros(0)), ("image", gradient)):
            sent = []
            for model, compression in zip(models, compressions, strict=True):
                model[name].grad = value.clone()
                sent.append(compression.compress(model[name].grad))
            assert sent[0][0].is_contiguous()
            total = sent[0][0] + sent[1][0]
            for compression, (_, ctx) in zip(compressions, sent, strict=True):
                found = compression.decompress(total.clone(), ctx)
            assert found.shape == value.shape
    if kind == "int8":
        assert torch.allclose(found, gradient, atol=0.05)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_int8_refuses_an_average(steps_before: int) -> None:
    ranks = Ranks("int8", 2)
    for step in range(steps_before):
        ranks.mean("weight", gradients_of(2, step))
    with pytest.raises(UsageError, match=r"int8 compression of 'weight'.*op=hvd.Sum"):
        ranks.mean("weight", gradients_of(2, 9), average=True)


def test_int8_notices_ranks_with_different_ranges() -> None:
    ranks = Ranks("int8", 2)
    ranks.mean("weight", gradients_of(2, 0))
    state = ranks.compressions[1].state_dict()
    state["ranges"]["weight"] *= 1.5
    ranks.compressions[1].load_state_dict(state)
    with pytest.raises(UsageError, match="loaded different compression states"):
        ranks.mean("weight", gradients_of(2, 1))


@pytest.mark.parametrize("num_ranks", [0, 128])
def test_int8_needs_a_level_for_each_rank(num_ranks: int) -> None:
    with pytest.raises(UsageError, match=f"num_ranks is {num_ranks}.*1 to 127"):
        Compression.int8([("a", torch.zeros(1))], num_ranks=num_ranks)


def test_127_ranks_still_fit() -> None:
    ranks = Ranks("int8", 127)
    for step in range(3):
        assert ranks.mean("bias", [torch.ones(5)] * 127)[0].isfinite().all(), step


@every_kind
def test_a_saved_state_goes_on_with_the_same_bits(kind: str) -> None:
    first = Ranks(kind, 2)
    for step in range(3):
        first.mean("weight", gradients_of(2, step))
    second = Ranks(kind, 2)
    for old, new in zip(first.compressions, second.compressions, strict=True):
        file = io.BytesIO()
        torch.save(old.state_dict(), file)
        file.seek(0)
        new.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        gradients = gradients_of(2, step)
        assert torch.equal(first.mean("weight", gradients)[0], second.mean("weight", gradients)[0])


@every_kind
def test_a_saved_state_does_not_change_with_later_steps(kind: str) -> None:
    ranks = Ranks(kind, 2)
    for step in range(2):
        ranks.mean("weight", gradients_of(2, step))
    state = ranks.compressions[0].state_dict()
    before = state["residuals"]["weight"].clone()
    ranks.mean("weight", gradients_of(2, 7))
    assert torch.equal(state["residuals"]["weight"], before)


@every_kind
def test_residuals_of_another_number_of_ranks_begin_at_zero_with_a_warning(kind: str) -> None:
    old = Ranks(kind, 2)
    for step in range(2):
        old.mean("weight", gradients_of(2, step))
    new = Ranks(kind, 3)
    for compression in new.compressions:
        with pytest.warns(UserWarning, match="residuals of 2 ranks .* there are 3 now"):
            compression.load_state_dict(old.compressions[0].state_dict())
        assert compression.state_dict()["residuals"] == {}
    assert new.mean("weight", gradients_of(3, 5))[0].isfinite().all()


@every_kind
def test_a_state_of_another_model_or_kind_is_refused(kind: str) -> None:
    ranks = Ranks(kind, 2)
    for step in range(2):
        ranks.mean("weight", gradients_of(2, step))
    state = ranks.compressions[0].state_dict()
    other = KINDS[kind]([("weight", torch.zeros(3))], num_ranks=2)
    with pytest.raises(UsageError, match="residual of 'weight' has 210 values, the parameter 3"):
        other.load_state_dict(state)
    other = KINDS[kind]([("kernel", torch.zeros(7, 30))], num_ranks=2)
    with pytest.raises(UsageError, match="'weight', which this model lacks"):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="state of 'top-k' compression"):
        other.load_state_dict({**state, "kind": "top-k"})


@every_kind
def test_parameters_are_distinguished_in_any_order(kind: str) -> None:
    """Equal shapes, and an order that changes from step to step, as with unused parameters."""
    model = {f"layer{i}": torch.zeros(4) for i in range(5)}
    compression = KINDS[kind](model.items(), num_ranks=1)
    total = {name: torch.zeros(4) for name in model}
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1], [2, 0, 4, 1], [3, 1, 0, 2, 4]):
        for i in order:
            name = f"layer{i}"
            model[name].grad = torch.full((4,), 10.0**i)
            message, ctx = compression.compress(model[name].grad)
            total[name] += compression.decompress(message, ctx)
    counts = [5, 5, 5, 3, 5]
    for i, count in enumerate(counts):
        assert total[f"layer{i}"].tolist() == pytest.approx([count * 10.0**i] * 4, rel=0.02)


@every_kind
def test_a_tensor_that_is_no_parameters_gradient_is_refused(kind: str) -> None:
    compression = KINDS[kind]([("a", torch.zeros(3))], num_ranks=2)
    with pytest.raises(UsageError, match=r"shape \(3,\) that is the gradient of none"):
        compression.compress(torch.zeros(3))


@every_kind
def test_a_sparse_gradient_that_horovod_gathered_is_handed_back(kind: str) -> None:
    gathered = torch.eye(3).to_sparse()
    compression = KINDS[kind]([("a", torch.zeros(3, 3))], num_ranks=2)
    expected = torch.eye(3) / (2 if kind == "int8" else 1)  # op=hvd.Sum, and a mean comes out
    assert torch.equal(compression.decompress(gathered, None).to_dense(), expected)


@every_kind
def test_a_used_up_generator_of_parameters_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="no named parameters"):
        KINDS[kind](iter([]), num_ranks=2)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_makes_no_sense_is_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="scale is"):
        Compression.fp16([("a", torch.zeros(3))], num_ranks=2, scale=scale)


def test_bf16_is_refused_with_what_to_take_instead() -> None:
    with pytest.raises(UsageError, match=r"Horovod 0.28.1 cannot sum bfloat16.*Compression.fp16"):
        hpctrain.Compression.bf16([("a", torch.zeros(3))], num_ranks=2)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 127))
def test_a_sum_of_packed_words_is_the_sum_of_each_of_their_parts(data: st.DataObject, num_ranks: int) -> None:
    levels = 127 // num_ranks
    part = st.lists(st.integers(-levels, levels), min_size=8, max_size=8)
    values = torch.tensor(data.draw(st.lists(part, min_size=num_ranks, max_size=num_ranks)))
    words = [pack(row.to(torch.int8), levels=levels) for row in values]
    exact = torch.stack(words).sum(dim=0)
    assert exact.abs().max() < 2**31
    total = exact.to(torch.int32)
    assert torch.equal(unpack(total, levels=levels, num_ranks=num_ranks).long(), values.sum(dim=0))


def test_packed_extremes_do_not_touch_each_other() -> None:
    values = torch.tensor(
        [127, -127, 127, -127, -127, -127, -127, -127, 127, 127, 127, 127], dtype=torch.int8
    )
    words = pack(values.clone(), levels=127)
    assert torch.equal(unpack(words, levels=127, num_ranks=1), values)


@pytest.mark.parametrize("num_ranks", [2, 8, 16])
def test_int8_has_room_for_the_rank_with_the_largest_values(num_ranks: int) -> None:
    """One rank alone uses the parameter."""
    ranks = Ranks("int8", num_ranks)
    gradients = [torch.tensor([1.0, 2.0, 3.0, 0.0, -3.0])] + [torch.zeros(5)] * (num_ranks - 1)
    for _ in range(2):
        found = ranks.mean("bias", gradients)[0]
    half_a_level = 0.5 * 3 * 2**0.25 / (127 // num_ranks)
    assert (found * num_ranks - gradients[0]).abs().max() <= half_a_level + 1e-6
