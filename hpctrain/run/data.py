"""Opens the datasets of a run and creates the objects of the recipe's section [data]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.data import (
    Blocks,
    CollectiveDataset,
    Dataset,
    MemoryStore,
    OrderSpec,
    Samples,
    Sequential,
    Shuffled,
    StagedDataset,
    Stratified,
    Verify,
    Weighted,
    block_samples_for,
    make_checker,
    read_column,
)
from hpctrain.errors import DataError
from hpctrain.run.recipe.schema import DataSection
from hpctrain.run.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDatasets:
    """The data of a run.

    Attributes:
        dataset: The training dataset.
        samples: The source of the training batches: `dataset`, or a wrapper that copies the files of the dataset to the
            node, reads the dataset collectively, or holds it in memory.
        held_out: The evaluation dataset; None without `data.held_out`.
    """

    dataset: Dataset
    samples: Samples
    held_out: Dataset | None


def open_data(section: DataSection, *, session: Session) -> RunDatasets:
    """Opens the datasets of a run as its recipe says. Collective.

    Wrappers of the training dataset are closed with the session. Raises DataError on every rank if the data cannot be
    opened.
    """
    dataset = _open_checked(section.train, section, session=session)
    held_out = None
    if section.held_out is not None:
        held_out = _open_checked(section.held_out, section, session=session)
    samples: Samples = dataset
    if section.io == "collective":
        together = CollectiveDataset.open(session.world, dataset)
        session.on_close(together.close)
        samples = together
    elif section.memory_store:
        store = MemoryStore.load(session.world, dataset)
        session.on_close(store.close)
        samples = store
    elif section.stage is not None:
        samples = session.agreed(lambda: _staged(section, dataset, session=session), os_error=DataError)
    return RunDatasets(dataset=dataset, samples=samples, held_out=held_out)


def _staged(section: DataSection, dataset: Dataset, *, session: Session) -> StagedDataset:
    def reopen(folder: Path) -> Dataset:
        copies = Dataset.open(folder, verify=Verify.OFF, io=section.io, cache_bytes=dataset.asked_cache_bytes)
        copies.checker = make_checker(folder, copies.manifest, mode=section.check)
        return copies

    assert section.stage is not None
    staged = StagedDataset.open(
        dataset, directory=section.stage, max_bytes=int(section.stage_gb * 1e9), reopen=reopen
    )
    session.on_close(staged.close)  # registered at once: copying has started, and another rank may fail
    return staged


def _open_checked(directory: str, section: DataSection, *, session: Session) -> Dataset:
    dataset = session.open_dataset(
        directory,
        verify=section.check_files,
        io="auto" if section.io == "collective" else section.io,
        cache_bytes=None if section.cache_mb is None else int(section.cache_mb * 1e6),
    )
    dataset.checker = session.agreed(
        lambda: make_checker(dataset.directory, dataset.manifest, mode=section.check), os_error=DataError
    )
    return dataset


def order_of(section: DataSection, dataset: Dataset) -> OrderSpec:
    """Returns the order of the training samples.

    Reads the samples' weights or strata, if the order uses them. Raises DataError if they do not match the dataset.
    """
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
    """Returns the default number of samples per block for the order `blocks`."""
    windows = dataset.manifest.tokens
    if windows is not None:  # windows may overlap: count the bytes of the token stream, not of the windows
        itemsize = sum(spec.sample_bytes for spec in dataset.fields.values()) // (windows.window + 1)
        return block_samples_for(windows.stride * itemsize)
    return block_samples_for(sum(spec.sample_bytes for spec in dataset.fields.values()))
