"""What every test gets: a Hypothesis profile whose examples do not depend on the day or on the machine's speed, and ranks
that all tests of a session share."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from rank_pool import RankPool

settings.register_profile("steady", derandomize=True, deadline=None, database=None, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Processes with torch loaded; they start when first asked for."""
    pool = RankPool()
    yield pool
    pool.close()
