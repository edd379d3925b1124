import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest

from raytrain3d.config import RebalanceConfig
from raytrain3d.plan.balance import best_shares, best_stages
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.measured import Measured, RankTimes
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.rebalance import Keep, Move, MoveCost, PastMove, Revert, Situation, Split, decide
from raytrain3d.plan.workload import Workload, step_time

CONFIG = RebalanceConfig(gain=0.03, interval=10)
FREE = MoveCost(layer_bytes=(0,) * 100, bytes_per_s=1.0, shift_s=0.0)


def split(*counts: int) -> Stages:
    return tuple(pairwise(accumulate(counts, initial=0)))


def counts(stages: Stages) -> tuple[int, ...]:
    return tuple(end - first for first, end in stages)


def block(seconds: float) -> LayerCost:
    return LayerCost(forward=seconds, backward_input=seconds, backward_weight=seconds)


def model(ranks: int, blocks: int, head: float, shares: tuple[int, ...], **changes: object) -> Workload:
    """Blocks of 2 ms forward and 4 ms backward, an embedding of next to nothing, a head of `head` blocks. 1F1B."""
    costs = [block(2e-6), *[block(2e-3)] * blocks, block(2e-3 * head)]
    plain = Workload(schedule="1f1b", num_ranks=ranks, shares=shares, costs=tuple(costs),
                     slowdowns=((1.0,) * ranks,) * len(shares))
    return replace(plain, **changes)  # type: ignore[arg-type]


# One decision.


def situation(workload: Workload, stages: Stages, **changes: object) -> Situation:
    plain = Situation(step=100, steps_left=1000, stages=stages, workload=workload, noise=0.0,
                      step_s=step_time(workload, stages))
    return replace(plain, **changes)  # type: ignore[arg-type]


HEAVY_HEAD = situation(model(4, 16, 4.0, (16,)), split(5, 4, 4, 5))
BETTER = Split(stages=split(6, 5, 5, 2), shares=(16,))


def reason(decision: Keep | Move | Revert) -> str:
    assert isinstance(decision, Keep), decision
    return decision.reason


def test_a_heavy_head_moves_layers_to_the_front() -> None:
    decision = decide(HEAVY_HEAD, (), FREE, CONFIG)
    assert isinstance(decision, Move)
    assert decision.split == BETTER
    assert decision.gain == pytest.approx(step_time(HEAVY_HEAD.workload, HEAVY_HEAD.stages)
                                          / step_time(HEAVY_HEAD.workload, BETTER.stages))
    assert decision.reason == ("move 6 layers: stages 5,4,4,5 -> 6,5,5,2: predicted 1.47x (0.840 -> 0.570 s a step)")


def test_the_best_split_is_kept() -> None:
    now = situation(HEAVY_HEAD.workload, BETTER.stages)
    assert reason(decide(now, (), FREE, CONFIG)) == "stages 6,5,5,2 are best"


def test_time_that_is_not_simulated_stays() -> None:
    """An optimizer of a second makes the same move worth less."""
    decision = decide(replace(HEAVY_HEAD, step_s=HEAVY_HEAD.step_s + 1.0), (), FREE, CONFIG)
    assert isinstance(decision, Move)
    assert decision.gain == pytest.approx(1.840 / 1.570, rel=1e-3)


def test_a_simulation_that_is_too_slow_is_scaled() -> None:
    decision = decide(replace(HEAVY_HEAD, step_s=HEAVY_HEAD.step_s / 2), (), FREE, CONFIG)
    assert isinstance(decision, Move)
    assert decision.gain == pytest.approx(0.840 / 0.570, rel=1e-3)


def test_a_gain_below_the_threshold_is_left() -> None:
    kept = reason(decide(HEAVY_HEAD, (), FREE, replace(CONFIG, gain=0.5)))
    assert kept.endswith("predicted 1.47x (0.840 -> 0.570 s a step); not done: below rebalance.gain (50%)")


