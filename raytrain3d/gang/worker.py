"""What one rank does for the driver, whether it lives in a Ray actor, a plain process or a thread.

A worker runs two kinds of requests. *Calls* come one after another in the thread that trains; *asks* (`reports`,
`request_stop`) are answered by another thread meanwhile. An error leaves as plain data, and only after every reference
to it is gone are the groups closed: a kept traceback would hold works of a group and let neighbours wait out the
timeout. The state stays, so that the rank can go on in the next generation.
"""

import gc
import logging
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from raytrain3d.config import JobConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.metrics.logs import log_to_file
from raytrain3d.metrics.trace_file import append_trace
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.train.garbage import planned_collections
from raytrain3d.train.position import Position
from raytrain3d.train.report import EvaluationReport, StepReport
from raytrain3d.train.standing import Standing

if TYPE_CHECKING:
    from raytrain3d.checkpoint.progress import SaveProgress, SaveStart
    from raytrain3d.train.trainer import Trainer

logger = logging.getLogger(__name__)
COMMUNICATION = ("parallel", "groups.py")
"""File in which a rank waits for others."""
P = ParamSpec("P")
T = TypeVar("T")
TrainerFactory = Callable[[JobConfig, Plan, int], "Trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """An exception of a rank, as text."""

    rank: int
    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str
    step: int | None
    """The step under way, if it was training."""
    op: str | None
    """The op of the program under way, if one was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Where a rank runs."""

    rank: int
    host: str
    address: str
    device: str
    """`cpu`, or name of the GPU."""
    cpu_model: str
    process: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """A run of steps that every rank is to do."""

    first: int
    last: int
    left_out: frozenset[int]
    """Steps that are passed over."""
    generation: int
    """Whose ranks it is meant for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseEnd:
    """How a lease ended on one rank."""

    step: int
    """Last step that this rank holds in full."""
    stopped: bool
    """Some rank was asked to stop: all left after this step."""
    skipped: bool = False
    """Its numbers were not finite: all left after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """What a worker is made from; travels to wherever it runs."""

    config: JobConfig
    plan: Plan
    rank: int
    address: str
    """Address of the rank's node."""
    log_directory: str | None
    """Absent: records go where the process's logging sends them."""
    device_index: int | None
    """Index of the rank's GPU among those the process sees; absent on CPU."""
    make_trainer: TrainerFactory

    def open_log(self) -> logging.Handler | None:
        """Send this process's records to the rank's log file."""
        if self.log_directory is None:
            return None
        pipeline = self.plan.mesh.coordinate(self.rank).pipeline
        return log_to_file(Path(self.log_directory), self.rank, pipeline, self.config.run.log_level)


def make_trainer(config: JobConfig, plan: Plan, rank: int) -> "Trainer":
    """The real trainer. Imported late: until a rank joins, its process does not need torch."""
    from raytrain3d.train.trainer import Trainer
    return Trainer(config, plan, rank)


class RankWorker:
    """One rank: its trainer, its reports, its log. Made anywhere; the trainer is made in the thread of `join`."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._rank = settings.rank
        self._trainer: Trainer | None = None
        self._reports: deque[StepReport] = deque()
        self._lock = threading.Lock()
        self._step: int | None = None
        self._generation: int | None = None
        self._error: RankError | None = None
        """Of the last call that raised in this generation."""
        self._thread: int | None = None
        """The one that runs calls."""

    def run(self, method: Callable[Concatenate["RankWorker", P], T], *args: P.args,
            **kwargs: P.kwargs) -> T | RankError:
        """Run a method of this class as a call; an exception becomes a RankError and all groups are closed."""
        self._thread = threading.get_ident()
        try:
            return method(self, *args, **kwargs)
        except Exception as caught:  # noqa: BLE001 - the driver must hear of anything
            error = self._error = self._describe(caught)
        # Here the exception and its traceback are gone, and with them the works and groups they held.
        logger.error("%s: %s\n%s", error.kind, error.message, error.traceback)
        self._disconnect()
        return error

    # Calls, in the thread that trains.

    def facts(self) -> NodeFacts:
        index = self._settings.device_index
        return NodeFacts(rank=self._rank, host=socket.gethostname(), address=self._settings.address,
                         device="cpu" if index is None else gpu_name(index), cpu_model=cpu_model(), process=os.getpid())

    def probe(self, run_directory: str) -> None:
        """Once per node, before anything is trained: is the run directory usable, are the data shards whole?"""
        from raytrain3d.checkpoint.storage import probe_directory
        from raytrain3d.data.check import check_shards
        probe_directory(run_directory)
        check_shards(self._settings.config)

    def prepare(self) -> None:
        """Make the trainer, which loads torch."""
        if self._settings.device_index is not None:
            import torch
            torch.cuda.set_device(self._settings.device_index)
        if self._trainer is None:
            self._trainer = self._settings.make_trainer(self._settings.config, self._settings.plan, self._rank)

    def join(self, host: str, port: int, generation: int, replicas: Sequence[int]) -> None:
        """Make the trainer, then all groups of `generation` through the driver's store. replicas: those that have ranks."""
        self.prepare()
        self._connected.connect(host, port, generation, replicas)
        self._generation, self._error = generation, None
        logger.info("process %d joined generation %d", os.getpid(), generation)

    def join_ring(self, peers: tuple[int, ...]) -> None:
        """Exchange snapshots; see `Trainer.join_ring`."""
        self._connected.join_ring(peers)

    def restore(self, directory: str | None, step: int) -> str | None:
        """Hold the state of `step`: from a checkpoint directory, or fresh weights. Returns why the checkpoint cannot be
        loaded, if so; the rank is then as good as before for another one."""
        try:
            if directory is None:
                self._connected.initialize()
            else:
                self._connected.load(directory)
        except CheckpointError as error:
            logger.warning("step %d: %s", step, error)
            return str(error)
        self._connected.stand_at(step)
        with self._lock:
            self._reports.clear()
        self._step = step
        logger.info("holding step %d from %s", step, directory or "fresh weights")
        return None

    def stand(self) -> Standing:
        """After a failure, here or elsewhere: leave all groups, which frees whoever waits on this rank. What it holds."""
        self._disconnect()
        standing = Standing() if self._trainer is None else self._trainer.standing()
        logger.info("standing at step %s", standing.held)
        return standing

    def recover(self, step: int, values: Sequence[float] | None, fills: Sequence[tuple[int, int]]) -> None:
        """Come to hold `step` like all others; see `Trainer.recover`."""
        report = self._connected.recover(step, values, fills)
        if report is not None:
            with self._lock:
                self._reports.append(replace(report, timeline=None))
        self._step = step
        logger.info("holding step %d, ranks filled: %s", step, [rank for rank, _ in fills])

    def go_back(self, step: int, stages: Stages, fills: Sequence[tuple[int, int]]) -> None:
        """Come to hold the snapshot of `step` like all others; see `Trainer.go_back`."""
        self._connected.go_back(step, stages, fills)
        with self._lock:
            self._reports.clear()
        self._step = step
        logger.info("holding the snapshot of step %d, ranks filled: %s", step, [rank for rank, _ in fills])

    def train(self, lease: LeaseRequest) -> LeaseEnd:
        """All steps of a lease, or until some rank was asked to stop, or numbers were not finite. One that comes so late
        that another generation has begun ends before its first step."""
        if lease.generation != self._generation:
            logger.warning("a lease of generation %d comes too late", lease.generation)
            return LeaseEnd(step=lease.first - 1, stopped=False)
        self._connected.begin_lease()
        train = self._settings.config.train
        with planned_collections(train.collect_interval if train.compile == "none" else None) as collect_after:
            for n in range(lease.first, lease.last + 1):
                self._step = n
                trainer = self._connected
                report = self._written_down(trainer.pass_over(n) if n in lease.left_out else trainer.step(n))
                with self._lock:
                    self._reports.append(report)
                logger.debug("step %d loss %.6f in %.3f s", n, report.loss, report.seconds)
                if report.stop or (report.skipped and n not in lease.left_out):
                    return LeaseEnd(step=n, stopped=report.stop, skipped=report.skipped)
                collect_after(n)
        return LeaseEnd(step=lease.last, stopped=False)

    def error(self) -> RankError | None:
        """What the last call that raised in this generation ended with."""
        return self._error

    def evaluate(self) -> EvaluationReport:
        return self._connected.evaluate()

    def save(self, directory: str, step: int, behind: bool) -> "SaveStart":
        """Begin to write a shard; see `Trainer.save`."""
        return self._connected.save(directory, step, behind=behind)

    def call_off_save(self) -> None:
        self._connected.call_off_save()

    def copy_layer(self, layer: int, source: int, target: int) -> int:
        """Part of a move between pipeline ranks; see `Trainer.copy_layer`. Returns the bytes sent."""
        return self._connected.copy_layer(layer, source, target)

    def adopt(self, stages: Stages, shares: tuple[int, ...]) -> None:
        """Hold and compute what the committed plan says; see `Trainer.adopt`."""
        self._connected.adopt(stages, shares)
        logger.info("stages %s, shares %s", stages, shares)

    def measure_links(self) -> dict[str, float]:
        """Latency and bandwidth to neighbours, by link; see `Trainer.measure_links`."""
        return self._connected.measure_links()

    def measure_disk(self, directory: str) -> float:
        """Bytes a second of writing to `directory`, synced."""
        from raytrain3d.gang.measure import write_rate
        return write_rate(directory, self._rank)

    def close(self) -> None:
        """Drop all groups, which wakes neighbours that wait on this rank. May be called again."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()

    # Asks, from another thread, while a call is running.

    def reports(self, after: int) -> list[StepReport]:
        """Reports of steps beyond `after`; older ones are acknowledged by it and dropped."""
        with self._lock:
            while self._reports and self._reports[0].step <= after:
                self._reports.popleft()
            return list(self._reports)

    def abort(self) -> None:
        """Another rank is lost: do not wait for it."""
        trainer = self._trainer
        if trainer is not None:
            trainer.abort()

    def position(self) -> Position:
        """Where the thread that trains is."""
        if self._trainer is None:
            return Position()
        frame = sys._current_frames().get(self._thread or 0)
        found = self._trainer.position()
        if frame is None:
            return found
        stack = traceback.extract_stack(frame)
        waits = any(Path(entry.filename).parts[-2:] == COMMUNICATION for entry in stack)
        return replace(found, waits=waits, stack="".join(traceback.format_list(stack)))

    def save_progress(self) -> "SaveProgress":
        """Of the save begun last."""
        return self._connected.save_progress()

    def hurry_save(self) -> None:
        """The driver waits for the save begun last."""
        self._connected.hurry_save()

    def request_stop(self) -> None:
        """All ranks leave the lease under way after the same step, the next one that commits."""
        trainer = self._trainer
        if trainer is not None:
            trainer.request_stop()

    def _disconnect(self) -> None:
        if self._trainer is not None:
            self._trainer.disconnect()
        gc.collect()

    @property
    def _connected(self) -> "Trainer":
        assert self._trainer is not None, "join() comes first"
        return self._trainer

    def _written_down(self, report: StepReport) -> StepReport:
        """The report without its timeline, which goes to the rank's trace file, not to the driver."""
        logs = self._settings.log_directory
        if logs is not None:
            append_trace(Path(logs).parent, report)
        return replace(report, timeline=None)

    def _describe(self, error: Exception) -> RankError:
        trainer = self._trainer
        text = "".join(traceback.format_exception(error))
        return RankError(rank=self._rank, kind=type(error).__name__, message=str(error), traceback=text,
                         step=self._step, op=trainer.current_op if trainer is not None else None)


def warm_up() -> None:
    """Load all that a rank needs, and go through a product and its backward, of which the first ones take long."""
    import torch

    import raytrain3d.train.trainer  # noqa: F401 - to have it loaded

    torch.set_num_threads(1)
    x = torch.ones(64, 64, requires_grad=True)
    torch.nn.functional.silu(x @ x).sum().backward()  # type: ignore[no-untyped-call]


def gpu_name(index: int) -> str:
    import torch
    return str(torch.cuda.get_device_name(index))


def cpu_model() -> str:
    """As the kernel names it; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
