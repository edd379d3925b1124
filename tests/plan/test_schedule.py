from itertools import product

import pytest
from schedules import NAMED

from raytrain3d.errors import PlanError
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op, Schedule
from raytrain3d.plan.simulate import Timeline, simulate

RANKS = (1, 2, 3, 4, 6)


def test_op_prints_as_stage_kind_micro_batch() -> None:
    assert str(Op(Kind.FORWARD, 2, 0)) == "2F0"
    assert str(Op(Kind.RECEIVE_BACKWARD, 1, 13)) == "1RB13"


GRIDS = {
    ("gpipe", 2, 3, 1): [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ],
    ("1f1b", 4, 6, 1): [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
    ],
    ("1f1b", 4, 2, 1): [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ],
    ("interleaved", 2, 4, 2): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    # One group of four: no group of one that would wait for itself at every chunk.
    ("interleaved", 3, 4, 2): [
        "0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1F3 4F0 4F1 4F2 4B0 4F3 4B1 4B2 4B3 1B0 1B1 1B2 1B3",
        "2F0 2F1 2F2 2F3 5F0 5B0 5F1 5B1 5F2 5B2 5F3 5B3 2B0 2B1 2B2 2B3",
    ],
    # Groups of three and two.
    ("interleaved", 2, 5, 2): [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4",
    ],
    ("breadth_first", 2, 3, 2): [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
    ],
    ("zb_h1", 3, 5, 1): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4",
    ],
    ("zb_h1", 3, 2, 1): [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "1F0 1F1 1I0 1I1 1W0 1W1",
        "2F0 2I0 2F1 2I1 2W0 2W1",
    ],
    ("zb_v", 2, 4, 2): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ],
    # What is left of five micro-batches.
    ("zb_v", 3, 2, 2): [
        "0F0 0F1 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 4F0 4F1 4I0 4W0 4I1 4W1 1I0 1W0 1I1 1W1",
        "2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1",
    ],
}


@pytest.mark.parametrize(("name", "p", "m", "chunks"), GRIDS)
def test_golden_grid(name: str, p: int, m: int, chunks: int) -> None:
    ops = SCHEDULES[name](p, m, chunks).ops
    assert [" ".join(map(str, rank)) for rank in ops] == GRIDS[name, p, m, chunks]


def test_placement() -> None:
    assert SCHEDULES["1f1b"](3, 1, 1).placement == (0, 1, 2)
    assert SCHEDULES["interleaved"](3, 0, 2).placement == SCHEDULES["breadth_first"](3, 1, 2).placement == (0, 1, 2, 0, 1, 2)
    assert SCHEDULES["zb_v"](3, 0, 2).placement == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(("name", "wrong", "valid"), [("gpipe", 2, 1), ("1f1b", 2, 1), ("zb_h1", 3, 1), ("zb_v", 1, 2)])
def test_schedules_with_one_number_of_chunks_take_no_other(name: str, wrong: int, valid: int) -> None:
    with pytest.raises(PlanError, match=f"schedule {name} with {wrong} chunks per pipeline rank: it has always {valid}"):
        SCHEDULES[name](4, 4, wrong)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "chunks"), NAMED)
def test_every_stage_does_every_micro_batch_once_in_order(name: str, chunks: int, ranks: int) -> None:
    """On its own rank, forward first. Each kind goes through the micro-batches in order, so that gradients add up in one
    order under all schedules."""
    for micro_batches in (0, 1, 2, 3, 4, 7, 13):
        schedule = SCHEDULES[name](ranks, micro_batches, chunks)
        assert (schedule.name, schedule.num_micro_batches) == (name, micro_batches)
        assert (schedule.num_ranks, schedule.num_stages) == (ranks, ranks * chunks)
        check_order(schedule, chunks)


