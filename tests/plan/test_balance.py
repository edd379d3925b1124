import random
import time
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product

import pytest
from schedules import NAMED

from raytrain3d.errors import PlanError
from raytrain3d.plan import balance
from raytrain3d.plan.balance import best_shares, best_stages, slowest_stage_least
from raytrain3d.plan.cost import LayerCost, op_cost, stage_cost
from raytrain3d.plan.makespan import Compiled
from raytrain3d.plan.moves import num_moves
from raytrain3d.plan.partition import Stages, split_by_cost, split_evenly
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.simulate import simulate
from raytrain3d.plan.workload import Simulator, Workload, step_time

SIZES = [(schedule, chunks, ranks, layers) for schedule, chunks in NAMED for ranks in range(1, 6)
         for layers in range(2, 15) if ranks * chunks <= layers]


def split(*counts: int) -> Stages:
    return tuple(pairwise(accumulate(counts, initial=0)))


def counts(stages: Stages) -> list[int]:
    return [end - first for first, end in stages]


def every_split(num_layers: int, num_stages: int) -> list[Stages]:
    return [tuple(pairwise((0, *cuts, num_layers))) for cuts in combinations(range(1, num_layers), num_stages - 1)]


def block(seconds: float) -> LayerCost:
    """Forward to backward as 1 to 2."""
    return LayerCost(forward=seconds, backward_input=seconds, backward_weight=seconds)


def pipeline(costs: list[float], ranks: int, **changes: object) -> Workload:
    plain = Workload(schedule="1f1b", num_ranks=ranks, shares=(4 * ranks,), costs=tuple(map(block, costs)),
                     slowdowns=((1.0,) * ranks,))
    return replace(plain, **changes)  # type: ignore[arg-type]


def random_workload(draw: random.Random, schedule: str, chunks: int, ranks: int, layers: int) -> Workload:
    """Layers that have nothing in common, or that differ as blocks might, or a head of several blocks; slow ranks."""
    kind = draw.choice(("anything", "scattered", "head"))
    costs = [LayerCost(forward=draw.random(), backward_input=draw.random(), backward_weight=draw.random())
             if kind == "anything" else block(draw.expovariate(1.0) if kind == "scattered" else 1.0) for _ in range(layers)]
    if kind == "head":
        costs[0], costs[-1] = block(0.01), block(4 * draw.random())
    replicas = draw.choice((1, 1, 2))
    slowdowns = tuple(tuple(draw.choice((1.0, 1.0, 1 + draw.random())) for _ in range(ranks)) for _ in range(replicas))
    shares = tuple(draw.choice((1, 2, ranks, 2 * ranks, 4 * ranks)) for _ in range(replicas))
    return Workload(schedule=schedule, num_ranks=ranks, chunks=chunks, shares=shares, costs=tuple(costs),
                    slowdowns=slowdowns, hop_s=draw.choice((0.0, 0.1 * draw.random())))


def check_against_all(seed: int, schedule: str, chunks: int, ranks: int, layers: int) -> None:
    draw = random.Random(f"{seed} {schedule} {chunks} {ranks} {layers}")
    workload = random_workload(draw, schedule, chunks, ranks, layers)
    simulator = Simulator(workload)
    least = min(simulator.time(stages) for stages in every_split(layers, workload.num_stages))
    current = draw.choice(every_split(layers, workload.num_stages))
    assert step_time(workload, best_stages(workload)) <= 1.01 * least
    assert step_time(workload, best_stages(workload, current)) <= 1.01 * least


@pytest.mark.parametrize("seed", range(6))
def test_no_split_is_a_hundredth_faster(seed: int) -> None:
    """A sample of the sizes up to 5 ranks and 14 layers."""
    for size in random.Random(seed).sample(SIZES, 20):
        check_against_all(seed, *size)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_split_is_a_hundredth_faster_all_sizes(size: tuple[str, int, int, int]) -> None:
    for seed in range(10):
        check_against_all(seed, *size)


