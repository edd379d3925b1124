"""Numbers that go bad: steps that are not finite, and loss spikes.

Ranks leave out what is not finite by themselves. Here it is told and counted, and the controller learns what it should do
about it: end the run, or go back before a spike and leave its data out.
"""

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from raytrain3d.config import StabilityConfig
from raytrain3d.errors import NumbersFailed
from raytrain3d.gang.failure import place
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.summary import StepSummary
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.table import counted
from raytrain3d.train.report import PLACES, Origin, StepReport

NORMAL_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEAST_DEVIATION = 1e-3
"""Of the loss in nats: a run that hardly changes has no spikes of a thousandth."""
_WHERE = {"weights": "its weights are not finite", "forward": "its output is not finite, though what enters it is",
          "backward": "the gradient of its input is not finite, though what comes back to it is",
          "gradient": "the gradient of its weights is not finite, though what comes back to it is",
          "sum": "the gradient of its weights is not finite when it is added up over the replicas"}


@dataclass(frozen=True, slots=True)
class Spike:
    """Steps of one loss spike that have been seen."""

    first: int
    last: int


class Stability:
    """Watches the steps of one job, in order."""

    def __init__(self, config: StabilityConfig, journal: Journal) -> None:
        self._config, self._journal = config, journal
        self._losses: deque[tuple[int, float]] = deque(maxlen=config.window)
        self._bad: list[int] = []
        self._left_out: set[int] = set()
        self._spike: Spike | None = None
        self._rewinds = 0
        self._error: NumbersFailed | None = None

    @property
    def left_out(self) -> frozenset[int]:
        """Steps, done and to come, whose data is left out."""
        return frozenset(self._left_out)

    @property
    def alarm(self) -> bool:
        """The lease should end early: there is something to do."""
        return self._error is not None or self._spike is not None

    @property
    def error(self) -> NumbersFailed | None:
        """Too many steps were not finite."""
        return self._error

    def is_bad(self, step: int) -> bool:
        """Its numbers were not finite."""
        return step in self._bad

    def skipped_steps(self, step: int) -> tuple[int, ...]:
        """Steps that a state after `step` has left out, and those that it is to leave out later on."""
        return tuple(sorted(self._left_out | {bad for bad in self._bad if bad <= step}))

    def resume(self, step: int, skipped: Collection[int]) -> None:
        """The run goes on after `step`, whose checkpoint lists `skipped`."""
        self.rewind(step)
        self._left_out |= set(skipped)

    def rewind(self, step: int) -> None:
        """The run goes on after `step`; later ones are done again."""
        self._losses = deque(((n, loss) for n, loss in self._losses if n <= step), maxlen=self._config.window)
        self._bad = [n for n in self._bad if n <= step]
        self._error = None

    def take_spike(self) -> Spike | None:
        """One to go back for, if there was one since the last time."""
        spike, self._spike = self._spike, None
        return spike

    def leave_out(self, spike: Spike, after: int) -> None:
        """The run has gone back to `after` because of `spike`."""
        self._rewinds += 1
        left_out = range(max(after + 1, spike.first - self._config.leave_out_before), spike.last + 1)
        self._left_out |= set(left_out)
        self._journal.event("rewound", after, f"went back to step {after}; the data of {_steps(left_out)} is left out",
                            left_out=list(left_out))

    def stay(self, spike: Spike) -> None:
        """There is nothing to go back to."""
        self._journal.event("not rewound", spike.last, f"there is no checkpoint from before step {spike.first} to go back "
                            "to, so the run goes on as it is")

    def watch(self, summary: StepSummary, reports: Sequence[StepReport], plan: Plan, nodes: dict[int, str]) -> None:
        """A step was done."""
        if summary.step in self._left_out:
            return
        if summary.skipped:
            self._count(summary.step, _cause(reports, plan, nodes))
        elif self._is_spike(summary.loss):
            self._tell_spike(summary)
        else:
            self._losses.append((summary.step, summary.loss))

    def _count(self, step: int, cause: str) -> None:
        config = self._config
        self._bad = [n for n in self._bad if n != step] + [step]
        self._journal.event("skipped", step, f"step {step} changes nothing, since its numbers are not finite: {cause}",
                            cause=cause)
        recent = [n for n in self._bad if n > step - config.window]
        if len(recent) > config.skipped:
            self._error = NumbersFailed(
                f"stability.skipped is {config.skipped}: {counted(len(recent), 'step')} of the last {config.window} "
                f"were not finite ({_steps(recent)}); in step {step}: {cause}. The newest checkpoint is from before it. "
                "Lower learning_rate.peak, look at the data of these steps, or check the hardware if it is always one rank")

    def _is_spike(self, loss: float) -> bool:
        losses = [loss for _, loss in self._losses]
        if self._config.spike is None or len(losses) < max(2, self._config.window // 2):
            return False
        return loss > median_plus(losses, self._config.spike)

    def _tell_spike(self, summary: StepSummary) -> None:
        losses, step = [loss for _, loss in self._losses], summary.step
        self._journal.event("loss spike", step, f"loss spike in step {step}: {summary.loss:.4f}, the median of the last "
                            f"{len(losses)} steps is {statistics.median(losses):.4f}", loss=summary.loss,
                            median=statistics.median(losses))
        if self._config.on_spike == "rewind" and self._rewinds < self._config.rewinds:
            self._spike = Spike(step if self._spike is None else self._spike.first, step)


def median_plus(values: Sequence[float], deviations: float) -> float:
    """The median, and so many standard deviations more, by estimates that a few outliers do not bend."""
    middle = statistics.median(values)
    deviation = NORMAL_DEVIATION * statistics.median(abs(value - middle) for value in values)
    return middle + deviations * max(deviation, LEAST_DEVIATION)


def first_origin(origins: dict[int, Origin], order: Sequence[str]) -> tuple[int, Origin] | None:
    """(rank, origin) of where it began. origins: by rank. order: names of all layers, first to last."""
    def key(found: tuple[int, Origin]) -> tuple[int, int, int]:
        rank, origin = found
        layer = order.index(origin.layer)
        return PLACES.index(origin.place), layer if origin.place in ("weights", "forward") else -layer, rank

    return min(origins.items(), key=key, default=None)


def _cause(reports: Sequence[StepReport], plan: Plan, nodes: dict[int, str]) -> str:
    origins = {report.rank: report.origin for report in reports if report.origin is not None}
    names = ["embedding", *(f"blocks.{i}" for i in range(plan.num_layers - 2)), "head"]
    first = first_origin(origins, names)
    if first is None:
        return "where is not known: computed again, all of it was finite"
    rank, origin = first
    alike = sorted(other for other, found in origins.items()
                   if (found.layer, found.place) == (origin.layer, origin.place) and other != rank)
    also = f" (so on {counted(len(alike), 'other rank')})" if alike else ""
    op = f", op {origin.op}" if origin.op is not None else ""
    return f"it begins in layer {origin.layer} on {place(rank, plan, nodes)}{op}: {_WHERE[origin.place]}{also}"


def _steps(steps: Sequence[int]) -> str:
    """`step 7`, `steps 3-5, 7`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(steps)), lambda pair: pair[1] - pair[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(texts)}"
