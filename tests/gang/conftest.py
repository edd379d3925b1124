"""What tests of jobs that go on after faults share."""

from collections.abc import Iterator

import psutil
import pytest
from chaos_jobs import Undisturbed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("chaos"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test: no new child, none of its children, no port that this process listens on."""
    before = _belongings()
    yield
    assert _belongings() == before


def _belongings() -> tuple[set[int], set[int]]:
    process = psutil.Process()
    ports = {link.laddr.port for link in process.net_connections() if link.status == psutil.CONN_LISTEN}
    return {child.pid for child in process.children(recursive=True)}, ports
