"""Where a run directory may lie when ranks are on several nodes."""

import pytest

from raytrain3d.errors import ConfigError
from raytrain3d.gang.run_directory import check_shared


def test_a_relative_directory_is_refused_on_several_nodes() -> None:
    with pytest.raises(ConfigError, match=r"run\.directory is 'runs': ranks are on 2 nodes \(10\.0\.0\.1, 10\.0\.0\.2\)"):
        check_shared("runs", {"10.0.0.2", "10.0.0.1"})


@pytest.mark.parametrize(("given", "nodes"), [("runs", {"a"}), ("/shared/runs", {"a", "b"}), ("s3://b/r", {"a", "b"})])
def test_what_all_ranks_share_is_taken(given: str, nodes: set[str]) -> None:
    check_shared(given, nodes)