def check_order(schedule: Schedule, chunks: int) -> None:
    name, micro_batches = schedule.name, schedule.num_micro_batches
    backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if name.startswith("zb") else (Kind.BACKWARD,)
    for rank, ops in enumerate(schedule.ops):
        own = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == rank]
        assert len(own) == chunks
        assert len(ops) == len(own) * micro_batches * (1 + len(backward))
        for stage in own:
            first, *later = ([op for op in ops if op.stage == stage and op.kind is kind]
                             for kind in (Kind.FORWARD, *backward))
            assert [op.micro_batch for op in first] == list(range(micro_batches))
            for row in later:
                assert [op.micro_batch for op in row] == list(range(micro_batches))
                assert all(ops.index(a) < ops.index(b) for a, b in zip(first, row, strict=True))
                first = row


def test_forwards_alone_for_evaluation() -> None:
    schedule = SCHEDULES["zb_v"](2, 2, 2).forwards()
    assert [" ".join(map(str, ops)) for ops in schedule.ops] == ["0F0 0F1 3F0 3F1", "1F0 2F0 1F1 2F1"]
    assert simulate(programs_for("zb_v", 2, 2, 2, training=False), lambda op: 1.0).peak_in_flight == (0, 0)


# Closed forms. Costs are whole seconds of a rank's forward, input gradient and weight gradient of a micro-batch, and can be
# divided by the number of chunks, so that all sums are exact.
UNIT = 12
EQUAL = (1, 1, 1)


def sizes(p: int) -> list[int]:
    """Numbers of micro-batches around those where something changes."""
    return sorted({m for m in (1, 2, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p - 1, 4 * p) if m > 0})


def timeline(name: str, p: int, m: int, chunks: int = 1, costs: tuple[int, int, int] = EQUAL) -> Timeline:
    forward, backward_input, backward_weight = (cost * UNIT / chunks for cost in costs)
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD_INPUT: backward_input, Kind.BACKWARD_WEIGHT: backward_weight,
               Kind.BACKWARD: backward_input + backward_weight}
    return simulate(programs_for(name, p, m, chunks), lambda op: seconds[op.kind])


def idle(name: str, p: int, m: int, chunks: int, costs: tuple[int, int, int]) -> float:
    """Part of the step in which a rank does not compute, in the unit of `costs`: on all ranks alike."""
    result = timeline(name, p, m, chunks, costs)
    assert result.busy == (m * sum(costs) * UNIT,) * p
    return (result.makespan - result.busy[0]) / UNIT


def peak(name: str, p: int, m: int, chunks: int = 1) -> tuple[int, ...]:
    return timeline(name, p, m, chunks).peak_in_flight


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("costs", [EQUAL, (2, 3, 1), (1, 2, 5)])
def test_idle_time_with_whole_backward(p: int, costs: tuple[int, int, int]) -> None:
    """(p - 1)(T_F + T_B + T_W), divided by the chunks v. With fewer micro-batches than ranks, a rank waits p - m turns more
    between two chunks."""
    for m in sizes(p):
        assert idle("gpipe", p, m, 1, costs) == idle("1f1b", p, m, 1, costs) == (p - 1) * sum(costs)
        for name, v in product(("interleaved", "breadth_first"), (2, 3)):
            turns = p - 1 + (v - 1) * max(p - m, 0)
            assert idle(name, p, m, v, costs) == pytest.approx(turns * sum(costs) / v, rel=1e-12)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("costs", [EQUAL, (2, 3, 1), (5, 2, 2), (3, 9, 3), (1, 2, 2), (2, 3, 5), (4, 1, 2)])