def test_a_gain_that_noise_can_feign_is_left() -> None:
    assert reason(decide(replace(HEAVY_HEAD, noise=0.12), (), FREE, CONFIG)).endswith(
        "not done: may be noise (12.0% standard error)")
    assert isinstance(decide(replace(HEAVY_HEAD, noise=0.11), (), FREE, CONFIG), Move)


@pytest.mark.parametrize(("steps_left", "horizon", "moves"), [(1000, 1000, True), (20, 1000, False), (1000, 20, False)])
def test_a_move_must_repay_itself(steps_left: int, horizon: int, moves: bool) -> None:
    """Six shifts of a second win 0.27 s a step."""
    cost = replace(FREE, shift_s=1.0)
    decision = decide(replace(HEAVY_HEAD, steps_left=steps_left), (), cost, replace(CONFIG, horizon=horizon))
    assert isinstance(decision, Move) == moves
    assert moves or decision.reason.endswith("not done: it takes 6 s, not won back in 20 steps")


def test_a_job_that_fits_nowhere_by_estimate_goes_on_as_it_is() -> None:
    workload = replace(HEAVY_HEAD.workload, excess=lambda stages: 2**30)
    kept = reason(decide(replace(HEAVY_HEAD, workload=workload), (), FREE, CONFIG))
    assert kept == "no split of 18 layers over 4 stages fits: ranks lack at least 1.00 GiB of memory"


def test_cost_of_a_move() -> None:
    """Layers 4, 8, 9, 12, 13, 14 cross one border each; between stages on one rank nothing is sent."""
    cost = MoveCost(layer_bytes=tuple(range(18)), bytes_per_s=10.0, shift_s=0.5)
    now = HEAVY_HEAD.split
    assert cost.seconds(HEAVY_HEAD.workload, now, BETTER) == pytest.approx((5 + 9 + 10 + 13 + 14 + 15) / 10 + 6 * 0.5)
    v_shaped = model(2, 6, 1.0, (4,), schedule="zb_v", chunks=2)
    before, after = (Split(stages=split(*sizes), shares=(4,)) for sizes in ((2, 2, 2, 2), (2, 3, 1, 2)))
    assert cost.seconds(v_shaped, before, after) == 0.5


def test_no_move_soon_after_another() -> None:
    past = PastMove(before=replace(HEAVY_HEAD, step=91), decision=Move(split=HEAVY_HEAD.split, gain=1.1, reason=""))
    assert reason(decide(HEAVY_HEAD, (past,), FREE, CONFIG)) == "moved 9 steps ago"
    assert isinstance(decide(replace(HEAVY_HEAD, step=101), (past,), FREE, CONFIG), Move)


def moved(after_s: float, **changes: object) -> tuple[Situation, PastMove]:
    """HEAVY_HEAD has moved to BETTER, where a step takes after_s."""
    past = PastMove(before=HEAVY_HEAD, decision=Move(split=BETTER, gain=1.47, reason=""), after_s=after_s)
    return replace(HEAVY_HEAD, step=110, stages=BETTER.stages, step_s=after_s, **changes), past  # type: ignore[arg-type]


def test_a_move_that_made_steps_longer_is_undone() -> None:
    now, past = moved(0.9)
    decision = decide(now, (past,), FREE, CONFIG)
    assert isinstance(decision, Revert)
    assert decision.split == HEAVY_HEAD.split
    assert decision.reason == ("undo the move after step 100: stages 6,5,5,2 -> 5,4,4,5, since 0.840 s a step became "
                               "0.900 s, predicted 0.570 s")
    assert past.gain == pytest.approx(0.840 / 0.9, rel=1e-3)


def test_a_loss_within_noise_is_none() -> None:
    now, past = moved(0.9, noise=0.03)
    assert reason(decide(now, (past,), FREE, CONFIG)) == "stages 6,5,5,2 are best"
    now, past = moved(0.845)
    assert reason(decide(now, (past,), FREE, CONFIG)) == "stages 6,5,5,2 are best"


