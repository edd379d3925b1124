"""All gangs of a job, through plain methods: each asks every rank, waits no longer than its limit, and says for what.

A rank that dies or raises fails the wait at once. Then the others leave their groups and get a moment to report what they
saw, so that the cause can be told from its consequences, and all signs leave together as FleetFailed. Ranks that are lost
can be replaced; the others keep their processes and what they hold.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import TypeVar

from raytrain3d.checkpoint.progress import SaveProgress, SaveStart
from raytrain3d.errors import RankFailed
from raytrain3d.gang.failure import Sign, raised
from raytrain3d.gang.handle import Answers, Gangs, RankDied, RankHandle, RankRaised, leaders_of
from raytrain3d.gang.hang import HangWatch
from raytrain3d.gang.reports import ReportReader
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import LeaseEnd, LeaseRequest, NodeFacts, RankWorker
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import EvaluationReport, StepReport
from raytrain3d.train.standing import Standing

T = TypeVar("T")
POLL_S = 1.0
DRAIN_S = 10.0
"""Longest wait for reports of steps that are over."""
PROMPT_S = 0.2
"""Longest wait for answers that can be had another time."""


class FleetFailed(Exception):
    """Some ranks died, raised or did not answer. `signs` in the order they were seen."""

    def __init__(self, signs: Sequence[Sign]) -> None:
        super().__init__(", ".join(f"rank {sign.rank} {sign.kind}" for sign in signs))
        self.signs = tuple(signs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Longest waits, in seconds."""

    start_s: float = 600.0
    """Until a process answers, and for its probe of directories and data."""
    work_s: float = 660.0
    """For joining and for an evaluation; above the ranks' own limit of one communication."""
    hang_s: float = 120.0
    """Without any movement in a lease."""
    storage_s: float = 3600.0
    """For loading or saving a checkpoint."""
    decisive_s: float = 2.0
    """After a failure, for more signs when one that explains it is there."""
    undecided_s: float = 8.0
    """The same when ranks have only lost connections."""
    close_s: float = 3.0
    """For a rank to leave by itself."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A run of steps under way on every rank."""

    request: LeaseRequest
    futures: Mapping[int, Future[LeaseEnd]]
    """By the first rank of a leader."""
    answers: Answers


