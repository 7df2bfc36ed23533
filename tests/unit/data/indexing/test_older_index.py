"""An index of a version that noted offsets of datasets whose bytes are not the values."""

from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5s, h5t

from hpctrain.data import Dataset, index_files
from hpctrain.data.format.manifest import Manifest, read_manifest, write_manifest


def as_older(manifest: Manifest, *, offsets: dict[str, int]) -> Manifest:
    """Returns the manifest as the older version wrote it. offsets: of fields, in bytes."""
    (shard,) = manifest.shards
    fields = {
        name: stored.model_copy(update={"offset": offsets.get(name, stored.offset)})
        for name, stored in shard.fields.items()
    }
    return manifest.model_copy(
        update={"attributes": {"source": "index"}, "shards": (shard.model_copy(update={"fields": fields}),)}
    )


def test_an_older_index_of_12_bit_integers_is_read_through_hdf5(tmp_path: Path) -> None:
    twelve = h5t.STD_I16LE.copy()
    twelve.set_precision(12)
    values = np.arange(-5, 5, dtype=np.int16) * 100
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = h5d.create(file.id, b"x", twelve, h5s.create_simple((10,)))
        dataset.write(h5s.ALL, h5s.ALL, values)
        offset = dataset.get_offset()
    index_files(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields="x=/x")
    write_manifest(
        as_older(read_manifest(tmp_path / "index"), offsets={"x": offset}), directory=tmp_path / "index"
    )
    assert np.array_equal(Dataset.open(tmp_path / "index").gather(np.arange(10))["x"], values)


def test_an_older_index_of_plain_files_is_the_same_dataset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(6.0)
    index_files(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields="x=/x")
    manifest = read_manifest(tmp_path / "index")
    older = as_older(manifest, offsets={})
    assert older != manifest
    assert older.fingerprint == manifest.fingerprint
    write_manifest(older, directory=tmp_path / "index")
    assert np.array_equal(Dataset.open(tmp_path / "index").gather(np.arange(6))["x"], np.arange(6.0))