def test_a_rank_that_became_slow_meanwhile_is_no_reason_to_undo() -> None:
    """With it the split before would be slower still."""
    slower = replace(HEAVY_HEAD.workload, slowdowns=((1.0, 1.0, 1.0, 2.0),))
    now, past = moved(0.9, workload=slower)
    decision = decide(now, (past,), FREE, CONFIG)
    assert isinstance(decision, Move)
    assert counts(decision.split.stages)[-1] == 1


def test_a_split_that_someone_asked_for_is_not_undone() -> None:
    now, past = moved(0.9)
    assert not isinstance(decide(replace(now, stages=split(7, 5, 4, 2)), (past,), FREE, CONFIG), Revert)


def test_a_move_made_for_wrong_costs_is_undone() -> None:
    """Measured where they are now, layers cost something else, and the split before is better by that."""
    now, past = moved(0.9, workload=model(4, 16, 0.01, (16,)))
    assert isinstance(decide(now, (past,), FREE, CONFIG), Revert)


def test_what_was_undone_is_not_tried_again_unless_costs_change() -> None:
    now, past = moved(0.9)
    undone = PastMove(before=now, decision=Revert(split=HEAVY_HEAD.split, reason=""), after_s=0.840)
    later = replace(HEAVY_HEAD, step=200)
    assert reason(decide(later, (past, undone), FREE, CONFIG)).endswith(
        "not done: it was tried after step 100 and made steps longer")
    little = replace(later, workload=replace(later.workload, slowdowns=((1.0, 1.0, 1.05, 1.0),)))
    assert reason(decide(little, (past, undone), FREE, CONFIG)).endswith("made steps longer")
    heavier = model(4, 16, 4.6, (16,))
    assert isinstance(decide(situation(heavier, later.stages, step=200), (past, undone), FREE, CONFIG), Move)


TWO_REPLICAS = model(2, 8, 0.01, (16, 16), slowdowns=((1.0, 1.0), (1.5, 1.5)))


def test_a_slow_replica_gives_micro_batches_away() -> None:
    decision = decide(situation(TWO_REPLICAS, split(5, 5)), (), FREE, CONFIG)
    assert isinstance(decision, Move)
    assert decision.split == Split(stages=split(5, 5), shares=best_shares(TWO_REPLICAS, split(5, 5)))
    assert decision.gain > 1.15
    assert decision.reason.startswith("micro-batches 16,16 -> 19,13: predicted 1.21x")


def test_fixed_shares_stay() -> None:
    assert reason(decide(situation(TWO_REPLICAS, split(5, 5)), (), FREE, CONFIG, fixed_shares=True)) == "stages 5,5 are best"


def test_layers_and_micro_batches_move_together() -> None:
    """A heavy head is everywhere, a slow rank in one replica."""
    workload = model(4, 16, 4.0, (16, 16), slowdowns=((1.0,) * 4, (1.6,) * 4))
    decision = decide(situation(workload, split(5, 4, 4, 5)), (), FREE, CONFIG)
    assert isinstance(decision, Move)
    assert counts(decision.split.stages) == (6, 5, 5, 2)
    assert decision.split.shares[0] > 17
    assert ", micro-batches 16,16 -> " in decision.reason


# A simulated job: measured, decided and moved as it runs.

Slowdowns = Callable[[int], tuple[tuple[float, ...], ...]]