@pytest.mark.parametrize(("ranks", "layers"), [(4, 18), (4, 30), (8, 18)])
def test_descent_alone_finds_the_best_split_of_a_model_with_a_heavy_head(monkeypatch: pytest.MonkeyPatch, ranks: int,
                                                                         layers: int) -> None:
    """Larger models have too many splits to look at them all."""
    for head, schedule in product((0.5, 2.2, 3.8), ("1f1b", "gpipe", "zb_h1")):
        workload = pipeline([0.001] + [1.0] * (layers - 2) + [head], ranks, schedule=schedule)
        exact = step_time(workload, best_stages(workload))
        with monkeypatch.context() as patch:
            patch.setattr(balance, "FEW", 0)
            assert step_time(workload, best_stages(workload)) <= 1.001 * exact


def test_128_layers_on_64_stages_within_ten_seconds() -> None:
    draw = random.Random(1)
    workload = pipeline([draw.uniform(0.5, 1.5) for _ in range(128)], 64, shares=(256,))
    before = time.process_time()
    found = best_stages(workload, split_evenly(128, 64))
    assert time.process_time() - before < 10
    assert step_time(workload, found) <= step_time(workload, slowest_stage_least(workload)) * 1.001


def test_almost_all_splits_are_ruled_out_without_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated, ends = [], Compiled.ends
    monkeypatch.setattr(Compiled, "ends", lambda *arguments: simulated.append(1) or ends(*arguments))
    draw = random.Random(3)
    best_stages(pipeline([draw.uniform(0.5, 1.5) for _ in range(64)], 32))
    assert len(simulated) < 150  # of thousands; 32 are for the straight paths


@pytest.mark.parametrize("seed", range(20))
def test_step_time_is_that_of_the_slowest_replica(seed: int) -> None:
    draw = random.Random(seed)
    schedule, chunks = draw.choice(NAMED)
    ranks = draw.randint(1, 4)
    workload = random_workload(draw, schedule, chunks, ranks, ranks * chunks + draw.randint(0, 4))
    stages = draw.choice(every_split(workload.num_layers, workload.num_stages))
    times = []
    for share, slowdowns in zip(workload.shares, workload.slowdowns, strict=True):
        programs = programs_for(schedule, ranks, share, chunks)
        costs = tuple(stage_cost(workload.costs, range(*layers)) * slowdowns[programs.schedule.rank_of(stage)]
                      for stage, layers in enumerate(stages))
        times.append(simulate(programs, lambda op, costs=costs: op_cost(op, costs), hop_s=workload.hop_s).makespan)
    assert step_time(workload, stages) == max(times)


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_changes_no_time_below_it(seed: int) -> None:
    draw = random.Random(seed)
    workload = random_workload(draw, "1f1b", 1, 3, 9)
    simulator, splits = Simulator(workload), every_split(9, 3)
    limit = step_time(workload, draw.choice(splits))
    for stages in splits:
        time_s = step_time(workload, stages)
        limited = simulator.time(stages, limit)
        assert limited == time_s if time_s < limit * (1 - 1e-9) else limited >= limit * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_slowest_stage_is_the_least_of_all_splits(seed: int) -> None:
    """Each replica's micro-batches and each rank's slowdown counted."""
    draw = random.Random(seed)
    workload = random_workload(draw, "1f1b", 1, draw.randint(1, 5), draw.randint(5, 10))

    def slowest(stages: Stages) -> float:
        return max(stage_cost(workload.costs, range(*layers)).total * share * slowdowns[stage]
                   for share, slowdowns in zip(workload.shares, workload.slowdowns, strict=True)
                   for stage, layers in enumerate(stages))

    least = min(map(slowest, every_split(workload.num_layers, workload.num_stages)))
    assert slowest(slowest_stage_least(workload)) == pytest.approx(least)


def test_the_shortest_step_is_not_that_of_the_least_slowest_stage() -> None:
    """Llama-3.1-8B's costs: the head's 2.2 blocks leave gaps that a split made for the slowest stage does not use."""
    workload = pipeline([0.0] + [1.0] * 32 + [2.2], 8)
    slowest_stage = split_by_cost([cost.total for cost in workload.costs], 8)
    assert step_time(workload, best_stages(workload)) < 0.98 * step_time(workload, slowest_stage)


def test_a_slow_rank_gets_fewer_layers() -> None:
    workload = pipeline([1.0] * 12, 3, slowdowns=((1.0, 2.0, 1.0),))
    assert counts(best_stages(workload)) == [5, 2, 5]


