"""Trains small models with hvd.DistributedOptimizer in several ways, and compares with one process, in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

import hpctrain.hvd as hvd
from hpctrain.errors import UsageError
from hpctrain.hvd import gradient_reduction

STEPS, SAMPLES, WIDTH = 12, 12, 8
RELATIVE = 1e-12
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Model(torch.nn.Module):
    """Words and numbers into numbers; `often` is used by every other sample only."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, WIDTH, sparse=sparse)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 24),
            torch.nn.Tanh(),
            torch.nn.Linear(24, 24),
            torch.nn.Tanh(),
            torch.nn.Linear(24, 3),
        )
        self.often = torch.nn.Linear(WIDTH, 3)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, words: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        values = self.words(words) + numbers
        result = self.layers(values) * self.frozen
        used = words < 10
        if used.any():
            result = result + self.often(values) * used[:, None]
        return result


def make_model(*, sparse: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(sparse=sparse).double()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, *, part: int, parts: int) -> tuple[torch.Tensor, ...]:
    """This part of a batch. In the first half words are sorted, so that some ranks use `often` and others do not."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, 20, (SAMPLES,), generator=generator)
    words = words.sort().values if step < STEPS // 2 else words
    numbers = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return tuple(tensor.chunk(parts)[part] for tensor in (words, numbers, targets))


def train(
    model: torch.nn.Module,
    optimizer: Any,
    *,
    part: int = 0,
    parts: int = 1,
    passes: int = 1,
    clip: float | None = None,
    logs: bool = False,
) -> dict[str, torch.Tensor]:
    """Trains on this part of each batch, in so many passes a step. Returns the parameters."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(passes):
            words, numbers, targets = batch(step, part=part * passes + index, parts=parts * passes)
            loss = functional.mse_loss(model(words, numbers), targets) / passes
            loss.backward()
            if logs:  # where one rank has started its gradients and another has not
                hvd.allreduce(loss.detach(), name="loss")
        if clip is None:
            optimizer.step()
        elif parts == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        else:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        schedule.step()
    return model.state_dict()


def check(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    what: str,
    *,
    relative: float = RELATIVE,
) -> None:
    worst = max(
        float((value - expected[name]).abs().max() / expected[name].abs().max())
        for name, value in found.items()
    )
    if hvd.rank() == 0:
        print(f"{what}: {worst:.1e}", flush=True)
    assert worst < relative, f"{what}: {worst}"


def alone(make: Make, *, clip: float | None = None) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make(model)
    # A parameter without gradient counts as zeros, as over the ranks.
    optimizer.register_step_pre_hook(lambda *_: with_zeros(model))
    return train(model, optimizer, clip=clip)


