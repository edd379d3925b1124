"""A rank without a model: it steps in lock-step with the others over sockets, so that it fails as real ranks do.

Rank 0 listens; each step every rank sends its flags there and receives the sum. What goes wrong, and when, is read from
a file in run.directory, so that a test can also ask for it in the middle of a run.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain3d.checkpoint.manifest import Manifest, Receipt
from raytrain3d.checkpoint.progress import SaveProgress, SaveStart
from raytrain3d.config import JobConfig
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.train.position import Position
from raytrain3d.train.report import EvaluationReport, SetReport, StepReport
from raytrain3d.train.standing import Standing

if TYPE_CHECKING:
    from raytrain3d.checkpoint.layout import Piece
    from raytrain3d.checkpoint.writer import ShardWriter

FAULT = "fault.json"


def set_fault(config: JobConfig, rank: int, step: int | str, kind: str) -> None:
    """step: 0 for joining, `links` for their measurement, `recover` for being filled. kind: exit, raise, connection, hang.
    Happens once."""
    path = Path(config.run.directory) / FAULT
    path.with_suffix(".partial").write_text(json.dumps({"rank": rank, "step": step, "kind": kind}))
    path.with_suffix(".partial").replace(path)


class FakeTrainer:
    """The methods of Trainer. A step takes the seconds that train.seed says, in hundredths."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int) -> None:
        self._config, self._plan, self._rank = config, plan, rank
        self._stage = plan.stages_of(plan.mesh.coordinate(rank).pipeline)[0]
        self._directory = Path(config.run.directory)
        self._links: list[Connection] = []
        self._stop_asked = False
        self._now = 0
        self._held: int | None = None
        self._agreed: tuple[int, tuple[float, ...]] | None = None
        self._saving = 0
        self._writer: ShardWriter | None = None
        self.current_op: str | None = None

    def connect(self, host: str, port: int, generation: int, replicas: Sequence[int]) -> None:
        self._fail(0)
        self._plan = self._plan.with_replicas(replicas)
        first, *others = self._plan.ranks
        self._is_first = self._rank == first
        address = f"\0raytrain3d-fake-{port}-{generation}"  # abstract: leaves no file
        if self._is_first:
            with Listener(address, "AF_UNIX", backlog=64) as listener:
                self._links = [listener.accept() for _ in others]
            return
        end = time.monotonic() + 20
        while not self._links:
            try:
                self._links = [Client(address, "AF_UNIX")]
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def initialize(self) -> None:
        pass

    def load(self, directory: str) -> None:
        Manifest.from_json((Path(directory) / "manifest.json").read_text(), directory)

    def begin_lease(self) -> None:
        self._stop_asked = False

    def step(self, n: int) -> StepReport:
        start = time.perf_counter()
        self.current_op, self._now = f"{self._stage}F0", n
        self._fail(n)
        time.sleep(self._config.train.seed / 100)
        stop = self._exchange(self._stop_asked, n)
        self._held = n
        return self._report(n, stop, time.perf_counter() - start)

    def _report(self, n: int, stop: bool, seconds: float) -> StepReport:
        return StepReport(step=n, rank=self._rank, loss=5.0 / n, tokens=100, gradient_norm=1.0, learning_rate=1e-3,
                          stop=stop, seconds=seconds, compute_s=seconds / 2, data_wait_s=0.0, receive_wait_s=0.0,
                          reduce_wait_s=0.0, commit_wait_s=seconds / 2, optimizer_s=0.0, memory_bytes=2**20,
                          layer_forward_s={0: 0.1})

    def evaluate(self) -> EvaluationReport:
        self._exchange(False)
        return EvaluationReport(sets=(SetReport(name="validation", loss=2.0, tokens=64),), seconds=0.01)

    def save(self, directory: str, step: int, *, behind: bool) -> SaveStart:
        self._saving = step
        if self._is_first:  # others without torch, which takes longer to load than all else here
            from raytrain3d.checkpoint.writer import ShardWriter
            self._writer = self._writer or ShardWriter(0)
            self._writer.start(directory, step, self._pieces(), behind=behind)
        return SaveStart(pause_s=0.01, num_bytes=100)

    def save_progress(self) -> SaveProgress:
        if self._writer is not None:
            return self._writer.progress
        receipt = Receipt(rank=self._rank, step=self._saving, file=None, entries=())
        return SaveProgress(step=self._saving, receipt=receipt, seconds=0.0, failures=0, error=None)

    def hurry_save(self) -> None:
        if self._writer is not None:
            self._writer.hurry()

    def call_off_save(self) -> None:
        if self._writer is not None:
            self._writer.call_off()

    def measure_links(self) -> dict[str, float]:
        self._fail("links")
        return {"ms to rank 0": 0.1}

    def request_stop(self) -> None:
        self._stop_asked = True

    def adopt(self, stages: Stages, shares: tuple[int, ...]) -> None:
        pass

    def position(self) -> Position:
        return Position(step=self._now, phase="program", op=self.current_op)

    def standing(self) -> Standing:
        return Standing(held=self._held, agreed=self._agreed if self._held is not None else None)

    def stand_at(self, step: int) -> None:
        self._held = step

    def recover(self, step: int, values: Sequence[float] | None, fills: Sequence[tuple[int, int]]) -> StepReport | None:
        self._fail("recover")
        forward = self._held is not None and self._held < step
        assert not forward or (self._held == step - 1 and values is not None)
        assert self._held is not None or self._rank in dict(fills)
        self._held = step
        return self._report(step, False, 0.01) if forward else None

    def abort(self) -> None:
        pass

    def disconnect(self) -> None:
        self.close()

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._links = []

    def _exchange(self, flag: bool, n: int | None = None) -> bool:
        try:
            return self._sum(flag, n)
        except (EOFError, OSError):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer") from None

    def _sum(self, flag: bool, n: int | None) -> bool:
        if self._is_first:
            wishes = [link.recv() for link in self._links]
            total = flag or any(wishes)
        else:
            self._links[0].send(flag)
            total = bool(self._links[0].recv())
        if n is not None:
            self._agreed = (n, (float(total),))
        if self._is_first:
            for link in self._links:
                link.send(total)
        return total

    def _pieces(self) -> list["Piece"]:
        import torch

        from raytrain3d.checkpoint.identity import global_shapes
        from raytrain3d.checkpoint.layout import KINDS, Piece
        from raytrain3d.plan.params import Rectangle
        return [Piece(name=name, kind=kind, rectangle=Rectangle(offset=(0,) * len(shape), shape=shape),
                      tensor=torch.zeros(shape))
                for name, shape in global_shapes(self._config).items() for kind in KINDS if kind != "master"]

    def _fail(self, step: int | str) -> None:
        try:
            fault = json.loads((self._directory / FAULT).read_text())
        except OSError:
            return
        if (fault["rank"], fault["step"]) != (self._rank, step):
            return
        (self._directory / FAULT).unlink()
        match fault["kind"]:
            case "exit":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise MemoryError("no room for activations")
            case "connection":
                raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
            case "hang":
                time.sleep(1000)
