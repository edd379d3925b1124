"""Ranks and references shared by the tests of this folder."""

from collections.abc import Iterator

import pytest
from jobs import JobRunner
from parity import Reference
from rank_pool import RankPool


@pytest.fixture(scope="session")
def run_job() -> Iterator[JobRunner]:
    pool = RankPool()
    yield JobRunner(pool)
    pool.close()


@pytest.fixture(scope="session")
def reference(run_job: JobRunner) -> Reference:
    return Reference(run_job)