class Fleet:
    """The ranks of a job, in rank order. `stop` may end the waits of starting, never those of saving."""

    def __init__(self, gangs: Gangs, stop: StopFlag, limits: Limits) -> None:
        self.gangs, self._stop, self._limits = gangs, stop, limits
        self._watch, self._generation = HangWatch(limits.hang_s), 0
        self._reader = ReportReader(self._ranks, after=0)

    @property
    def _ranks(self) -> list[RankHandle]:
        return sorted((handle for gang in self.gangs.present.values() for handle in gang.ranks),
                      key=lambda handle: handle.rank)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Those that have a gang."""
        return tuple(sorted(self.gangs.present))

    @property
    def nodes(self) -> dict[int, str]:
        """Rank -> name of its node."""
        return {handle.rank: handle.node for handle in self._ranks}

    def facts(self, *, may_stop: bool = True) -> list[NodeFacts]:
        """Where every rank runs; returns when all processes have started."""
        futures = {handle.rank: handle.call(RankWorker.facts) for handle in self._ranks}
        return self._all("starting", futures, self._limits.start_s, may_stop=may_stop)

    def probe(self, run_directory: str) -> None:
        """One rank of every node tries the run directory and reads all data shards."""
        first = {handle.node: handle for handle in reversed(self._ranks)}
        futures = {handle.rank: handle.call(RankWorker.probe, run_directory) for handle in first.values()}
        self._all("probing run directory and data", futures, self._limits.start_s, may_stop=True)

    def join(self, host: str, port: int, generation: int) -> None:
        """Every rank makes its trainer and joins the groups of `generation`."""
        self._generation = generation
        futures = {handle.rank: handle.call(RankWorker.join, host, port, generation, self.replicas)
                   for handle in self._ranks}
        self._all("joining", futures, self._limits.work_s, may_stop=generation == 0)
        self._watch.begin_generation()

    def join_ring(self, peers: tuple[int, ...]) -> None:
        """peers: rank -> the rank that keeps its snapshots."""
        futures = {handle.rank: handle.call(RankWorker.join_ring, peers) for handle in self._ranks}
        self._all("joining", futures, self._limits.work_s)

    def replace(self, lost: Collection[int], plan: Plan) -> None:
        """End what is left of ranks that are lost, which frees whoever waits for them, and start new processes for them."""
        for gang in self.gangs.present.values():
            for rank in sorted({handle.rank for handle in gang.ranks} & set(lost)):
                gang.replace(rank, plan)

    def stand(self, ranks: Collection[int]) -> dict[int, Standing]:
        """These ranks leave their groups and say what they hold."""
        self._abort()
        futures = {handle.rank: handle.call(RankWorker.stand) for handle in self._ranks if handle.rank in ranks}
        return dict(zip(sorted(futures), self._all("leaving their groups", futures, self._limits.work_s), strict=True))

    def recover(self, step: int, values: Sequence[float] | None, fills: Sequence[tuple[int, int]]) -> None:
        """Every rank comes to hold `step`; see `Trainer.recover`."""
        futures = {handle.rank: handle.call(RankWorker.recover, step, values, fills) for handle in self._ranks}
        self._all("filling ranks", futures, self._limits.work_s)

    def go_back(self, step: int, stages: Stages, fills: Sequence[tuple[int, int]]) -> None:
        """Every rank comes to hold the snapshot of `step`; see `Trainer.go_back`."""
        futures = {handle.rank: handle.call(RankWorker.go_back, step, stages, fills) for handle in self._ranks}
        self._all("filling ranks", futures, self._limits.work_s)
        self._reader = ReportReader(self._ranks, after=step)

    def last_reports(self, step: int) -> list[tuple[StepReport, ...]]:
        """After a failure: what ranks still report of each step up to `step`. Reports of later steps are not waited for any
        more, nor those that lost ranks took with them."""
        rest = self._reader.rest(step, DRAIN_S)
        self._reader = ReportReader(self._ranks, after=step)
        return rest

    def restore(self, directory: str | None, step: int) -> str | None:
        """Every rank holds the state of `step`, from a checkpoint directory or fresh. Returns why the checkpoint cannot be
        loaded, if so; another one may then be tried."""
        futures = {handle.rank: handle.call(RankWorker.restore, directory, step) for handle in self._ranks}
        errors = self._all("loading", futures, self._limits.storage_s, may_stop=True)
        self._reader = ReportReader(self._ranks, after=step)
        return next((error for error in errors if error is not None), None)

    def train(self, first: int, last: int, left_out: frozenset[int] = frozenset()) -> Lease:
        """Start a lease; `wait` tells when it has ended. Steps in `left_out` are passed over."""
        self._watch.begin()
        request = LeaseRequest(first=first, last=last, left_out=left_out, generation=self._generation)
        futures = {leader.ranks[0]: leader.train(request) for leader in leaders_of(self._ranks)}
        return Lease(request, futures, Answers(futures.values()))

    def wait(self, lease: Lease, limit_s: float, plan: Plan) -> LeaseEnd | None:
        """How the lease ended, or None when it is still running after `limit_s`. plan: what the ranks are running."""
        lease.answers.wait(limit_s)
        if lease.answers.any_failed:
            raise self._lease_failure(lease)
        if not lease.answers.all_there:
            hung = self._watch.check(self._ranks, plan)
            if hung is not None:
                raise FleetFailed([hung])
            return None
        ends = {future.result() for future in lease.futures.values()}
        if len(ends) > 1:
            raise RankFailed(f"ranks left the lease of steps {lease.request.first} to {lease.request.last} differently: "
                             f"{ends}", rank=0)
        return ends.pop()

    def _lease_failure(self, lease: Lease) -> FleetFailed:
        """As the ranks tell it; if none of them knows of an error, as their leaders do."""
        found = self._failure({handle.rank: handle.call(RankWorker.error) for handle in self._ranks}, None)
        if found.signs:
            return found
        return FleetFailed([self._sign(rank, lease.futures[rank].exception(), None)
                            for rank in sorted(_failed(lease.futures))])

    def reports(self, *, limit_s: float, until: int | None = None) -> list[tuple[StepReport, ...]]:
        """Reports of all ranks for every step that all have newly reported. Waits `limit_s` at most: for one answer, or
        until step `until` is among them."""
        end = time.monotonic() + limit_s
        whole = self._reader.poll(limit_s, now=until is not None)
        while until is not None and self._reader.reached < until and time.monotonic() < end:
            whole += self._reader.poll(end - time.monotonic(), now=True)
        if whole:
            self._watch.saw_steps(report.seconds for reports in whole for report in reports)
        return whole

    def request_stop(self) -> None:
        """One rank is enough: its wish reaches all with the next commit."""
        self._ranks[0].ask(RankWorker.request_stop)

    def evaluate(self) -> EvaluationReport:
        futures = {handle.rank: handle.call(RankWorker.evaluate) for handle in self._ranks}
        return self._all("evaluating", futures, self._limits.work_s)[0]

    def save(self, directory: str, step: int, *, behind: bool) -> list[SaveStart]:
        """Every rank begins to write its shard; in rank order. behind: beside the next lease."""
        futures = {handle.rank: handle.call(RankWorker.save, directory, step, behind) for handle in self._ranks}
        return self._all("saving", futures, self._limits.storage_s)

    def save_progress(self, *, training: bool) -> list[SaveProgress] | None:
        """How far the ranks are with it; in rank order. training: a lease is under way, whose wait finds ranks that fail,
        so None if not all answer at once."""
        futures = {handle.rank: handle.ask(RankWorker.save_progress) for handle in self._ranks}
        if training:
            _, waiting = wait(futures.values(), timeout=PROMPT_S, return_when=FIRST_EXCEPTION)
            if waiting or _failed(futures):
                return None
        return self._all("saving", futures, self._limits.storage_s)

    def hurry_save(self) -> None:
        """Nothing trains until it is written."""
        for handle in self._ranks:
            handle.ask(RankWorker.hurry_save)

    def call_off_save(self) -> None:
        """No rank writes any more when this returns."""
        futures = {handle.rank: handle.call(RankWorker.call_off_save) for handle in self._ranks}
        self._all("calling off a save", futures, self._limits.storage_s)

    def copy_layer(self, layer: int, source: int, target: int) -> int:
        """Pipeline rank `target` of every replica gets a copy of a layer from `source`. Returns the bytes sent by all."""
        futures = {handle.rank: handle.call(RankWorker.copy_layer, layer, source, target) for handle in self._ranks}
        return sum(self._all("copying a layer", futures, self._limits.work_s))

    def adopt(self, stages: Stages, shares: tuple[int, ...]) -> None:
        """Every rank holds and computes what the committed plan says."""
        futures = {handle.rank: handle.call(RankWorker.adopt, stages, shares) for handle in self._ranks}
        self._all("taking over a new split", futures, self._limits.work_s)

    def measure_links(self) -> list[dict[str, float]]:
        futures = {handle.rank: handle.call(RankWorker.measure_links) for handle in self._ranks}
        return self._all("measuring links", futures, self._limits.work_s, may_stop=True)

    def measure_disk(self, directory: str) -> dict[str, float]:
        """Node -> bytes a second of writing to `directory`."""
        first = {handle.node: handle for handle in reversed(self._ranks)}
        futures = {handle.rank: handle.call(RankWorker.measure_disk, directory) for handle in first.values()}
        rates = self._all("writing a file", futures, self._limits.storage_s, may_stop=True)
        nodes = self.nodes
        return {nodes[rank]: rate for rank, rate in zip(sorted(futures), rates, strict=True)}

    def leave(self) -> None:
        """Let ranks leave their groups and close their files by themselves, as far as they do it in time."""
        wait([handle.call(RankWorker.close) for handle in self._ranks], timeout=self._limits.close_s)

    def _all(self, what: str, futures: Mapping[int, Future[T]], limit_s: float, *, may_stop: bool = False) -> list[T]:
        """Results in rank order; FleetFailed when a rank fails or `limit_s` is over."""
        end = time.monotonic() + limit_s
        while True:
            _, waiting = wait(futures.values(), timeout=min(POLL_S, limit_s), return_when=FIRST_EXCEPTION)
            if _failed(futures):
                raise self._failure(futures, what)
            if not waiting:
                return [futures[rank].result() for rank in sorted(futures)]
            if may_stop:
                self._stop.check()
            if time.monotonic() > end:
                silent = [rank for rank in sorted(futures) if not futures[rank].done()]
                raise FleetFailed([Sign(rank=rank, kind="silent", cause=f"no answer in {limit_s:g} s", during=what)
                                   for rank in silent])

    def _abort(self) -> None:
        """No rank waits on its device for another one any more."""
        wait([handle.ask(RankWorker.abort) for handle in self._ranks], timeout=POLL_S)

    def _failure(self, futures: Mapping[int, Future[T]], what: str | None) -> FleetFailed:
        """Collect signs until what happened is clear. what: absent while training."""
        self._abort()
        for handle in self._ranks:  # who has nothing to do any more frees whoever waits for it
            handle.call(RankWorker.stand)
        signs: dict[int, Sign] = {}
        start = time.monotonic()
        while True:
            for rank in sorted(_failed(futures) - signs.keys()):
                signs[rank] = self._sign(rank, futures[rank].exception(), what)
            decided = any(sign.kind != "lost connection" for sign in signs.values())
            limit = self._limits.decisive_s if decided else self._limits.undecided_s
            waiting = [future for future in futures.values() if not future.done()]
            if not waiting or time.monotonic() - start > limit:
                return FleetFailed(list(signs.values()))
            wait(waiting, timeout=0.1, return_when=FIRST_EXCEPTION)

    def _sign(self, rank: int, error: BaseException | None, what: str | None) -> Sign:
        if isinstance(error, RankRaised):
            e = error.error
            return raised(rank, e.kind, e.message, step=e.step, op=e.op, during=what, traceback=e.traceback)
        if isinstance(error, RankDied):
            step = self._reader.latest[rank] + 1 if what is None else None
            return Sign(rank=rank, kind="died", cause=str(error), step=step, during=what)
        raise AssertionError(f"rank {rank}: {error!r}") from error


def _failed(futures: Mapping[int, Future[T]]) -> set[int]:
    return {rank for rank, future in futures.items() if future.done() and future.exception() is not None}