@dataclass(kw_only=True)
class Job:
    """A job whose ranks take `noise` (standard deviation) more or less time in every step."""

    workload: Workload
    stages: Stages
    noise: float
    draw: random.Random
    slowdowns: Slowdowns

    def __post_init__(self) -> None:
        self.mesh = Mesh(data=len(self.workload.shares), pipeline=self.workload.num_ranks)
        self.measured = Measured(self.mesh, self.workload.costs)
        self.history: list[PastMove] = []
        self.step = self.decisions = 0

    def run(self, steps: int) -> None:
        """A decision every fifth step."""
        for _ in range(steps):
            self.step += 1
            self.train()
            if self.step % 5 == 0:
                self.rebalance()

    def train(self) -> None:
        rows = tuple(tuple(slow * self.draw.gauss(1.0, self.noise) for slow in row) for row in self.slowdowns(self.step))
        reports = [self.report(rank, rows[at.data][at.pipeline]) for rank, at in enumerate(self.mesh)]
        self.measured.add(reports, step_time(replace(self.workload, slowdowns=rows), self.stages))

    def report(self, rank: int, slowdown: float) -> RankTimes:
        at, workload = self.mesh.coordinate(rank), self.workload
        times = {layer: workload.costs[layer] * (slowdown * workload.shares[at.data])
                 for stage, place in enumerate(workload.placement) if place == at.pipeline
                 for layer in range(*self.stages[stage])}
        return RankTimes(rank=rank, num_micro_batches=workload.shares[at.data],
                         forward={layer: time.forward for layer, time in times.items()},
                         backward={layer: time.backward for layer, time in times.items()})

    def rebalance(self) -> None:
        estimate = self.measured.estimate()
        if estimate is None:
            return
        if self.history and self.history[-1].after_s is None:
            self.history[-1] = replace(self.history[-1], after_s=estimate.step_s)
        measured = replace(self.workload, costs=estimate.costs, slowdowns=estimate.slowdowns)
        now = Situation(step=self.step, steps_left=1000, stages=self.stages, workload=measured, step_s=estimate.step_s,
                        noise=estimate.noise)
        decision = decide(now, self.history, FREE, CONFIG)
        self.decisions += 1
        if not isinstance(decision, Keep):
            self.history.append(PastMove(before=now, decision=decision))
            self.stages, self.workload = decision.split.stages, replace(self.workload, shares=decision.split.shares)

    @property
    def of_best_static(self) -> float:
        """Throughput of the present split over that of the best one, noise aside."""
        workload = replace(self.workload, slowdowns=self.slowdowns(self.step))
        return step_time(workload, best_stages(workload)) / step_time(workload, self.stages)


def job(workload: Workload, stages: Stages, seed: int, noise: float, slowdowns: Slowdowns | None = None) -> Job:
    return Job(workload=workload, stages=stages, noise=noise, draw=random.Random(seed),
               slowdowns=slowdowns or (lambda step: workload.slowdowns))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_heavy_head_is_balanced_within_three_decisions(noise: float) -> None:
    running = job(model(4, 16, 4.0, (16,)), split(5, 4, 4, 5), 1, noise)
    while running.decisions < 3:
        running.run(5)
    assert running.of_best_static >= 0.97
    (past,) = running.history
    assert past.before.step_s / step_time(running.workload, running.stages) > 1.25


@pytest.mark.parametrize("seed", range(4))
def test_noise_moves_nothing(seed: int) -> None:
    """A balanced job of 300 steps whose ranks take 15 % more or less time in every step."""
    for workload, stages in ((model(4, 16, 0.01, (16,)), split(5, 4, 4, 5)), (model(2, 8, 0.01, (8, 8)), split(5, 5))):
        running = job(workload, stages, seed, 0.15)
        running.run(300)
        assert running.decisions > 50
        assert running.history == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("slow", "head", "stages"), [
    (2, 0.01, split(5, 4, 4, 5)), (1, 0.01, split(5, 4, 4, 5)), (3, 4.0, split(6, 5, 5, 2))])