def test_idle_time_of_zb_h1(p: int, costs: tuple[int, int, int]) -> None:
    """From m = p on (p - 1)(T_F + T_B - T_W), the paper's, while T_W is no longer than T_F and T_B; if the three are equal,
    a third of 1F1B's. A longer T_W does not help: the first rank waits (p - 1) T_B for its first gradient, as it may hold
    no more than p micro-batches, and the last rank (p - 1) T_F for its first activation."""
    forward, backward_input, backward_weight = costs
    for m in (m for m in sizes(p) if m >= p):
        found = idle("zb_h1", p, m, 1, costs)
        assert found == (p - 1) * max(forward + backward_input - backward_weight, backward_input, forward)
        if backward_weight <= min(forward, backward_input):
            assert found == (p - 1) * (forward + backward_input - backward_weight)
        assert costs != EQUAL or 3 * found == idle("1f1b", p, m, 1, costs)


@pytest.mark.parametrize("p", RANKS)
def test_idle_time_of_zb_h1_with_fewer_micro_batches_than_ranks(p: int) -> None:
    """Each one less than p is a weight gradient less to fill the gap with."""
    for m, costs in product(range(1, p), [EQUAL, (2, 3, 1), (5, 2, 2)]):
        forward, backward_input, backward_weight = costs
        found = idle("zb_h1", p, m, 1, costs)
        assert found == (p - 1) * (forward + backward_input) - (m - 1) * backward_weight


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_has_no_gap(p: int) -> None:
    """The paper counts idle time between the first and the last op of a rank: none from m = 2p - 1 on, if F, I and W take
    equally long. Of the whole step every rank is idle for (p - 1) T_F / 2, before its first op or after its last."""
    for m in (2 * p - 1, 2 * p, 2 * p + 1, 4 * p):
        result = timeline("zb_v", p, m, 2)
        assert tuple(spans[-1].end - spans[0].start for spans in result.spans) == result.busy
        assert idle("zb_v", p, m, 2, EQUAL) == (p - 1) / 2


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("costs", [(1, 2, 1), (1, 2, 2), (3, 4, 3), (2, 3, 2)])
def test_idle_time_of_zb_v_with_a_longer_input_gradient(p: int, costs: tuple[int, int, int]) -> None:
    """(p - 1) T_B / 2 while T_F, T_W <= T_B <= 2 T_W."""
    for m in (2 * p - 1, 2 * p, 4 * p):
        assert idle("zb_v", p, m, 2, costs) == (p - 1) * costs[1] / 2


@pytest.mark.parametrize("p", RANKS)
def test_peak_of_activations_in_flight(p: int) -> None:
    """On rank i. GPipe: m; 1F1B: min(p - i, m); ZB-H1: min(p, m) on all; breadth-first: all of all chunks."""
    for m in (0, *sizes(p)):
        assert peak("gpipe", p, m) == (m,) * p
        assert peak("1f1b", p, m) == tuple(min(p - rank, m) for rank in range(p))
        assert peak("zb_h1", p, m) == (min(p, m),) * p
        assert peak("breadth_first", p, m, 2) == (2 * m,) * p


@pytest.mark.parametrize("p", RANKS)
def test_peak_of_activations_of_interleaved(p: int) -> None:
    """p + (p - 1)/v of a whole rank on rank 0, two stages less on each next one. If m is no multiple of p, groups are larger
    than p, and every chunk but one holds a group."""
    for m, v in product(sizes(p), (1, 2, 3)):
        largest = -(-m // max(m // p, 1))
        found = peak("interleaved", p, m, v)
        assert found == tuple(min((v - 1) * largest + 2 * (p - 1 - rank) + 1, v * m) for rank in range(p))
        if m % p == 0 and m > p:
            assert found[0] / v == pytest.approx(p + (p - 1) / v, rel=1e-12)


@pytest.mark.parametrize("p", RANKS)
def test_peak_of_activations_of_zb_v(p: int) -> None:
    """p of a whole rank, 2p of its halves, on every rank; never more with few micro-batches."""
    for m in sizes(p):
        assert max(peak("zb_v", p, m, 2)) <= min(2 * p, 2 * m)
        assert m < 2 * p - 1 or peak("zb_v", p, m, 2) == (2 * p,) * p
