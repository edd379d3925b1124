"""Tests that need Debian's prometheus are left out without it; dashboards/check.sh installs it."""

import shutil

import pytest


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: dashboards/check.sh installs Debian's prometheus")
    return found
