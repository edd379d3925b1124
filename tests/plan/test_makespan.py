import random

import pytest
from schedules import NAMED

from raytrain3d.plan.cost import LayerCost, op_cost
from raytrain3d.plan.makespan import Compiled, compile_programs, compiled, stage_seconds, straight_paths
from raytrain3d.plan.program import lower, programs_for
from raytrain3d.plan.schedule import Kind, Op, Schedule
from raytrain3d.plan.simulate import simulate


def random_costs(draw: random.Random, number: int) -> tuple[LayerCost, ...]:
    return tuple(LayerCost(forward=draw.random(), backward_input=draw.random(), backward_weight=draw.random())
                 for _ in range(number))


def seconds_of(costs: tuple[LayerCost, ...]) -> list[float]:
    return [*(second for cost in costs for second in stage_seconds(cost, 1.0)), 0.0]


@pytest.mark.parametrize(("schedule", "chunks"), NAMED)
def test_makespan_is_that_of_the_simulator_to_the_bit(schedule: str, chunks: int) -> None:
    for seed in range(25):
        draw = random.Random(seed)
        ranks, micro_batches, hop_s = draw.randint(1, 6), draw.randint(0, 14), draw.choice((0.0, draw.random()))
        costs = random_costs(draw, ranks * chunks)
        programs = programs_for(schedule, ranks, micro_batches, chunks)
        expected = simulate(programs, lambda op, costs=costs: op_cost(op, costs), hop_s=hop_s).makespan
        assert compiled(schedule, ranks, micro_batches, chunks).makespan(seconds_of(costs), hop_s) == expected


@pytest.mark.parametrize(("schedule", "chunks"), NAMED)
def test_a_critical_path_is_as_long_as_its_step_and_no_longer_than_any_other(schedule: str, chunks: int) -> None:
    for seed in range(25):
        draw = random.Random(seed)
        ranks, micro_batches, hop_s = draw.randint(1, 5), draw.randint(0, 9), draw.choice((0.0, draw.random()))
        program = compiled(schedule, ranks, micro_batches, chunks)
        own, other = (seconds_of(random_costs(draw, ranks * chunks)) for _ in range(2))
        ends = program.ends(own, hop_s)
        path = program.critical_path(ends, hop_s)
        assert path.length(own, hop_s) == pytest.approx(max(ends), abs=1e-12)
        for bound in (path, *straight_paths(schedule, ranks, micro_batches, chunks)):
            assert bound.length(other, hop_s) <= program.makespan(other, hop_s) + 1e-9


def test_a_straight_path_has_all_ops_of_its_rank() -> None:
    seconds = seconds_of((LayerCost(forward=1.0, backward_input=1.0, backward_weight=1.0),) * 3)
    program: Compiled = compiled("1f1b", 3, 5)
    assert [path.length(seconds, 0.5) for path in straight_paths("1f1b", 3, 5)] == [15.0, 19.0, 23.0]
    assert program.makespan(seconds, 0.5) >= 23.0


def test_an_op_that_comes_after_two_receives_waits_for_both() -> None:
    """Rank 1 begins with the micro-batch that is sent last; the one sent before is received before."""
    forwards = tuple(tuple(Op(Kind.FORWARD, stage, micro_batch) for micro_batch in order)
                     for stage, order in enumerate(((0, 1), (1, 0))))
    programs = lower(Schedule(name="crossed", num_micro_batches=2, placement=(0, 1), ops=forwards))
    costs = random_costs(random.Random(1), 2)
    expected = simulate(programs, lambda op: op_cost(op, costs), hop_s=0.1).makespan
    program = compile_programs(programs)
    assert len(program.costs) == 5
    assert program.makespan(seconds_of(costs), 0.1) == expected
