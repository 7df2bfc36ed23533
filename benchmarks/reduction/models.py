"""The two models whose steps are timed: a small transformer and an MLP, with random batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

NUM_SYMBOLS = 96
CONTEXT = 64
WIDTH = 256
NUM_HEADS = 4
NUM_BLOCKS = 4
FEATURES = 1024
HIDDEN = 2048
NUM_BATCHES = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.into(x).view(batch, length, 3, NUM_HEADS, WIDTH // NUM_HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Predicts the next character. 3.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.symbols(symbols) + self.places)))


def make_mlp() -> nn.Module:
    """8.4 million parameters."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, FEATURES),
    )  # fmt: skip


Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, batches for one rank, and the function that computes the loss of a batch."""

    make: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], list[Batch]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    samples_per_step: int  # of one rank


def _texts(count: int) -> Callable[[torch.Generator], list[Batch]]:
    def batches(generator: torch.Generator) -> list[Batch]:
        texts = torch.randint(NUM_SYMBOLS, (NUM_BATCHES, count, CONTEXT + 1), generator=generator)
        return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]

    return batches


def _vectors(count: int) -> Callable[[torch.Generator], list[Batch]]:
    def batches(generator: torch.Generator) -> list[Batch]:
        return [
            (
                torch.randn(count, FEATURES, generator=generator),
                torch.randn(count, FEATURES, generator=generator),
            )
            for _ in range(NUM_BATCHES)
        ]

    return batches


def _of_characters(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


TEXTS_PER_STEP = 6
VECTORS_PER_STEP = 16
WORKLOADS = {
    "transformer": Workload(
        make=Transformer,
        batches=_texts(TEXTS_PER_STEP),
        loss=_of_characters,
        samples_per_step=TEXTS_PER_STEP,
    ),
    "mlp": Workload(
        make=make_mlp,
        batches=_vectors(VECTORS_PER_STEP),
        loss=functional.mse_loss,
        samples_per_step=VECTORS_PER_STEP,
    ),
}
