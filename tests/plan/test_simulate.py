from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest

from raytrain3d.plan.grid import parse_op
from raytrain3d.plan.program import SENDS, Programs, lower, programs_for
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op
from raytrain3d.plan.simulate import Held, Timeline, held_at_peak, simulate

FORWARD, BACKWARD = 1.0, 2.0


def equal_stages(op: Op) -> float:
    """A whole backward takes as long as two forwards, each half of it as long as one."""
    return BACKWARD if op.kind is Kind.BACKWARD else FORWARD


def timeline(name: str, ranks: int, micro_batches: int, hop_s: float = 0.0) -> Timeline:
    return simulate(programs(name, ranks, micro_batches), equal_stages, hop_s=hop_s)


def programs(name: str, ranks: int, micro_batches: int) -> Programs:
    chunks = 2 if name in ("interleaved", "breadth_first", "zb_v") else 1
    return programs_for(name, ranks, micro_batches, chunks)


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
    result, rank_of = timeline(name, p, m, hop_s=0.5), programs(name, p, m).schedule.rank_of
    at = {span.op: span for spans in result.spans for span in spans}
    for spans in result.spans:
        assert all(a.end <= b.start for a, b in pairwise(spans))
    for op, span in at.items():
        if op.kind is Kind.BACKWARD_WEIGHT:
            assert at[replace(op, kind=Kind.BACKWARD_INPUT)].end <= span.start
            continue
        before = replace(op, stage=op.stage + (-1 if op.kind is Kind.FORWARD else 1))
        hop = 0.5 if before in at and rank_of(op.stage) != rank_of(before.stage) else 0.0
        assert before not in at or at[before].end + hop <= span.start


def test_a_step_without_micro_batches_takes_no_time() -> None:
    result = simulate(lower(SCHEDULES["1f1b"](3, 0, 1)), equal_stages)
    assert result.makespan == 0
    assert result.idle_of_wall == result.idle_of_ideal == (0, 0, 0)
    assert result.peak_in_flight == (0, 0, 0)


@pytest.mark.parametrize(("name", "p", "m", "hop_s"), list(product(SCHEDULES, (1, 3, 4), (1, 2, 6), (0.0, 0.7))))
def test_critical_path_has_no_gap(name: str, p: int, m: int, hop_s: float) -> None:
    """It begins at 0, ends with the step, and goes on to another rank by a message only."""
    result = timeline(name, p, m, hop_s)
    path, rank_of = result.critical_path, programs(name, p, m).schedule.rank_of
    assert path[0].start == 0
    assert path[-1].end == result.makespan
    assert all(a.end == b.start for a, b in pairwise(path))
    for before, span in pairwise(path):
        assert rank_of(before.op.stage) == rank_of(span.op.stage) or before.op.kind in SENDS or not hop_s
    assert any(span.op.kind in SENDS for span in path) == (p > 1 and hop_s > 0)


def test_critical_path_of_two_micro_batches() -> None:
    path = timeline("1f1b", 2, 2, 0.5).critical_path
    assert [str(span.op) for span in path] == ["0F0", "0SF0", "1F0", "1B0", "1F1", "1B1", "1SB1", "0B1"]


def peak(ops: str, size: Callable[[int, Kind], float]) -> Held:
    return held_at_peak([parse_op(op) for op in ops.split()], size)[0]


@pytest.mark.parametrize(("ops", "held"), [
    ("0F0 0F1 0B0 0F2 0B1 0B2", {(0, "F"): 2}),
    ("0F0 0I0 0F1 0I1 0W0 0W1", {(0, "I"): 1, (0, "F"): 1}),
    ("0F0 0I0 0W0 0F1 0I1 0W1", {(0, "F"): 1}),
    ("0F0 1F0 1B0 0B0", {(0, "F"): 1, (1, "F"): 1}),
    ("0F0 0F1 1F0", {}),
])
def test_held_from_forward_to_the_whole_backward(ops: str, held: dict[tuple[int, str], int]) -> None:
    """After I an activation waits for its W; without backwards nothing is kept."""
    assert peak(ops, lambda stage, after: 1) == held


def test_peak_may_be_within_an_op() -> None:
    ops = [parse_op(op) for op in ["0F0", "0F1", "0B0", "0B1"]]
    held, during = held_at_peak(ops, lambda stage, after: 1, lambda op: 2 if op == ops[3] else 0)
    assert (held, during) == ({(0, "F"): 1}, ops[3])
    assert held_at_peak(ops, lambda stage, after: 1, lambda op: 0.5 if op == ops[3] else 0) == ({(0, "F"): 2}, None)
    assert held_at_peak(ops[:2], lambda stage, after: 1, lambda op: 1) == ({}, None)


def test_peak_is_where_the_sum_of_sizes_is_most() -> None:
    """Two of stage 0 are more micro-batches, one of stage 1 is more bytes; and I may leave more behind than F."""
    ops = "0F0 0F1 0B0 0B1 1F0 1B0"
    assert peak(ops, lambda stage, after: 1) == {(0, "F"): 2}
    assert peak(ops, lambda stage, after: (1, 5)[stage]) == {(1, "F"): 1}
    assert peak("0F0 0F1 0B1 0I0 0W0", lambda stage, after: 3 if after is Kind.BACKWARD_INPUT else 1) == {(0, "I"): 1}
