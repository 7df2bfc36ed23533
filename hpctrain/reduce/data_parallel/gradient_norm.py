"""Squares of gradients: nearly as fast as one look at the memory, and exact enough for a norm."""

from __future__ import annotations

import torch

# Norms are taken of rows of so many elements, and of those in float64: a float32 sum over a whole bucket would
# lose up to a thousandth, a float64 one takes four times as long.
ROW_ELEMS = 1024


def in_rows(gradients: torch.Tensor) -> list[torch.Tensor]:
    """Views of shape (rows, elements), none of them empty, that cover `gradients`, shape (n,)."""
    whole = gradients.numel() - gradients.numel() % ROW_ELEMS
    return [rows for rows in (gradients[:whole].view(-1, ROW_ELEMS), gradients[None, whole:]) if rows.numel()]


def square_of(norms: torch.Tensor) -> float:
    """Sum of the squares of norms, shape (n,)."""
    norm = float(torch.linalg.vector_norm(norms, dtype=torch.float64))
    return norm * norm  # ** would raise where this is infinite
