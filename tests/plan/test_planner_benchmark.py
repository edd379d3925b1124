"""The planner's benchmark: its statistics, the splits it reads runs with, and the table of a paper."""

import runpy
import sys
from pathlib import Path
from typing import Any

import nanotron_runs
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def planner() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / "planner.py"))
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_rank_correlation(planner: Any) -> None:
    assert planner["spearman"]([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert planner["spearman"]([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert planner["ranks"]([5, 1, 5]) == [1.5, 0, 1.5]


def test_published_table_is_told_from_its_first_row(planner: Any) -> None:
    """https://arxiv.org/abs/2104.04473, table 1: one constant is set by the first row."""
    figures = planner["judge_table"](search=False)
    assert figures["sc21_mape"] <= 0.04
    assert figures["sc21_max"] <= 0.08
    assert figures["sc21_constant_max"] == pytest.approx(0.16, abs=0.005)
    assert figures["sc21_all_fit"]


def test_splits_of_measured_runs() -> None:
    split, models = nanotron_runs.split_at_thresholds, nanotron_runs.MODELS
    assert [end - first for first, end in split(models[8.86], 4)] == [10, 9, 8, 7]
    assert sum(end - first for first, end in split(models[1.34], 16)) == 18
