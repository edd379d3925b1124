"""Learning-rate schedules at the steps that define them."""

import pytest

from raytrain3d.config import LearningRateConfig
from raytrain3d.train.lr import learning_rate


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warmup_is_a_line_to_the_peak(schedule: str) -> None:
    config = LearningRateConfig(peak=1.0, warmup=10, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(config, n, 100) for n in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_last_step_has_the_final_rate() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        config = LearningRateConfig(peak=1.0, final=0.1, warmup=10, schedule=schedule)  # type: ignore[arg-type]
        assert learning_rate(config, 100, 100) == pytest.approx(0.1)


def test_middle_of_the_schedules() -> None:
    assert learning_rate(LearningRateConfig(peak=1.0, warmup=0), 50, 100) == pytest.approx(0.5)
    assert learning_rate(LearningRateConfig(peak=1.0, schedule="linear"), 25, 100) == pytest.approx(0.75)
    stable = LearningRateConfig(peak=1.0, schedule="wsd", decay=10)
    assert [learning_rate(stable, n, 100) for n in (89, 90, 95)] == pytest.approx([1.0, 1.0, 0.5])
    assert learning_rate(LearningRateConfig(peak=1.0, schedule="constant"), 100, 100) == 1.0
