"""What a position in the data belongs to: dataset, order and handling of the last batch."""

from __future__ import annotations

from typing import Any

from hpctrain.data import ORDER_NAME, Loader, Sequential


def data_identity(loader: Loader, *, fingerprint: str | None) -> dict[str, Any]:
    """Returns what a position in the data belongs to; a checkpoint stores it, and `TrainingState.restore` compares it.

    fingerprint: of the dataset's content; None for samples that have no manifest: then their number is compared.
    """
    # The two simple orders have the names that they had before there were others.
    plain = isinstance(loader.order, Sequential)
    return {
        **({"dataset": fingerprint} if fingerprint is not None else {"samples": loader.dataset.num_samples}),
        "order": ORDER_NAME if plain else loader.order.name,
        "shuffle": not plain,
        "last_batch": loader.last_batch.value,
    }
