"""A character-level language model: a small decoder-only transformer over bytes of text."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpctrain.train import Fields


class TransformerBlock(nn.Module):
    """Pre-norm transformer block (Vaswani et al. 2017, arXiv:1706.03762; Xiong et al. 2020, arXiv:2002.04745)."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        # Ordered by head, then query, key and value, so that the rows of a rank with some of the heads are contiguous.
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the block's output for `hidden`, float of shape (batch, window, width), in the same shape."""
        mixed = self.attention_in(self.attention_norm(hidden))
        # As many heads as this rank has. Each: (batch, heads, window, head width).
        query, key, value = mixed.unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        hidden = hidden + self.attention_out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Embeddings(nn.Module):
    """Computes the sum of token and position embeddings.

    Input: tokens, shape (batch, window). Output: shape (batch, window, width).
    """

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _embedded(tokens, by_token=self.tokens, by_place=self.positions)


def _embedded(tokens: torch.Tensor, *, by_token: nn.Embedding, by_place: nn.Embedding) -> torch.Tensor:
    embedded: torch.Tensor = by_token(tokens) + by_place(torch.arange(tokens.shape[1], device=tokens.device))
    return embedded


class Transformer(nn.Module):
    """Computes the logits of the next token, shape (batch, window, vocabulary), from tokens, shape (batch, window)."""

    def __init__(
        self, *, vocabulary: int, window: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(window, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width=width, heads=heads, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for parameter in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(parameter, std=0.02)

    def layers(self) -> list[nn.Module]:
        """Returns the layers of the model, in the order in which forward calls them one after another."""
        return [Embeddings(self.tokens, self.positions), *self.blocks, self.norm, self.head]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = _embedded(tokens, by_token=self.tokens, by_place=self.positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Characters:
    """The task of predicting the next byte. The field `tokens` holds integers of shape (n, window + 1).

    The loss is in nats per character.
    """

    def __init__(
        self, *, window: int = 128, vocabulary: int = 256, width: int = 128, layers: int = 2, heads: int = 4,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        self._shape = {
            "vocabulary": vocabulary, "window": window, "width": width, "layers": layers, "heads": heads,
            "dropout": dropout,
        }  # fmt: skip

    def build_model(self) -> nn.Module:
        return Transformer(**self._shape)  # type: ignore[arg-type]

    def pipeline_layers(self, model: Transformer) -> list[nn.Module]:
        return model.layers()

    def tensor_plan(self) -> dict[str, str | tuple[str, int]]:
        """Returns the plan by which attention heads and hidden features of feed-forward layers are split over ranks.

        If the recipe sets `parallel.sequence`, each rank computes all other layers on a part of the window.
        """
        heads, window = int(self._shape["heads"]), int(self._shape["window"])
        return {
            "tokens": ("sequence", window),
            "positions": ("sequence", window),
            "blocks.*.attention_norm": "sequence",
            "blocks.*.attention_in": ("column", heads),
            "blocks.*.attention_out": ("row", heads),
            "blocks.*.feed_forward_norm": "sequence",
            "blocks.*.feed_forward.0": "column",
            "blocks.*.feed_forward.2": "row",
            "norm": "sequence",
            "head": "sequence-gathered",
        }

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        tokens = fields["tokens"].long()
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def metrics(self, model: nn.Module, fields: Fields) -> dict[str, float]:
        return {"nats_per_character": float(self.loss(model, fields))}
