"""Jobs of a cluster's job server (`ray job submit`), by the name of the run that they train."""

import json
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobSubmissionClient

import raytrain3d
from raytrain3d.checkpoint.storage import is_absolute
from raytrain3d.config import JobConfig
from raytrain3d.data.check import parts_of
from raytrain3d.errors import ConfigError
from raytrain3d.gang.follow import JobState, Unreachable
from raytrain3d.gang.mailbox import Status, status_from
from raytrain3d.gang.ray_cluster import environment
from raytrain3d.load import dump

JOB_FILE = "job.yaml"
RUN, GRACE, PYTHON = "raytrain3d_run", "raytrain3d_grace_s", "raytrain3d_python"
"""Keys of a job's metadata. Jobs that were not submitted by `raytrain3d submit` have none."""
STOP_MARGIN_S = 30.0
"""How much longer than a job's grace a stop is waited for."""
ASK_LIMIT_S = 120.0
NO_AGENT, AGENT_LIMIT_S = "No available agent", 60.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """How a job is run on a cluster."""

    grace_s: int = 300
    """Time to save a checkpoint after a stop, before Ray ends the driver."""
    python: str = "python"
    """Interpreter of the driver, as the head node finds it."""
    ship: bool = True
    """Send this package along; else the cluster's images have it."""


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """One job on its server."""

    id: str
    _client: JobSubmissionClient = field(repr=False)

    def details(self) -> JobDetails:
        return _reached(lambda: self._client.get_job_info(self.id))

    def state(self) -> JobState:
        details = self.details()
        return JobState(status=details.status.value, exit_code=details.driver_exit_code, message=details.message or "")

    async def output(self) -> AsyncIterator[str]:
        try:
            async for text in self._client.tail_job_logs(self.id):
                yield text
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            raise Unreachable(f"the output of job {self.id} broke off ({error})") from error

    def printed(self) -> str:
        """The driver's whole output so far."""
        text: str = _reached(lambda: self._client.get_job_logs(self.id))
        return text

    @property
    def grace_s(self) -> float | None:
        """Time between a stop and the end of its driver; None when it was submitted by other means."""
        grace = (self.details().metadata or {}).get(GRACE)
        return None if grace is None else float(grace)

    def stop(self) -> JobState:
        """Ask it to stop and wait until it has ended; at most as long as Ray lets it, and a little."""
        grace = self.grace_s or 0.0
        _reached(lambda: self._client.stop_job(self.id))
        return self.wait(grace + STOP_MARGIN_S)

    def wait(self, limit_s: float) -> JobState:
        """Its state when it has ended, or after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while not (state := self.state()).has_ended and time.monotonic() < end:
            time.sleep(0.5)
        return state


class ClusterJobs:
    """The job server at `address`: URL of the dashboard, or address of the cluster; None for the one that is running here.

    Raises Unreachable when it does not answer.
    """

    def __init__(self, address: str | None) -> None:
        named = {"RAY_API_SERVER_ADDRESS": address} if address is not None else {}  # else RAY_ADDRESS would win over it
        with environment(named):
            self._client = _reached(lambda: JobSubmissionClient(address), address)
        self.url = self._client.get_address()

    def submit(self, config: JobConfig, how: Submission) -> ClusterJob:
        """Submit a training job. ConfigError when a job of this run has not ended, or paths would lead nowhere there."""
        check_paths(config)
        run = config.run.name
        under_way = self._newest(run)
        if under_way is not None and not JobState(status=under_way.status.value).has_ended:
            raise ConfigError(f"run.name is {run!r}: job {under_way.submission_id} of that run is under way on {self.url}. "
                              f"Stop it with `raytrain3d stop {run} --address {self.url}`, or choose another run.name")
        identity = f"{run}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        with _staged(config, how) as directory:
            self._submit(
                entrypoint=f"exec {shlex.quote(how.python)} -m raytrain3d train {JOB_FILE}", submission_id=identity,
                runtime_env={"working_dir": directory, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(how.grace_s)}},
                metadata={RUN: run, GRACE: str(how.grace_s), PYTHON: how.python})
        return ClusterJob(identity, self._client)

    def job_of(self, run: str) -> ClusterJob:
        """The newest job of the run, or the job of that id. ConfigError when there is none."""
        details = self._newest(run)
        if details is None or details.submission_id is None:
            raise ConfigError(f"no job of a run {run!r} is known at {self.url}: give the run's name or the job's id "
                              "(`ray job list` shows all)")
        return ClusterJob(details.submission_id, self._client)

    def ask(self, run: str, command: str) -> Status | None:
        """Send a command to the mailbox of a run that is under way. None when it does not answer.

        Through a small job beside it, which takes seconds: only the cluster's own nodes reach its actors.
        """
        details = self.job_of(run).details()
        metadata = details.metadata or {}
        python = metadata.get(PYTHON, "python")
        entrypoint = shlex.join(["exec", python, "-m", "raytrain3d.gang.ask", metadata.get(RUN, run), command])
        working = {key: value for key, value in (details.runtime_env or {}).items() if key == "working_dir"}
        asking = ClusterJob(self._submit(entrypoint=entrypoint, runtime_env=working), self._client)
        ended = asking.wait(ASK_LIMIT_S)
        lines = asking.printed().splitlines()
        if ended.status != "SUCCEEDED":
            asking.stop()
            return None
        return status_from(json.loads(lines[-1]))

    def _submit(self, **job: Any) -> str:
        """The job's id. A head that has just started has no agent to run jobs yet."""
        end = time.monotonic() + AGENT_LIMIT_S
        while True:
            try:
                return _reached(lambda: self._client.submit_job(**job))
            except Unreachable as error:
                if NO_AGENT not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(1)

    def _newest(self, run: str) -> JobDetails | None:
        jobs = [job for job in _reached(self._client.list_jobs) if job.submission_id is not None
                and run in ((job.metadata or {}).get(RUN), job.submission_id)]
        return max(jobs, key=lambda job: job.start_time or 0, default=None)