def test_a_slow_rank_gets_fewer_layers_until_it_is_freed(seed: int, slow: int, head: float, stages: Stages) -> None:
    """Slowed half again from step 50 to 149; 5 % noise. Each time the split follows within 20 steps."""
    def slowdowns(step: int) -> tuple[tuple[float, ...], ...]:
        return (tuple(1.5 if rank == slow and 50 <= step < 150 else 1.0 for rank in range(4)),)

    running = job(model(4, 16, head, (16,)), stages, seed, 0.05, slowdowns)
    running.run(49)
    assert running.stages == stages
    running.run(20)
    assert counts(running.stages)[slow] < counts(stages)[slow]
    assert running.of_best_static >= 0.9
    running.run(80)
    assert len(running.history) == 1
    running.run(20)
    assert running.stages == stages
    running.run(80)
    assert len(running.history) == 2


def test_a_slow_replica_in_a_running_job() -> None:
    running = job(TWO_REPLICAS, split(5, 5), 1, 0.05)
    running.run(40)
    assert running.workload.shares == pytest.approx((19, 13), abs=1)
    assert running.stages == split(5, 5)
    assert step_time(TWO_REPLICAS, running.stages) / step_time(running.workload, running.stages) > 1.15


def lame(factor: float, last: int) -> Slowdowns:
    """Replica 1 is slow up to step `last`."""
    return lambda step: ((1.0, 1.0), (factor, factor) if step <= last else (1.0, 1.0))


def run_with_shares(running: Job, steps: int) -> list[int]:
    """Micro-batches of replica 1 in each step."""
    seen = []
    for _ in range(steps):
        running.run(1)
        seen.append(running.workload.shares[1])
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_that_lost_its_micro_batches_gets_them_back_when_it_is_fast_again(seed: int) -> None:
    """Tried every 80 steps at first (8 intervals of 10), then after 160, and at once taken back while it is slow."""
    running = job(model(2, 8, 0.01, (4, 4)), split(5, 5), seed, 0.05, lame(20.0, 300))
    seen = run_with_shares(running, 700)
    lost = seen.index(0)
    assert lost <= 20
    trials = [step for step in range(lost, 300) if seen[step] and not seen[step - 1]]
    assert len(trials) == 2 and trials[0] - lost >= 80 and trials[1] - trials[0] >= 160
    assert all(seen[step] == 1 and not seen[step + 5] for step in trials), "taken back at the next decision"
    assert running.workload.shares == pytest.approx((4, 4), abs=1)


def without_share(**changes: object) -> tuple[Situation, PastMove]:
    """Replica 1, 20 times as slow, has had no micro-batch since step 20."""
    now = situation(model(2, 8, 0.01, (8, 0), slowdowns=((1.0, 1.0), (20.0, 20.0))), split(5, 5), **changes)
    before = replace(now, step=20, workload=replace(now.workload, shares=(7, 1)))
    return now, PastMove(before=before, decision=Move(split=now.split, gain=2.0, reason=""), after_s=now.step_s)


def test_a_trial_says_what_it_is() -> None:
    now, past = without_share(step=100)
    decision = decide(now, (past,), FREE, CONFIG)
    assert isinstance(decision, Move) and decision.is_trial
    assert decision.split == Split(stages=now.stages, shares=(7, 1))
    assert decision.gain < 1
    assert decision.reason.endswith("a trial: replica 1 had none for 80 steps and may be faster by now")


@pytest.mark.parametrize(("changes", "fixed"), [({"step": 99}, False), ({"step": 100}, True),
                                                ({"step": 100, "steps_left": 79}, False)])
def test_no_trial_too_early_or_too_late_or_where_shares_are_fixed(changes: dict[str, int], fixed: bool) -> None:
    now, past = without_share(**changes)
    assert isinstance(decide(now, (past,), FREE, CONFIG, fixed_shares=fixed), Keep)


def test_a_replica_that_never_had_a_micro_batch_is_not_tried() -> None:
    now, _ = without_share(step=1000)
    assert isinstance(decide(now, (), FREE, CONFIG), Keep)
