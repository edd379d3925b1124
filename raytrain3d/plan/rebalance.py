"""Whether layers or micro-batches should move now: Keep, Move or Revert, each with its reason in one line.

A move must gain more than a threshold and more than noise can feign, and win back its own cost in the steps that are
left. A move after which steps take longer than before is undone, and not tried again while costs are what they were.

A replica so slow that it got no micro-batch is not measured any more. So now and then it gets one as a trial: that costs a
few longer steps where a wrong guess of its speed would cost many, and is undone like any move that made steps longer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from raytrain3d.config import RebalanceConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.balance import best_shares, best_stages
from raytrain3d.plan.moves import moves
from raytrain3d.plan.partition import Stages, counts_text
from raytrain3d.plan.table import counted
from raytrain3d.plan.workload import Workload, step_time

CERTAINTY = 4.0
"""Standard errors that a gain or a loss must exceed to be taken as one."""
LEAST_LOSS = 0.01
"""A move that lost less is left as it is."""
MATERIAL = 0.1
"""Costs are as they were if no rank's time has changed by more."""
TRIAL_INTERVALS = 8
"""Intervals between decisions that a replica has no micro-batch until it is tried again. After each trial that was undone,
twice as many: a replica that stays slow costs an ever smaller share of the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Who does what."""

    stages: Stages
    shares: tuple[int, ...]
    """Micro-batches by replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A running job between two steps."""

    step: int
    steps_left: int
    stages: Stages
    workload: Workload
    """As measured, with the present shares."""
    step_s: float
    """Seconds of a step, as measured under the present split."""
    noise: float
    """Standard error of measured times, as a share of them."""

    @property
    def split(self) -> Split:
        return Split(stages=self.stages, shares=self.workload.shares)

    def step_s_of(self, split: Split) -> float:
        """Predicted seconds of a step. What is measured now and not simulated (optimizer, messages) stays as it is; where
        the simulation is too slow it is scaled down."""
        simulated = step_time(self.workload, self.stages)
        change = step_time(replace(self.workload, shares=split.shares), split.stages) - simulated
        return self.step_s + change * min(1.0, self.step_s / simulated)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """What moving layers takes, while training stands still."""

    layer_bytes: tuple[int, ...]
    """State of each layer on one rank."""
    bytes_per_s: float
    """Of the links between stages."""
    shift_s: float
    """Of a one-layer shift, beside its bytes."""

    def seconds(self, workload: Workload, before: Split, after: Split) -> float:
        """Of the shifts between two splits, one after the other. Between stages of one rank nothing is sent."""
        rank_of = workload.placement
        sent = sum(self.layer_bytes[shift.layer] for shift in moves(before.stages, after.stages)
                   if rank_of[shift.source] != rank_of[shift.target])
        return sent / self.bytes_per_s + self.shift_s * len(moves(before.stages, after.stages))


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Everything stays where it is."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Go to `split`."""

    split: Split
    gain: float
    """Predicted step time now over then."""
    reason: str
    is_trial: bool = False
    """Made to measure a replica, not to gain: its outcome should be looked at soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Revert:
    """Go back to `split`: the last move made steps longer."""

    split: Split
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PastMove:
    """A decision that was carried out."""

    before: Situation
    decision: Move | Revert
    after_s: float | None = None
    """Seconds of a step under the new split, when first measured."""

    @property
    def gain(self) -> float | None:
        """Achieved step time before over after."""
        return self.before.step_s / self.after_s if self.after_s is not None else None


def decide(now: Situation, history: Sequence[PastMove], cost: MoveCost, config: RebalanceConfig, *,
           fixed_shares: bool = False) -> Keep | Move | Revert:
    """What to do before the next step. history: oldest first. fixed_shares: only layers may move."""
    if history and _lost(now, history[-1]):
        return _revert(history[-1])
    if history and (ago := now.step - history[-1].before.step) < config.interval:
        return Keep(reason=f"moved {counted(ago, 'step')} ago")
    decision = _best_move(now, history, cost, config, fixed_shares)
    if isinstance(decision, Keep) and not fixed_shares:
        return _trial(now, history, config) or decision
    return decision


def _best_move(now: Situation, history: Sequence[PastMove], cost: MoveCost, config: RebalanceConfig,
               fixed_shares: bool) -> Keep | Move:
    steps = min(config.horizon, now.steps_left)

    def benefit_s(split: Split) -> float:
        return (now.step_s - now.step_s_of(split)) * steps - cost.seconds(now.workload, now.split, split)

    try:
        others = [split for split in _candidates(now, fixed_shares) if split != now.split]
    except PlanError as error:  # by the estimate of memory not even the present split fits
        return Keep(reason=str(error))
    if not others:
        return Keep(reason=f"stages {counts_text(now.stages)} are best")
    best = max(others, key=benefit_s)
    against = _reason_against(now, history, best, config)
    if against is None and benefit_s(best) <= 0:
        against = f"it takes {cost.seconds(now.workload, now.split, best):.3g} s, not won back in {counted(steps, 'step')}"
    if against is not None:
        return Keep(reason=f"{_describe(now, best)}; not done: {against}")
    return Move(split=best, gain=_gain(now, best), reason=_describe(now, best))


def _trial(now: Situation, history: Sequence[PastMove], config: RebalanceConfig) -> Move | None:
    """One micro-batch for a replica that lost its last one long ago."""
    shares = now.workload.shares
    for replica in (replica for replica, share in enumerate(shares) if share == 0):
        lost = [past.before.step for past in history
                if past.before.workload.shares[replica] > past.decision.split.shares[replica] == 0]
        if lost and min(now.step - lost[-1], now.steps_left) >= TRIAL_INTERVALS * config.interval * 2**(len(lost) - 1):
            giver = shares.index(max(shares))
            given = (share + (i == replica) - (i == giver) for i, share in enumerate(shares))
            split = Split(stages=now.stages, shares=tuple(given))
            return Move(split=split, gain=_gain(now, split), is_trial=True, reason=f"{_describe(now, split)}; a trial: "
                        f"replica {replica} had none for {counted(now.step - lost[-1], 'step')} and may be faster by now")
    return None


def _candidates(now: Situation, fixed_shares: bool) -> Iterator[Split]:
    """Simplest first: of equal ones that is taken."""
    stages, shares = now.stages, now.workload.shares
    if not fixed_shares:
        shares = best_shares(now.workload, stages)
        yield Split(stages=stages, shares=shares)
    for given in dict.fromkeys((now.workload.shares, shares)):
        workload = replace(now.workload, shares=given)
        stages = best_stages(workload, now.stages)
        yield Split(stages=stages, shares=given)
        if not fixed_shares:
            yield Split(stages=stages, shares=best_shares(workload, stages))


def _reason_against(now: Situation, history: Sequence[PastMove], split: Split, config: RebalanceConfig) -> str | None:
    gain = _gain(now, split) - 1
    if gain < config.gain:
        return f"below rebalance.gain ({config.gain:.0%})"
    if gain < CERTAINTY * now.noise:
        return f"may be noise ({now.noise:.1%} standard error)"
    for move, after in pairwise(history):
        undone = isinstance(after.decision, Revert) and move.decision.split == split
        if undone and _as_it_was(move.before.workload, now.workload, split):
            return f"it was tried after step {move.before.step} and made steps longer"
    return None


def _lost(now: Situation, last: PastMove) -> bool:
    """Whether steps are longer since the last move, and because of it.

    Where times are not what they were, what is measured now says whether the split before would be better.
    """
    if isinstance(last.decision, Revert) or last.after_s is None or last.decision.split != now.split:
        return False
    limit = max(LEAST_LOSS, CERTAINTY * max(now.noise, last.before.noise))
    if last.after_s / last.before.step_s - 1 <= limit:
        return False
    return _as_it_was(last.before.workload, now.workload, now.split) or _gain(now, last.before.split) > 1


def _revert(last: PastMove) -> Revert:
    before, undone = last.before.split, last.decision.split
    predicted = f"{last.before.step_s_of(undone):#.3g}"
    return Revert(split=before, reason=f"undo the move after step {last.before.step}: {_changes(undone, before)}, since "
                  f"{last.before.step_s:#.3g} s a step became {last.after_s:#.3g} s, predicted {predicted} s")


def _as_it_was(then: Workload, now: Workload, split: Split) -> bool:
    """Whether no rank takes materially more or less time for its layers of a split."""
    if len(then.slowdowns) != len(now.slowdowns):
        return False
    times = zip(_rank_times(then, split), _rank_times(now, split), strict=True)
    return all(abs(new - old) <= MATERIAL * old for old, new in times)


def _rank_times(workload: Workload, split: Split) -> list[float]:
    """Of one micro-batch, by replica and stage."""
    costs = [workload.stage_cost(stage, layers).total for stage, layers in enumerate(split.stages)]
    return [costs[stage] * slowdowns[rank] for slowdowns in workload.slowdowns
            for stage, rank in enumerate(workload.placement)]


def _gain(now: Situation, split: Split) -> float:
    return now.step_s / now.step_s_of(split)


def _describe(now: Situation, split: Split) -> str:
    """`move 6 layers: stages 4,4,4,6 -> 5,5,5,3: predicted 1.31x (0.812 -> 0.620 s a step)`."""
    layers = len({shift.layer for shift in moves(now.stages, split.stages)})
    what = (f"move {counted(layers, 'layer')}: " if layers else "") + _changes(now.split, split)
    times = f"{now.step_s:#.3g} -> {now.step_s_of(split):#.3g} s a step"
    return f"{what}: predicted {_gain(now, split):.2f}x ({times})"


def _changes(old: Split, new: Split) -> str:
    """`stages 4,4,4,6 -> 5,5,5,3, micro-batches 8,8 -> 9,7`."""
    stages = [f"stages {counts_text(old.stages)} -> {counts_text(new.stages)}"] if old.stages != new.stages else []
    shares = [f"micro-batches {_joined(old.shares)} -> {_joined(new.shares)}"] if old.shares != new.shares else []
    return ", ".join(stages + shares)


def _joined(shares: Sequence[int]) -> str:
    return ",".join(map(str, shares))
