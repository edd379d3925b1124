"""The driver of one job: a loop over few states that is the only place that acts.

Ranks run leases of steps by themselves; between leases, and about once a second meanwhile, the controller reads
reports, shows and records them, and listens for a wish to stop. Nothing here depends on what the ranks run in.
"""

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raytrain3d.checkpoint.store import remove, step_directory, steps
from raytrain3d.config import JobConfig
from raytrain3d.errors import RayTrain3DError
from raytrain3d.gang.fleet import DRAIN_S, POLL_S, Fleet, FleetFailed
from raytrain3d.gang.mailbox import Mailbox, Status, now
from raytrain3d.gang.membership import Membership
from raytrain3d.gang.rebalancer import Rebalancer
from raytrain3d.gang.recoverer import Recoverer, Store
from raytrain3d.gang.resume import check_resume, resume
from raytrain3d.gang.saving import Saver
from raytrain3d.gang.stability import Stability
from raytrain3d.gang.stop import StopFlag, StopRequested
from raytrain3d.metrics.expected import Expected
from raytrain3d.metrics.goodput import Goodput
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.summary import RebalanceSummary, StepSummary, summarize
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport


class State(enum.Enum):
    """Where a job stands."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the controller works on."""

    config: JobConfig
    plan: Plan
    directory: str
    """Run directory."""
    data: str | None
    """Fingerprint of the token data."""
    store_host: str
    """Address of the driver's node."""
    serve_store: Callable[[str, int], Store]
    check_nodes: Callable[[set[str]], None]
    """Raises ConfigError when the job cannot run on these nodes."""
    keep_plan: Callable[[Plan], None]
    """Writes the plan down after it has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a job ended when it did not fail."""

    step: int
    exit_code: int
    stopped: str | None
    """Who asked it to stop before its last step."""
    validation_loss: float | None
    checkpoint: str | None
    """Directory of the newest checkpoint."""
    rebalance: RebalanceSummary


