"""Notices of clouds, as their metadata services give them."""

import json
import time
from typing import Any

import pytest
from metadata import served

from raytrain3d.gang.notices import GCP_LEFT_S, ends_at, fetch_from

NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


@pytest.mark.parametrize(("action", "end"), [
    (None, None), ({"action": "terminate", "time": "2025-03-01T08:22:00Z"}, 1740817320.0),
    ({"action": "hibernate", "time": "2025-03-01T08:22:00Z"}, None)])
def test_aws(action: dict[str, str] | None, end: float | None) -> None:
    def answer(method: str, path: str, headers: Any) -> str | None:
        if (method, path) == ("PUT", "/latest/api/token"):
            return "secret" if headers["X-aws-ec2-metadata-token-ttl-seconds"] else None
        assert (method, path) == ("GET", "/latest/meta-data/spot/instance-action")
        assert headers["X-aws-ec2-metadata-token"] == "secret"
        return None if action is None else json.dumps(action)

    with served(answer) as address:
        assert ends_at("aws", fetch_from(address)) == end


@pytest.mark.parametrize("word", ["TRUE", "FALSE"])
def test_gcp(word: str) -> None:
    def answer(method: str, path: str, headers: Any) -> str | None:
        assert (path, headers["Metadata-Flavor"]) == ("/computeMetadata/v1/instance/preempted", "Google")
        return word

    with served(answer) as address:
        end = ends_at("gcp", fetch_from(address))
    assert end == pytest.approx(time.time() + GCP_LEFT_S, abs=5) if word == "TRUE" else end is None


@pytest.mark.parametrize(("kind", "machine", "end"), [
    ("Preempt", "me", 1740817320.0), ("Preempt", "other", None), ("Reboot", "me", None)])
def test_azure(kind: str, machine: str, end: float | None) -> None:
    events = {"Events": [{"EventType": kind, "Resources": [machine], "NotBefore": "Sat, 01 Mar 2025 08:22:00 GMT"}]}

    def answer(method: str, path: str, headers: Any) -> str | None:
        assert headers["Metadata"] == "true"
        return {NAME: "me", EVENTS: json.dumps(events)}.get(path)

    with served(answer) as address:
        assert ends_at("azure", fetch_from(address)) == end


def test_a_service_that_is_away_is_an_os_error() -> None:
    with served(lambda *_: None) as address:
        pass
    with pytest.raises(OSError):
        ends_at("gcp", fetch_from(address))