def failure_hint(state: JobState, output: str) -> str | None:
    """What to do about a job that failed before it could say so itself."""
    missing = re.search(r"No module named '?([\w.]+)", output + state.message)
    if state.status == "FAILED" and missing is not None:
        return (f"the cluster's `python` lacks {missing[1]}: give the interpreter of its images with --python, such as "
                "/opt/venv/bin/python")
    return None


def check_paths(config: JobConfig) -> None:
    """ConfigError for a path that would be looked for in the job's temporary working directory."""
    data = [] if config.data.text else [(part.key, part.path) for part in parts_of(config)]
    for key, path in (("run.directory", config.run.directory), *data,
                      ("model.from_huggingface", config.model.from_huggingface)):
        if path is not None and not is_absolute(path):
            raise ConfigError(f"{key} is {path!r}: the job runs on the cluster, in a working directory that is deleted "
                              f"after it. Give an absolute path or a URI that all nodes share, such as {key}=/shared/{path}")


@contextmanager
def _staged(config: JobConfig, how: Submission) -> Iterator[str]:
    """A directory with what the job needs: its file and, if it is shipped, the package."""
    with tempfile.TemporaryDirectory(prefix="raytrain3d-submit-") as directory:
        Path(directory, JOB_FILE).write_text(dump(config), encoding="utf-8")
        if how.ship:
            package = Path(raytrain3d.__file__).parent
            shutil.copytree(package, Path(directory, package.name), ignore=shutil.ignore_patterns("__pycache__"))
        yield directory


def _reached(call: Callable[[], T], address: str | None = None) -> T:
    """What `call` returns. Ray's many errors of a server that does not answer, or refuses, in one."""
    try:
        return call()
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f" at {address}" if address else ""
        raise Unreachable(f"the cluster's job server{where} does not do it: {error}") from error
