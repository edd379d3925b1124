from itertools import pairwise, product

import pytest

from raytrain3d.plan.program import lower, programs_for
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op
from raytrain3d.plan.simulate import Timeline, simulate

FORWARD, BACKWARD = 1.0, 2.0


def equal_stages(op: Op) -> float:
    return FORWARD if op.kind is Kind.FORWARD else BACKWARD


def timeline(name: str, ranks: int, micro_batches: int, hop_s: float = 0.0) -> Timeline:
    return simulate(programs_for(name, ranks, micro_batches), equal_stages, hop_s=hop_s)


@pytest.mark.parametrize(("name", "p", "m"), list(product(("gpipe", "1f1b"), (1, 2, 3, 4, 8, 16), (1, 2, 3, 4, 8, 32))))
def test_closed_forms(name: str, p: int, m: int) -> None:
    """GPipe and 1F1B idle (p - 1)(T_F + T_B), fewer micro-batches than stages included."""
    result = timeline(name, p, m)
    assert result.makespan == pytest.approx((m + p - 1) * (FORWARD + BACKWARD))
    for rank in range(p):
        assert result.busy[rank] == pytest.approx(m * (FORWARD + BACKWARD))
        assert result.idle_of_wall[rank] == pytest.approx((p - 1) / (m + p - 1))
        assert result.idle_of_ideal[rank] == pytest.approx((p - 1) / m)


@pytest.mark.parametrize(("p", "share"), [(2, 0.20), (4, 0.43), (8, 0.64)])
def test_idle_share_of_four_micro_batches(p: int, share: float) -> None:
    assert timeline("1f1b", p, 4).idle_of_wall[0] == pytest.approx(share, abs=0.005)


def test_five_percent_needs_nineteen_micro_batches_a_stage_border() -> None:
    assert timeline("1f1b", 8, 4 * 8).idle_of_wall[0] == pytest.approx(0.18, abs=0.005)
    assert timeline("1f1b", 4, 19 * 3).idle_of_wall[0] == pytest.approx(0.05)


@pytest.mark.parametrize(("p", "m"), list(product((2, 4), (1, 4, 8))))
def test_gpipe_pays_each_hop_once_each_way(p: int, m: int) -> None:
    result = timeline("gpipe", p, m, hop_s=0.25)
    assert result.makespan == pytest.approx((m + p - 1) * (FORWARD + BACKWARD) + 2 * (p - 1) * 0.25)


def test_the_slowest_stage_sets_the_pace() -> None:
    def uneven(op: Op) -> float:
        return equal_stages(op) * (2 if op.stage == 1 else 1)

    result = simulate(programs_for("gpipe", 2, 50), uneven)
    assert result.makespan == pytest.approx(FORWARD + 50 * 2 * (FORWARD + BACKWARD) + BACKWARD)
    assert result.idle_of_wall[1] < 0.02
    assert result.idle_of_wall[0] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("name", "p", "m"), list(product(SCHEDULES, (1, 3, 4), (1, 2, 6))))
def test_spans_respect_ranks_and_dependencies(name: str, p: int, m: int) -> None:
    result = timeline(name, p, m, hop_s=0.5)
    at = {span.op: span for spans in result.spans for span in spans}
    for spans in result.spans:
        assert all(a.end <= b.start for a, b in pairwise(spans))
    for op, span in at.items():
        before = Op(op.kind, op.stage + (-1 if op.kind is Kind.FORWARD else 1), op.micro_batch)
        assert before not in at or at[before].end + 0.5 <= span.start


def test_a_step_without_micro_batches_takes_no_time() -> None:
    result = simulate(lower(SCHEDULES["1f1b"](3, 0)), equal_stages)
    assert result.makespan == 0
    assert result.idle_of_wall == result.idle_of_ideal == (0, 0, 0)
    assert result.peak_in_flight == (0, 0, 0)
