"""A small job to vary."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig

SMALL = JobConfig(
    run=RunConfig(name="test"), data=DataConfig(path="tokens"), mesh=MeshConfig(),
    model=ModelConfig(vocabulary=256, hidden=64, blocks=4, heads=4, feed_forward=192),
    train=TrainConfig(steps=10, global_batch=8, sequence=32),
)


@pytest.fixture(scope="session")
def job() -> Callable[..., JobConfig]:
    """job(data=2, blocks=3, dtype="bf16"): a small job with fields of model, mesh, pipeline and train replaced."""
    def build(**changes: Any) -> JobConfig:
        sections = {}
        for name, section in (("model", ModelConfig), ("mesh", MeshConfig), ("pipeline", PipelineConfig),
                              ("train", TrainConfig)):
            own = {f.name for f in fields(section)} - ({"recompute"} if name == "pipeline" else set())
            picked = {key: changes.pop(key) for key in list(changes) if key in own}
            sections[name] = replace(getattr(SMALL, name), **picked)
        assert not changes, f"no such fields: {changes}"
        return replace(SMALL, **sections)

    return build
