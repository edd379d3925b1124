"""The driver's connection to Ray: the cluster that was named or is running, else one of its own on this machine."""

import logging
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray._private.services import find_bootstrap_address

from raytrain3d.config import JobConfig
from raytrain3d.errors import RayTrain3DError

NAMESPACE = "raytrain3d"
OBJECT_STORE_BYTES = 100 * 2**20
"""Of a Ray of our own: nothing but control goes through it."""
OWN_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Ray would let its own helpers go before the ranks, at niceness 15; here the ranks are what the machine is for."""


def node_address() -> str:
    """Address of this node as Ray knows it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def find_cluster(address: str | None) -> str | None:
    """Address of the cluster to use: the given one, RAY_ADDRESS, or the one that `ray start` has left running here."""
    if address or os.environ.get("RAY_ADDRESS"):
        return address or os.environ["RAY_ADDRESS"]
    running: str | None = find_bootstrap_address(None)
    return running if running is not None and _listens(running) else None


def _listens(address: str) -> bool:
    """Whether anything listens there: the note that `ray start` leaves behind outlives a killed cluster."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def connected(config: JobConfig, address: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Connected to Ray inside; a cluster of our own is gone afterwards. A driver that is connected already stays so."""
    if ray.is_initialized():
        yield
        return
    found = find_cluster(address)
    with _joined(found, say) if found is not None else _own(config, say):
        yield


@contextmanager
def _joined(address: str, say: Callable[[str], None]) -> Iterator[None]:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise RayTrain3DError(f"cannot connect to the Ray cluster at {address}: {error}") from error
    try:
        say(f"Ray cluster at {address}")
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own(config: JobConfig, say: Callable[[str], None]) -> Iterator[None]:
    num_ranks = config.mesh.replicas * config.mesh.pipeline * config.mesh.tensor
    num_cpus = math.ceil(round(num_ranks * config.placement.cpus_per_rank, 4))
    directory = tempfile.mkdtemp(prefix="rt3d-")  # short: sockets below it have room for about a hundred characters
    with environment(OWN_ENVIRONMENT):
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False,
                     logging_level=logging.ERROR, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=directory)
            say(f"no Ray cluster is running: started one on this machine with {num_cpus} CPUs")
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set inside, as it was outside. Ray takes these settings from nowhere else."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
