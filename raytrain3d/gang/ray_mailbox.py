"""The mailbox on Ray: a zero-CPU actor named `raytrain3d/<run>`. It lives as long as the driver."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from raytrain3d.gang.mailbox import Status, in_use
from raytrain3d.gang.ray_cluster import NAMESPACE, find_cluster

CALL_LIMIT_S = 10.0


def actor_name(run: str) -> str:
    return f"raytrain3d/{run}"


class MailboxActor:
    """Keeps commands until the driver takes them, and the last status it published."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._commands: list[str] = []

    def send(self, command: str) -> Status:
        """From outside; returns the status."""
        if command != "status":
            self._commands.append(command)
        return self._status

    def take(self) -> list[str]:
        """By the driver."""
        taken, self._commands = self._commands, []
        return taken

    def publish(self, status: Status) -> None:
        self._status = status


MAILBOX_ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0)(MailboxActor)


class RayMailbox:
    """The driver's side. ConfigError when the run's name is in use in the cluster."""

    def __init__(self, run: str) -> None:
        name = actor_name(run)
        if _find(name) is not None:
            raise in_use(run, f"actor {name!r} of this Ray cluster")
        try:
            self._actor = MAILBOX_ACTOR.options(name=name, namespace=NAMESPACE).remote(
                Status(run=run, state="starting", step=0, num_steps=0))
        except ValueError:
            raise in_use(run, f"actor {name!r} of this Ray cluster") from None
        self._taking: Future[list[str]] = self._actor.take.remote().future()

    def commands(self) -> list[str]:
        """What came until a moment ago: the answer is fetched for the next call."""
        if not self._taking.done():
            return []
        failed = self._taking.exception() is not None
        taken = [] if failed else self._taking.result()
        if not failed:
            self._taking = self._actor.take.remote().future()
        return taken

    def publish(self, status: Status) -> None:
        self._actor.publish.remote(status)

    def close(self) -> None:
        ray.kill(self._actor)


def _find(name: str) -> Any | None:
    """The live actor of that name, in any job of the cluster."""
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
        ray.get(actor.send.remote("status"), timeout=CALL_LIMIT_S)
    except (ValueError, RayActorError):
        return None
    return actor


@contextmanager
def _visiting(address: str) -> Iterator[None]:
    already = ray.is_initialized()
    if not already:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        if not already:
            ray.shutdown()


def ask_actor(run: str, command: str, address: str | None) -> Status | None:
    """Send `command` to a run of the cluster at `address`, or of the running one. None when there is no such run."""
    found = find_cluster(address)
    if found is None and not ray.is_initialized():
        return None
    try:
        with _visiting(found or ""):
            actor = _find(actor_name(run))
            return None if actor is None else ray.get(actor.send.remote(command), timeout=CALL_LIMIT_S)
    except (RayError, ConnectionError):
        return None