def lease_end(step: int, config: JobConfig, decision: int | None = None) -> int:
    """Last step of the lease that begins after `step`: the next one after which something is due, `train.lease` steps away
    at most. decision: the next step with one about the split."""
    intervals = [n for n in (config.evaluate.interval, config.checkpoint.interval) if n is not None]
    due = [(step // n + 1) * n for n in intervals] + ([decision] if decision is not None else [])
    return min([config.train.steps, step + config.train.lease, *due])


class Controller:
    """Runs a job on a fleet to its end."""

    def __init__(self, job: Job, fleet: Fleet, *, stop: StopFlag, mailboxes: Sequence[Mailbox],
                 journal: Journal) -> None:
        self._job, self._config, self._fleet = job, job.config, fleet
        self._stop, self._mailboxes, self._journal = stop, mailboxes, journal
        self._rebalancer = Rebalancer(job.config, job.plan, fleet, journal, job.keep_plan)
        self._members = Membership(job.config, fleet.gangs, journal)
        self._recoverer = Recoverer(
            job.config, fleet, self._members, journal, stop, job.store_host, go_back=self._go_back, tell=self._tell,
            rewind=self._rewind, replan=self._rebalancer.replan, saved=lambda: self._saver.saved or 0,
            serve=lambda: job.serve_store(job.store_host, job.config.network.store_port))
        self._state = State.STARTING
        self._step = self._tended = 0
        self._looked = time.monotonic()
        self._stability = Stability(job.config.stability, journal)
        self._saver = Saver(fleet, journal, job.config, job.directory, job.data, self._stability.skipped_steps)
        self._goodput = Goodput()
        self._expected = Expected(job.config, job.plan)
        self._validation_loss: float | None = None
        self._last: StepSummary | None = None
        self._error: RayTrain3DError | None = None

    def run(self) -> Ending:
        """Until the job has ended. Raises what ended it, if it failed: RankFailed naming the culprit, or an error that
        says what to change."""
        try:
            return self._run()
        finally:
            self._rebalancer.close()
            self._recoverer.close()

    def _run(self) -> Ending:
        while True:
            self._publish()
            match self._state:
                case State.STARTING:
                    self._enter(self._start)
                case State.RUNNING:
                    self._enter(self._train_on)
                case State.RECOVERING:
                    self._enter(self._recover)
                case State.FINISHED:
                    return self._ending()
                case State.FAILED:
                    assert self._error is not None
                    self._journal.failure(self._step, str(self._error))
                    raise self._error

    def _enter(self, act: Callable[[], State]) -> None:
        """The state after `act`; what goes wrong in it decides otherwise."""
        try:
            self._state = act()
        except StopRequested:
            self._state = State.FINISHED
        except FleetFailed as failed:
            self._read_reports()
            self._state = self._after_failure(failed)
        except RayTrain3DError as error:
            self._error, self._state = error, State.FAILED

    # Starting

    def _start(self) -> State:
        facts = self._fleet.facts()
        self._job.check_nodes(set(self._fleet.nodes.values()))
        nodes = sorted(set(self._fleet.nodes.values()))
        self._journal.event("started", 0, f"{len(facts)} ranks on {', '.join(nodes)}", nodes=nodes)
        self._fleet.probe(self._job.directory)
        check_resume(self._job.directory, self._config)
        self._recoverer.join(self._rebalancer.plan)
        self._resume()
        if self._step < self._config.train.steps:
            return State.RUNNING
        self._journal.event("finished already", self._step, f"all {self._step} steps are done; evaluating only")
        self._evaluate()
        return State.FINISHED

    def _resume(self) -> None:
        saver, directory = self._saver, self._job.directory
        found = resume(self._fleet, self._journal, directory, self._config, self._job.data)
        saver.saved, saver.damaged = found.step, found.damaged
        self._step = self._tended = saver.saved or 0
        self._stability.resume(self._step, found.skipped_steps)
        self._journal.rewind(self._step)
        self._goodput.rewind(self._step)
        if saver.saved is not None:
            self._journal.event("resumed", self._step, f"resumed from {step_directory(directory, saver.saved)}")

    # Running

    def _train_on(self) -> State:
        """One lease, then what is due where it ended."""
        if self._tended == self._step:  # else a failure came between the two
            self._run_lease()
        is_last = self._step == self._config.train.steps
        if self._stop.reason is not None and not is_last:
            self._read_reports(until=self._step)
            self._journal.event("stopping", self._step, f"{self._stop.reason}: all ranks left after step {self._step}")
            if self._stability.is_bad(self._step):
                self._saver.give_up()
            else:
                self._saver.finish(self._step)
            return State.FINISHED
        if self._stability.error is not None:
            self._saver.settle()
            raise self._stability.error
        if self._went_back_for_a_spike():
            return State.RUNNING
        if not is_last:
            self._change_members()
        self._tend(is_last)
        return State.FINISHED if is_last else State.RUNNING

    def _tend(self, is_last: bool) -> None:
        """Do what is due after a step."""
        saves = is_last or self._is_due(self._config.checkpoint.interval)
        evaluates = is_last or self._is_due(self._config.evaluate.interval)
        rebalances = not is_last and self._rebalancer.is_due(self._step)
        if saves or evaluates or rebalances:  # else what has not been read yet is read beside the next lease
            self._read_reports(until=self._step)
        if is_last:
            self._saver.finish(self._step)
        elif saves and not self._stability.is_bad(self._step):
            self._saver.begin(self._step)
        if evaluates:
            self._evaluate()
        if rebalances:
            self._rebalancer.act(self._step)
        self._tended = self._step

    def _went_back_for_a_spike(self) -> bool:
        """Checkpoints of what came of it are removed, so that a restart does not go on from them."""
        spike, directory = self._stability.take_spike(), self._job.directory
        if spike is None:
            return False
        self._saver.settle()
        if not any(step < spike.first for step in steps(directory)):
            self._stability.stay(spike)
            return False
        for step in [step for step in steps(directory) if step >= spike.first]:
            remove(directory, step)
        self._go_back()
        self._stability.leave_out(spike, self._step)
        return True

    def _change_members(self) -> None:
        """Answer notices of nodes that go away, and take in gangs that have arrived."""
        members, plan = self._members, self._rebalancer.plan
        members.look(self._step, plan)
        if leaving := members.take_notices():
            if members.can_do_without(leaving):
                self._saver.settle()
                self._step = self._recoverer.give_up(leaving, self._step, plan, "its node goes away")
            elif not self._stability.is_bad(self._step):
                self._read_reports(until=self._step)
                self._saver.finish(self._step)
        elif arrived := members.arrived:
            self._saver.settle()
            self._step = self._recoverer.take_in(arrived, self._step, plan)

    def _run_lease(self) -> None:
        last = lease_end(self._step, self._config, self._rebalancer.next_decision(self._step + 1))
        self._goodput.begin()
        lease = self._fleet.train(self._step + 1, last, self._stability.left_out)
        while (end := self._fleet.wait(lease, POLL_S, self._rebalancer.plan)) is None:
            self._look_around()
            if self._stop.reason is not None or self._stability.alarm or self._members.alarm:
                self._fleet.request_stop()
        if time.monotonic() - self._looked >= POLL_S:  # leases may be too short to be seen while they last
            self._look_around()
        self._listen()
        self._step = end.step
        if end.skipped or end.step < last:
            self._read_reports(until=end.step)

    def _look_around(self) -> None:
        self._looked = time.monotonic()
        self._read_reports()
        self._saver.poll(training=True)
        self._listen()
        self._members.look(self._done, self._rebalancer.plan)

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self._step % interval == 0

    def _evaluate(self) -> None:
        report = self._fleet.evaluate()
        self._validation_loss = report.loss
        self._saver.evaluated(self._step, report.loss)
        self._journal.event("validation", self._step, f"validation loss {report.loss:.4f} after step {self._step} "
                            f"({report.tokens:,} tokens, {report.seconds:.1f} s); {'; '.join(map(str, report.sets))}",
                            loss=report.loss, tokens=report.tokens,
                            sets={each.name: each.to_record() for each in report.sets})

    # After a failure

    def _after_failure(self, failed: FleetFailed) -> State:
        """Ranks that fail before the first step end the run: what is wrong then will be so again."""
        self._error = self._recoverer.failed(self._done, failed.signs, self._rebalancer.plan,
                                             starting=self._state is State.STARTING)
        return State.RECOVERING if self._error is None else State.FAILED

    def _recover(self) -> State:
        self._step = self._recoverer.recover(self._done, self._rebalancer.plan)
        if self._saver.give_up() == self._step:
            self._tended = self._step - 1  # so what is due there is begun anew
        return State.RUNNING

    def _go_back(self) -> int:
        self._last = None
        self._resume()
        return self._step

    def _rewind(self, step: int, stages: Stages) -> None:
        self._last = None
        self._step = self._tended = step
        self._journal.rewind(step)
        self._goodput.rewind(step)
        self._stability.rewind(step)
        self._rebalancer.return_to(stages)

    @property
    def _done(self) -> int:
        """Last step that was seen done."""
        return self._step if self._last is None else max(self._last.step, self._step)

    # What is read and told meanwhile

    def _read_reports(self, until: int | None = None) -> None:
        for reports in self._fleet.reports(until=until, limit_s=DRAIN_S if until is not None else 0.2):
            self._tell(reports)
            self._rebalancer.watch(reports)
        self._publish()

    def _tell(self, reports: Sequence[StepReport]) -> None:
        self._last = summarize(reports, self._job.plan.mesh, self._rebalancer.summary)
        self._goodput.count(self._last.step, self._last.seconds)
        self._journal.step(self._last, goodput=self._goodput.share,
                           **self._expected.values(self._last, self._rebalancer.plan))
        self._stability.watch(self._last, reports, self._rebalancer.plan, self._fleet.nodes)

    def _listen(self) -> None:
        for command in [command for mailbox in self._mailboxes for command in mailbox.commands()]:
            match command.split(maxsplit=1):
                case ["stop"]:
                    self._stop.ask("raytrain3d stop")
                case ["rebalance", counts]:
                    self._rebalancer.request(counts)

    def _publish(self) -> None:
        last = self._last
        status = Status(run=self._config.run.name, state=self._state.value, num_steps=self._config.train.steps,
                        step=self._done,
                        loss=None if last is None else last.loss, seconds=None if last is None else last.seconds,
                        tokens_per_s=None if last is None else last.tokens_per_s,
                        goodput=self._goodput.share, events=self._recoverer.history,
                        checkpoint=self._saver.saved, checkpoint_age_s=self._saver.age_s)
        for mailbox in self._mailboxes:
            mailbox.publish(now(status))

    def _ending(self) -> Ending:
        done, saved = self._step == self._config.train.steps, self._saver.saved
        return Ending(step=self._step, exit_code=0 if done else self._stop.exit_code,
                      stopped=None if done else self._stop.reason, validation_loss=self._validation_loss,
                      checkpoint=None if saved is None else step_directory(self._job.directory, saved),
                      rebalance=self._rebalancer.summary)
