"""The section [data] of a recipe as the objects of a run."""

from __future__ import annotations

from typing import Any

from hpctrain.data import ORDER_NAME, Blocks, Dataset, OrderSpec, Sequential, Shuffled, Stratified, Weighted
from hpctrain.data.column import read_column
from hpctrain.data.orders import block_samples_for
from hpctrain.run.recipe import DataSection


def order_of(section: DataSection, dataset: Dataset) -> OrderSpec:
    """The order of training samples. Reads weights or strata. Raises DataError where they do not fit."""
    chosen = section.chosen_order
    if chosen == "blocks":
        return Blocks(
            block_samples=section.order_block or default_block(dataset), window_blocks=section.order_window
        )
    if section.weights is not None:
        return Weighted(weights=read_column(dataset, section.weights))
    if section.strata is not None:
        return Stratified(classes=read_column(dataset, section.strata))
    return Sequential() if chosen == "sequential" else Shuffled()


def default_block(dataset: Dataset) -> int:
    """Samples in a block where the recipe does not say."""
    windows = dataset.manifest.tokens
    if windows is not None:  # windows may overlap: what counts is the stream they are cut from
        itemsize = sum(spec.sample_bytes for spec in dataset.fields.values()) // (windows.window + 1)
        return block_samples_for(windows.stride * itemsize)
    return block_samples_for(sum(spec.sample_bytes for spec in dataset.fields.values()))


def place_identity(order: OrderSpec) -> dict[str, Any]:
    """What a checkpoint notes of the order, without which its place in the data means nothing."""
    # The two plain orders are noted as they were before there were others.
    if isinstance(order, Sequential):
        return {"order": ORDER_NAME, "shuffle": False}
    return {"order": order.name, "shuffle": True}
