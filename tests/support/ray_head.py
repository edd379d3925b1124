"""A Ray head of a test's own, started by `ray start` as people do, in a private directory. Only its processes are ended."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
from fake_jobs import wait_until

MARK = "RAYTRAIN3D_TEST_HEAD"
"""Environment variable that every process of a head inherits."""
BIN, ROOT = Path(sys.executable).parent, Path(__file__).parents[2]
RAY = str(BIN / "ray")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


class RayHead:
    """Runs from `start` to `stop`. environment: more variables, of all its processes."""

    def __init__(self, *, environment: dict[str, str] | None = None) -> None:
        self.directory = tempfile.mkdtemp(prefix="rt3d-")  # short: sockets below have room for about a hundred characters
        self._mark = uuid.uuid4().hex
        self.port, self._dashboard, self._agent = free_port(), free_port(), free_port()
        self.address, self.url = f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self._dashboard}"
        self.environment = {**_without_ray(), "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled",
                            "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": self.directory, **(environment or {})}

    def start(self, *options: str, num_cpus: int = 2) -> None:
        command = [RAY, "start", "--head", "--port", str(self.port), "--dashboard-host", "127.0.0.1",
                   "--dashboard-port", str(self._dashboard),
                   "--dashboard-agent-listen-port", str(self._agent), "--node-ip-address", "127.0.0.1",
                   "--temp-dir", self.directory,
                   "--num-cpus", str(num_cpus), "--num-gpus", "0", "--object-store-memory", "100000000",
                   "--include-dashboard", "true", "--disable-usage-stats", *options]
        done = self.run(*command, **{MARK: self._mark, "PYTHONPATH": ""})
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: _answers(self._agent), 60)

    def run(self, *command: str, cwd: Path | str | None = None, limit_s: float = 120,
            **more: str) -> subprocess.CompletedProcess[str]:
        """A command that finds nothing of this Ray but what it is given; more: environment variables."""
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=limit_s,
                              env={**self.environment, "PYTHONPATH": str(ROOT), **more})

    def popen(self, *command: str, output: Path, cwd: Path | str | None = None) -> "subprocess.Popen[str]":
        with output.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=self.environment)

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _environment(process).get(MARK) == self._mark]

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 5
            for process in self.processes():
                _signal(process, number)
            while self.processes() and time.monotonic() < end:
                time.sleep(0.2)
        shutil.rmtree(self.directory, ignore_errors=True)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _without_ray() -> dict[str, str]:
    """This process's environment, where the cluster cannot find the checkout: it must be sent there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "PYTHONPATH"}


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        found: dict[str, str] = process.environ()
    except (psutil.Error, OSError):
        return {}
    return found


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.Error):
        process.send_signal(number)