def test_of_equal_splits_the_one_fewest_moves_away() -> None:
    """Seven equal layers on three stages leave three best splits."""
    workload = pipeline([1.0] * 7, 3, schedule="gpipe")
    for current in (split(3, 2, 2), split(2, 3, 2), split(2, 2, 3)):
        assert best_stages(workload, current) == current
    assert num_moves(split(4, 2, 1), best_stages(workload, split(4, 2, 1))) == 1


def test_fewest_moves_among_many_splits() -> None:
    workload = pipeline([1.0] * 42, 8, schedule="gpipe")
    current = split(6, 5, 5, 5, 5, 5, 5, 6)
    assert best_stages(workload, current) == current
    assert num_moves(split(7, 5, 5, 5, 5, 5, 5, 5), best_stages(workload, split(7, 5, 5, 5, 5, 5, 5, 5))) == 1


def test_memory_is_kept() -> None:
    """Without a limit rank 0 would hold 4 layers; the search starts from splits that do not fit."""
    workload = pipeline([0.1, 0.1, 0.1, 1.0, 1.0, 1.0], 3)
    assert counts(best_stages(workload)) == [4, 1, 1]
    found = best_stages(replace(workload, excess=lambda stages: max(counts(stages)[0] - 2, 0)))
    fitting = [stages for stages in every_split(6, 3) if counts(stages)[0] <= 2]
    assert found in fitting
    assert step_time(workload, found) == min(step_time(workload, stages) for stages in fitting)


def test_memory_is_found_from_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "FEW", 0)
    limits = (2, 4, 6, 12)
    workload = pipeline([1.0] * 24, 4, excess=lambda stages: sum(
        max(count - limit, 0) for count, limit in zip(counts(stages), limits, strict=True)))
    assert counts(best_stages(workload)) == [2, 4, 6, 12]


def test_no_split_fits() -> None:
    with pytest.raises(PlanError, match=r"no split of 6 layers over 3 stages fits: ranks lack at least 2\.00 GiB"):
        best_stages(pipeline([1.0] * 6, 3, excess=lambda stages: max(counts(stages)) * 2**30))


def test_workload_of_other_sizes() -> None:
    with pytest.raises(PlanError, match=r"slowdowns of 1 replicas with \[2\] pipeline ranks: there are 1 replicas with 3"):
        pipeline([1.0] * 6, 3, slowdowns=((1.0, 1.0),))
    with pytest.raises(PlanError, match="2 layers cannot be split over 3 stages"):
        pipeline([1.0] * 2, 3)


def test_a_slow_replica_gets_fewer_micro_batches() -> None:
    """A time of 15 or more on a replica at full speed, 1.5 times as much on the other."""
    workload = pipeline([1.0] * 8, 2, shares=(16, 16), slowdowns=((1.0, 1.0), (1.5, 1.5)))
    assert best_shares(workload, split(4, 4)) == (19, 13)
    assert best_shares(replace(workload, shares=(19, 13)), split(4, 4)) == (19, 13)


@pytest.mark.parametrize("seed", range(25))
def test_no_shares_are_faster(seed: int) -> None:
    draw = random.Random(seed)
    workload = replace(random_workload(draw, "1f1b", 1, 2, 6), shares=(draw.randint(0, 5), draw.randint(0, 5), 3),
                       slowdowns=tuple((1.0, draw.choice((1.0, 1 + 5 * draw.random()))) for _ in range(3)))
    total, stages = sum(workload.shares), split(3, 3)
    found = best_shares(workload, stages)
    assert sum(found) == total
    others = [(a, b, total - a - b) for a in range(total + 1) for b in range(total + 1 - a)]
    least = min(step_time(replace(workload, shares=shares), stages) for shares in others)
    assert step_time(replace(workload, shares=found), stages) == pytest.approx(least)


def test_a_replica_far_too_slow_gets_none() -> None:
    workload = pipeline([1.0] * 4, 2, shares=(2, 1), slowdowns=((1.0, 1.0), (9.0, 9.0)))
    assert best_shares(workload, split(2, 2)) == (3, 0)


def test_equal_replicas_keep_their_shares() -> None:
    workload = pipeline([1.0] * 4, 2, shares=(4, 3), slowdowns=((1.0, 1.0),) * 2)
    assert best_shares(workload, split(2, 2)) == (4, 3)
