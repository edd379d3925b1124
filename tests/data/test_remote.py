"""Data sets at a URI: the same samples as from a directory, through a cache that keeps to its limit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain3d.config import JobConfig, SourceConfig
from raytrain3d.data.check import check_data
from raytrain3d.data.folder import Cache
from raytrain3d.data.loader import Loader
from raytrain3d.data.manifest import DatasetManifest
from raytrain3d.data.tokens import Dataset
from raytrain3d.errors import DataError
from raytrain3d.plan.plan import make_plan

Prepared = tuple[Path, DatasetManifest]


def _cached(cache: Path) -> list[Path]:
    return list(cache.glob("*/*"))


def test_samples_are_those_of_the_directory_and_the_cache_keeps_to_its_limit(dataset: Prepared, tmp_path: Path) -> None:
    path, manifest = dataset
    size = max((path / shard.file).stat().st_size for shard in manifest.train)
    cache = Cache(directory=str(tmp_path / "cache"), limit_bytes=3 * size)
    near, far = Dataset.open(str(path), "train"), Dataset.open(f"file://{path}", "train", cache)
    for index in [*range(far.num_samples(16)), 0, far.num_samples(16) - 1, 0]:
        assert far.sample(index, 16).tolist() == near.sample(index, 16).tolist()
        assert far.document_starts(index, 16).tolist() == near.document_starts(index, 16).tolist()
        assert sum(file.stat().st_size for file in _cached(tmp_path / "cache")) <= 3 * size
    assert len(manifest.train) > 3
    assert 1 <= len(_cached(tmp_path / "cache")) <= 3


def test_a_file_larger_than_the_cache_is_an_error(dataset: Prepared, tmp_path: Path) -> None:
    far = Dataset.open(f"file://{dataset[0]}", "train", Cache(directory=str(tmp_path / "cache"), limit_bytes=10))
    with pytest.raises(DataError, match=r"data\.cache_gib is .*train-00000-000\.arrow alone has"):
        far.sample(0, 16)
    assert _cached(tmp_path / "cache") == []


def test_missing_files_are_named(dataset: Prepared, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json cannot be read"):
        Dataset.open(f"file://{tmp_path}/nowhere", "train")
    far = Dataset.open(f"file://{dataset[0]}", "train", Cache(directory=str(tmp_path / "cache")))
    (dataset[0] / dataset[1].train[0].file).unlink()
    with pytest.raises(DataError, match=r"train-00000-000\.arrow cannot be copied to the cache"):
        far.sample(0, 16)


def test_a_job_trains_on_a_mixture_of_near_and_far(job: Callable[..., JobConfig], dataset: Prepared, tmp_path: Path) -> None:
    sources = tuple(SourceConfig(name=name, path=path, weight=1.0)
                    for name, path in (("near", str(dataset[0])), ("far", f"file://{dataset[0]}")))
    config = job(data={"path": None, "sources": sources, "cache_directory": str(tmp_path / "cache")})
    check_data(config)
    loader = Loader(config, make_plan(config), 0)
    try:
        assert [each.name for each in loader.validation_sets] == ["near", "far"]
        near, far = (loader.validation(number) for number in (0, 1))
        assert [each.tokens.tolist() for each in near] == [each.tokens.tolist() for each in far]
        assert len(loader.micro_batches(1)) == 12
    finally:
        loader.close()
    assert _cached(tmp_path / "cache")
