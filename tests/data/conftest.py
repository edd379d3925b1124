"""A small corpus, and jobs that read it."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain3d.config import DataConfig, EvaluateConfig, JobConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.data.manifest import DatasetManifest
from raytrain3d.data.prepare import prepare


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 documents of 0 to 400 letters, in two levels of directories."""
    letters = random.Random(0)
    for number in range(40):
        file = tmp_path / "corpus" / f"part{number % 3}" / f"{number:02d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(letters.choices("abcdefgh \n", k=number * 10)))
    return tmp_path / "corpus"


@pytest.fixture
def dataset(corpus: Path, tmp_path: Path) -> tuple[Path, DatasetManifest]:
    """The corpus prepared with bytes, in shards of 500 tokens so that samples cross them."""
    path = tmp_path / "data"
    return path, prepare([f"{corpus}/**/*.txt"], str(path), "bytes", 0.2, shard_tokens=500)


@pytest.fixture
def job(dataset: tuple[Path, DatasetManifest]) -> Callable[..., JobConfig]:
    """A job on that dataset; keywords change the train section, `vocabulary`, `data` and `evaluate` what they name."""
    path = str(dataset[0])

    def make(*, vocabulary: int = 257, data: dict[str, Any] | None = None, evaluate: int = 64,
             **train: Any) -> JobConfig:
        basis = TrainConfig(steps=6, global_batch=12, micro_batch=1, sequence=16, seed=3)
        return JobConfig(
            run=RunConfig(name="test"), evaluate=EvaluateConfig(samples=evaluate),
            model=ModelConfig(vocabulary=vocabulary, hidden=8, blocks=1, heads=1, feed_forward=8),
            train=replace(basis, **train), data=replace(DataConfig(path=path), **(data or {})))

    return make
