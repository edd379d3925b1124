"""The copy of a run's metrics in Ray's own."""

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from raytrain3d.config import DataConfig, JobConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.gang import ray_metrics
from raytrain3d.gang.ray_metrics import ray_copy_of
from raytrain3d.metrics.run_metrics import RunMetrics
from raytrain3d.plan.plan import make_plan

CONFIG = JobConfig(run=RunConfig(name="copied"), data=DataConfig(path="d"),
                   model=ModelConfig(vocabulary=64, hidden=8, blocks=2, heads=2, feed_forward=8),
                   train=TrainConfig(steps=10, global_batch=4, sequence=8))
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class RecordedGauge:
    """In place of Ray's."""

    found: ClassVar[Series] = {}

    def __init__(self, name: str, description: str, tags: Sequence[str]) -> None:
        self._name, self._tags = name, set(tags)

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        assert tags.keys() == self._tags
        self.found[self._name, frozenset(tags.items())] = value


class RefusingGauge(RecordedGauge):
    def set(self, value: float, tags: Mapping[str, str]) -> None:
        raise ValueError("no such value")


@pytest.fixture
def metrics() -> RunMetrics:
    return RunMetrics(CONFIG, make_plan(CONFIG))


def test_ray_has_what_the_endpoint_has(metrics: RunMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_metrics, "Gauge", RecordedGauge)
    with ray_copy_of(metrics):
        metrics.event({"event": "failure", "cause": "deaths"})
    wanted = {(name, frozenset(labels.items())): value for name, labels, value in metrics.series()}
    assert wanted and RecordedGauge.found == wanted


def test_a_run_goes_on_when_ray_refuses_its_metrics(metrics: RunMetrics, monkeypatch: pytest.MonkeyPatch,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ray_metrics, "Gauge", RefusingGauge)
    with caplog.at_level(logging.ERROR), ray_copy_of(metrics):
        pass
    assert "no longer copied to Ray's" in caplog.text and "no such value" in caplog.text
