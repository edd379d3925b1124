from dataclasses import replace
from itertools import product

import pytest

from raytrain3d.errors import PlanError
from raytrain3d.plan.program import RECEIVES, SENDS, Channel, Programs, in_order, lower, programs_for, prove, receive_of
from raytrain3d.plan.schedule import SCHEDULES, Op, Schedule, one_forward_one_backward


def swapped(programs: Programs, rank: int, first: str, second: str) -> Programs:
    """`programs` with two ops of one rank exchanged, given as they print."""
    ops = list(programs.ops[rank])
    i, j = ([str(op) for op in ops].index(text) for text in (first, second))
    ops[i], ops[j] = ops[j], ops[i]
    return replace(programs, ops=(*programs.ops[:rank], tuple(ops), *programs.ops[rank + 1 :]))


def test_lowered_text() -> None:
    assert lower(one_forward_one_backward(2, 2)).text() == (
        "rank 0: 0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1\n"
        "rank 1: 1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1")
    assert lower(one_forward_one_backward(3, 1)).text() == (
        "rank 0: 0F0 0SF0 0RB0 0B0\n"
        "rank 1: 1RF0 1F0 1SF0 1RB0 1B0 1SB0\n"
        "rank 2: 2RF0 2F0 2B0 2SB0")


def test_one_stage_sends_nothing() -> None:
    assert lower(one_forward_one_backward(1, 2)).text() == "rank 0: 0F0 0B0 0F1 0B1"


@pytest.mark.parametrize(("name", "ranks", "micro_batches"),
                         list(product(SCHEDULES, (1, 2, 3, 4, 8), (0, 1, 2, 5, 16))))
def test_every_message_is_sent_and_received_once(name: str, ranks: int, micro_batches: int) -> None:
    programs = lower(SCHEDULES[name](ranks, micro_batches))
    every = [op for ops in programs.ops for op in ops]
    assert len(set(every)) == len(every)
    assert {receive_of(op) for op in every if op.kind in SENDS} == {op for op in every if op.kind in RECEIVES}
    directions = 1 if name == "forward" else 2
    assert sum(op.kind in SENDS for op in every) == directions * (ranks - 1) * micro_batches
    compute = tuple(tuple(op for op in ops if programs.channel(op) is None) for ops in programs.ops)
    assert compute == programs.schedule.ops


def test_channels_name_both_ends_and_list_receives_in_order() -> None:
    programs = programs_for("1f1b", 3, 4)
    forward, backward = Channel(sender=0, receiver=1, forward=True), Channel(sender=2, receiver=1, forward=False)
    assert [str(c) for c in (forward, backward)] == ["0->1 activations", "2->1 gradients"]
    receives = programs.receives(1)
    assert set(receives) == {forward, backward}
    assert [str(op) for op in receives[forward]] == ["1RF0", "1RF1", "1RF2", "1RF3"]
    assert [str(op) for op in receives[backward]] == ["1RB0", "1RB1", "1RB2", "1RB3"]


def test_a_swapped_receive_is_rejected_naming_both_ops() -> None:
    programs = swapped(lower(one_forward_one_backward(3, 4)), 1, "1RF0", "1RF1")
    with pytest.raises(PlanError, match=r"channel 0->1 activations: message 0 is sent by 0SF0 but received by 1RF1"):
        prove(programs)


def test_a_missing_receive_is_rejected() -> None:
    programs = lower(one_forward_one_backward(2, 2))
    shorter = replace(programs, ops=(programs.ops[0], tuple(op for op in programs.ops[1] if str(op) != "1RF1")))
    with pytest.raises(PlanError, match="message 1 is sent by 0SF1 but received by no op"):
        prove(shorter)


def test_a_cycle_is_rejected_naming_both_ops() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends the activations that the gradient comes from."""
    programs = swapped(lower(one_forward_one_backward(2, 1)), 0, "0SF0", "0RB0")
    with pytest.raises(PlanError, match=r"wait for each other: rank 0 at 0RB0, rank 1 at 1RF0"):
        prove(programs)


def test_a_schedule_that_cannot_run_is_rejected_by_lowering() -> None:
    good = one_forward_one_backward(2, 1)
    backward_first: tuple[Op, ...] = tuple(reversed(good.ops[0]))
    with pytest.raises(PlanError, match="wait for each other"):
        lower(Schedule(name="bad", num_micro_batches=1, num_stages=2, ops=(backward_first, good.ops[1])))


def test_order_of_execution_has_sends_before_their_receives() -> None:
    programs = programs_for("gpipe", 4, 3)
    seen: set[Op] = set()
    for rank, op in in_order(programs):
        assert programs.schedule.rank_of(op.stage) == rank
        assert op.kind not in RECEIVES or op in seen
        if op.kind in SENDS:
            seen.add(receive_of(op))
