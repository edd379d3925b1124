"""Runners and references shared by the tests of this folder."""

import pytest
from jobs import JobRunner
from parity import Reference
from rank_pool import RankPool


@pytest.fixture(scope="session")
def run_job(pool: RankPool) -> JobRunner:
    return JobRunner(pool)


@pytest.fixture(scope="session")
def reference(run_job: JobRunner) -> Reference:
    return Reference(run_job)