def with_zeros(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def together(
    make: Make, *, sparse: bool = False, passes: int = 1, clip: float | None = None, **options: Any
) -> Any:
    model = make_model(sparse=sparse)
    if "groups" in options and isinstance(options["groups"], str):
        options["groups"] = [list(model.layers.parameters())[:3], [model.often.weight]]
    optimizer = hvd.DistributedOptimizer(
        make(model), named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return train(model, optimizer, part=hvd.rank(), parts=hvd.size(), passes=passes, clip=clip, logs=True)


def ways() -> Iterator[tuple[str, dict[str, Any], float]]:
    yield "plain", {}, RELATIVE
    yield "two passes", {"passes": 2}, RELATIVE
    yield "groups", {"groups": 3}, RELATIVE
    yield "listed groups", {"groups": "listed"}, RELATIVE
    yield "predivided", {"gradient_predivide_factor": 2.0}, RELATIVE
    yield "fp16", {"compression": hvd.Compression.fp16}, 3e-2
    yield "own compression", {"compression": Doubled()}, RELATIVE


class Doubled:
    """A compression of the user's."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return tensor * 2, 2

    def decompress(self, tensor: torch.Tensor, ctx: int) -> torch.Tensor:
        return tensor / ctx


def averages() -> None:
    expected = {make: alone(make) for make in (adam, sgd)}
    for what, options, relative in ways():
        check(together(sgd, **options), expected[sgd], what, relative=relative)
    check(together(adam), expected[adam], "Adam")
    check(together(sgd, clip=0.3), alone(sgd, clip=0.3), "clipped")
    check(together(sgd, sparse=True, sparse_as_dense=True), expected[sgd], "sparse as dense")
    check(together(sgd, sparse=True), expected[sgd], "sparse")
    rate = hvd.size()
    summed = together(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1 / rate, momentum=0.9), op=hvd.Sum
    )
    check(summed, expected[sgd], "sum")


def of_a_process_set() -> None:
    """Two ranks train together, the others alone."""
    size = hvd.size()
    if size < 3:
        return
    pair = hvd.add_process_set([0, 2])
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), process_set=pair
    )
    inside = pair.included()
    found = train(model, optimizer, part=pair.rank() if inside else 0, parts=2 if inside else 1)
    reference = make_model()
    plain = sgd(reference)
    if inside:
        plain.register_step_pre_hook(lambda *_: with_zeros(reference))
    check(found, train(reference, plain), "process set")


def adasum() -> None:
    """The changes of the parameters, combined; with one rank an ordinary step."""
    model, copies = make_model(), [make_model() for _ in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    plain = [torch.optim.SGD(each.parameters(), lr=0.1) for each in copies]
    for step in range(3):
        start = copy.deepcopy(copies[0].state_dict())
        for part, (each, its) in enumerate(zip(copies, plain, strict=True)):
            for trained, stepper in [(each, its)] + ([(model, optimizer)] if part == hvd.rank() else []):
                stepper.zero_grad()
                words, numbers, targets = batch(step, part=part, parts=hvd.size())
                functional.mse_loss(trained(words, numbers), targets).backward()
            its.step()
        optimizer.step()
        for name, value in start.items():
            changes = [each.state_dict()[name] - value for each in copies]
            while len(changes) > 1:
                changes = [
                    combined(*changes[i : i + 2]) if len(changes) > i + 1 else changes[i]
                    for i in range(0, len(changes), 2)
                ]
            for each in copies:
                each.state_dict()[name].copy_(value + changes[0])
    check(model.state_dict(), copies[0].state_dict(), "Adasum")


def combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    both, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    share_a = 1 - both / (2 * of_a) if of_a > 0 else 1.0
    share_b = 1 - both / (2 * of_b) if of_b > 0 else 1.0
    return a * share_a + b * share_b


def joined() -> None:
    """Rank r has r + 2 batches: what is summed, and that all end with the same parameters."""
    rank, size = hvd.rank(), hvd.size()
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)

    def loss(trained: torch.nn.Module, step: int, part: int) -> torch.Tensor:
        words, numbers, targets = batch(step, part=part, parts=size)
        return functional.mse_loss(trained(words, numbers), targets)

    for step in range(rank + 2):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
    assert hvd.join() == size - 1
    for step in range(size + 1):
        plain.zero_grad()
        sum(loss(reference, step, part) for part in range(size) if step < part + 2).div(size).backward()
        plain.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    check(model.state_dict(), reference.state_dict(), "join")


def guards() -> None:
    model = make_model()
    named = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=named)
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer._parameter_names == {parameter: name for name, parameter in named}  # type: ignore[attr-defined]
    nameless = hvd.DistributedOptimizer(sgd(make_model()))._parameter_names  # type: ignore[attr-defined]
    assert list(nameless.values()) == [f"allreduce.noname.0.{place}" for place in range(len(named))]
    words, numbers, targets = batch(0, part=hvd.rank(), parts=hvd.size())

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = functional.mse_loss(model(words, numbers), targets)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    closure()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(warning.message) for warning in seen)
    if hvd.size() > 1:
        functional.mse_loss(model(words, numbers), targets).backward()
        refused(optimizer.zero_grad)
        refused(lambda: functional.mse_loss(model(words, numbers), targets).backward())
        optimizer.step()
        optimizer.set_backward_passes_per_step(2)
        for _ in range(2):
            functional.mse_loss(model(words, numbers), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra], "lr": 1.0, "momentum": 0.0})
    for _ in range(2 if hvd.size() > 1 else 1):
        (extra * hvd.rank() / 2).sum().backward()
    optimizer.step()
    mean = (hvd.size() - 1) / 2
    assert hvd.size() == 1 or torch.equal(extra.detach(), torch.full_like(extra, -mean)), extra
    for options in (
        {"named_parameters": named[:2]},
        {"named_parameters": [p for _, p in named]},
        {"named_parameters": [("same", p) for _, p in named]},
        {"groups": 0},
        {"groups": [[model.frozen], [model.frozen]]},
        {"backward_passes_per_step": 0},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"process_set": hvd.ProcessSet([0])},
    ):
        try:
            hvd.DistributedOptimizer(sgd(model), **options)
        except ValueError:
            continue
        raise AssertionError(f"no error: {options}")


def stepped_with(model: torch.nn.Module, optimizer: Any, gradient: torch.Tensor | None) -> None:
    next(model.parameters()).grad = gradient
    optimizer.step()


def gradients_in_use() -> None:
    """What a script does with gradients while they are reduced is refused; after `synchronize` it counts."""
    if hvd.size() == 1:
        return
    _, numbers, targets = batch(0, part=hvd.rank(), parts=hvd.size())
    uses: dict[str, Callable[[torch.nn.Module, Any], object]] = {
        "clip_grad_norm_": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        "clip_grad_value_": lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1),
        "foreach": lambda model, _: torch._foreach_mul_([p.grad for p in model.parameters()], 2.0),
        "data": lambda model, _: next(model.parameters()).grad.data.zero_(),  # type: ignore[union-attr]
        "numpy": lambda model, _: next(model.parameters()).grad.numpy(),  # type: ignore[union-attr]
        "GradScaler": lambda _, optimizer: grad_scaler.step(optimizer),
        "another backward": lambda model, _: model(numbers).square().mean().backward(),
        "None": lambda model, optimizer: stepped_with(model, optimizer, None),
        "another tensor": lambda model, optimizer: stepped_with(
            model, optimizer, torch.ones(8, WIDTH).double()
        ),
    }
    for name, use in uses.items():
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ).double()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        grad_scaler.scale(functional.mse_loss(model(numbers), targets)).backward()
        before = copy.deepcopy(model.state_dict())
        refused(lambda: use(model, optimizer))  # noqa: B023
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items()), name
        if name not in ("None", "another tensor"):
            optimizer.step()  # nothing was lost
            check(model.state_dict(), hvd.broadcast_object(model.state_dict()), name)
            assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


def refused(function: Callable[[], object]) -> None:
    try:
        function()
    except UsageError:
        return
    raise AssertionError("no error")


def main() -> None:
    hvd.init(timeout_s=300)
    gradient_reduction.BUCKET_BYTES = 2048  # several buckets
    for case in (averages, of_a_process_set, adasum, joined, guards, gradients_in_use):
        case()
    hvd.shutdown()
    print("agrees", flush=True)


if __name__ == "__main__":
    main()
