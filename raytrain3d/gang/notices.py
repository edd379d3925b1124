"""What a cloud says about the end of one of its machines, read from the machine's own metadata service. Needs no package.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
Google: https://cloud.google.com/compute/docs/instances/create-use-preemptible
Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

Provider = Literal["aws", "gcp", "azure"]
Fetch = Callable[..., str | None]
"""(path, headers, method) -> text, None where there is nothing at the path."""
GCP_LEFT_S = 30.0
"""From its notice to the end of a machine."""
ANSWER_S = 2.0


def fetch_from(address: str) -> Fetch:
    """Of the metadata service at `address` (`http://169.254.169.254` on every cloud). OSError when it does not answer."""
    def fetch(path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        request = urllib.request.Request(address + path, headers=dict(headers), method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise

    return fetch


def ends_at(provider: Provider, fetch: Fetch) -> float | None:
    """When this machine goes away, in seconds since 1970; None without a notice. ValueError for an answer that is none."""
    match provider:
        case "aws":
            return _aws(fetch)
        case "gcp":
            preempted = fetch("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
            return time.time() + GCP_LEFT_S if preempted is not None and preempted.strip() == "TRUE" else None
        case "azure":
            return _azure(fetch)


def _aws(fetch: Fetch) -> float | None:
    token = fetch("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, "PUT")
    text = fetch("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    if text is None:
        return None
    action = json.loads(text)
    return datetime.fromisoformat(action["time"]).timestamp() if action["action"] in ("terminate", "stop") else None


def _azure(fetch: Fetch) -> float | None:
    headers = {"Metadata": "true"}
    text = fetch("/metadata/scheduledevents?api-version=2020-07-01", headers)
    name = fetch("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    ends = [_azure_end(event) for event in json.loads(text or "{}").get("Events", [])
            if event["EventType"] in ("Preempt", "Terminate") and name in event["Resources"]]
    return min(ends, default=None)


def _azure_end(event: Mapping[str, Any]) -> float:
    """An event without a time may begin at once."""
    return parsedate_to_datetime(event["NotBefore"]).timestamp() if event.get("NotBefore") else time.time()
