"""What failures cost a long run: `raytrain3d simulate --failures`.

Devices fail independently, so the whole job does after an exponential time of mean M = a device's mean over the number of
devices. A failure costs the work since the last checkpoint and a recovery of R seconds, during which the next one may come;
a checkpoint holds training up for C seconds. A run of days is simulated, segment by segment, with random failures. Beside
it stands what is expected, tau / (M exp(R / M) (exp((tau + C) / M) - 1)) for tau useful seconds between checkpoints, and the
best intervals by Young, sqrt(2 C M) (https://doi.org/10.1145/361147.361115), and by Daly, who goes on to higher order
(https://doi.org/10.1016/j.future.2004.11.016).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, expm1, sqrt

from raytrain3d.plan.search import Choice
from raytrain3d.plan.state_memory import moved_bytes

AROUND = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Intervals that are shown, by the best one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How a job fails and goes on. Seconds."""

    step_s: float
    mttf_s: float
    """Mean time between failures of the whole job."""
    recovery_s: float
    save_s: float
    """For which a checkpoint holds up the training; the rest of it is written behind."""

    def expected_goodput(self, interval: int) -> float:
        """Share of time that goes into steps which count, with a checkpoint every `interval` steps."""
        useful, mean = interval * self.step_s, self.mttf_s
        if (useful + self.save_s + self.recovery_s) / mean > 500:
            return 0.0  # never gets there
        return useful / (mean * exp(self.recovery_s / mean) * expm1((useful + self.save_s) / mean))

    @property
    def young_s(self) -> float:
        """Useful seconds between checkpoints, to first order."""
        return sqrt(2 * self.save_s * self.mttf_s)

    @property
    def daly_s(self) -> float:
        """The same to higher order."""
        half = self.save_s / (2 * self.mttf_s)
        if half >= 1:
            return self.mttf_s
        return self.young_s * (1 + sqrt(half) / 3 + half / 9) - self.save_s

    def best_interval(self) -> int:
        """Steps between checkpoints with the most expected goodput, by golden section: there is one maximum."""
        low, high = 1, max(2, round(4 * (self.young_s + self.step_s) / self.step_s))
        while high - low > 2:
            left, right = low + (high - low) * 382 // 1000, low + (high - low) * 618 // 1000
            if left == right:
                right += 1
            if self.expected_goodput(left) < self.expected_goodput(right):
                low = left + 1
            else:
                high = right
        return max(range(low, high + 1), key=self.expected_goodput)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of a simulated run: shares of its time, which add up to 1."""

    interval: int
    """Steps between checkpoints."""
    useful: float
    """Goodput: steps that count."""
    saving: float
    repeated: float
    """Steps, or parts of them, that were lost."""
    recovering: float
    num_failures: int


def simulate_run(failures: Failures, interval: int, *, seconds: float, seed: int) -> Outcome:
    """A run of at least `seconds`, with a checkpoint every `interval` steps."""
    draw = random.Random(seed)
    useful = saving = repeated = recovering = 0.0
    count, segment = 0, interval * failures.step_s
    while useful + saving + repeated + recovering < seconds:
        after = draw.expovariate(1 / failures.mttf_s)
        if after >= segment + failures.save_s:
            useful += segment
            saving += failures.save_s
            continue
        repeated += after
        for recovery in _recoveries(failures, draw):
            recovering += recovery
            count += 1
    total = useful + saving + repeated + recovering
    return Outcome(interval=interval, useful=useful / total, saving=saving / total, repeated=repeated / total,
                   recovering=recovering / total, num_failures=count)


def _recoveries(failures: Failures, draw: random.Random) -> Iterator[float]:
    """Seconds of each try to go on after a failure; the last one succeeds."""
    while (after := draw.expovariate(1 / failures.mttf_s)) < failures.recovery_s:
        yield after
    yield failures.recovery_s


def failures_of(choice: Choice, *, device_mttf_h: float, recovery_s: float, save_s: float | None) -> Failures:
    """Of a job as it is laid out. device_mttf_h: mean hours until one device fails the job. save_s: absent, the time in
    which the fullest rank copies its state to the host's memory, as our checkpoints do before training goes on."""
    timer, config = choice.timer, choice.config
    node, share = timer.cluster.node, timer.cluster.calibration.inside
    most = max(sum(moved_bytes(state, config) for state in timer.spec.states_of(
        layer for stage, rank in enumerate(timer.placement) if rank == at for layer in range(*choice.stages[stage])))
        for at in range(timer.mesh.pipeline))
    return Failures(step_s=choice.step.total, mttf_s=device_mttf_h * 3600 / choice.num_ranks, recovery_s=recovery_s,
                    save_s=most / (node.host_gb_s * 1e9 * share) if save_s is None else save_s)


def shown_intervals(failures: Failures, own: int | None) -> tuple[int, ...]:
    """Steps: around the best, and the job's own."""
    best = failures.best_interval()
    return tuple(sorted({max(1, round(best * factor)) for factor in AROUND} | ({own} if own else set())))
