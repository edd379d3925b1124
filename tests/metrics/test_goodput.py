"""Which part of the time counted."""

import time

import pytest

from raytrain3d.metrics.goodput import Goodput


def test_steps_that_are_done_again_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    goodput = Goodput()
    assert goodput.share is None
    goodput.begin()
    for step in (1, 2, 3, 4):
        goodput.count(step, 2.0)
    now = 110.0
    assert goodput.share == pytest.approx(0.8)
    goodput.rewind(2)
    now = 120.0
    goodput.begin()
    assert goodput.share == pytest.approx(0.2)
    for step in (3, 4):
        goodput.count(step, 3.0)
    assert goodput.share == pytest.approx(0.5)
