import re
from dataclasses import replace
from itertools import product

import pytest
from schedules import NAMED

from raytrain3d.errors import PlanError
from raytrain3d.plan.program import RECEIVES, SENDS, Channel, Programs, in_order, lower, programs_for, prove, receive_of
from raytrain3d.plan.schedule import Kind, Op, Schedule, one_forward_one_backward


def swapped(programs: Programs, rank: int, first: str, second: str) -> Programs:
    """`programs` with two ops of one rank exchanged, given as they print."""
    ops = list(programs.ops[rank])
    i, j = ([str(op) for op in ops].index(text) for text in (first, second))
    ops[i], ops[j] = ops[j], ops[i]
    return replace(programs, ops=(*programs.ops[:rank], tuple(ops), *programs.ops[rank + 1 :]))


def without(programs: Programs, rank: int, gone: str) -> Programs:
    ops = tuple(op for op in programs.ops[rank] if str(op) != gone)
    return replace(programs, ops=(*programs.ops[:rank], ops, *programs.ops[rank + 1 :]))


def test_lowered_text() -> None:
    assert lower(one_forward_one_backward(2, 2)).text() == (
        "rank 0: 0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1\n"
        "rank 1: 1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1")
    assert lower(one_forward_one_backward(3, 1)).text() == (
        "rank 0: 0F0 0SF0 0RB0 0B0\n"
        "rank 1: 1RF0 1F0 1SF0 1RB0 1B0 1SB0\n"
        "rank 2: 2RF0 2F0 2B0 2SB0")


def test_input_gradients_leave_before_weight_gradients() -> None:
    assert programs_for("zb_h1", 2, 2).text() == (
        "rank 0: 0F0 0SF0 0F1 0SF1 0RB0 0I0 0W0 0RB1 0I1 0W1\n"
        "rank 1: 1RF0 1F0 1I0 1SB0 1RF1 1F1 1I1 1SB1 1W0 1W1")


def test_the_tip_of_a_v_sends_nothing() -> None:
    """Stages 1 and 2 are on rank 1."""
    assert programs_for("zb_v", 2, 1, 2).text() == (
        "rank 0: 0F0 0SF0 3RF0 3F0 3I0 3SB0 3W0 0RB0 0I0 0W0\n"
        "rank 1: 1RF0 1F0 2F0 2SF0 2RB0 2I0 2W0 1I0 1SB0 1W0")


def test_one_channel_carries_several_stages() -> None:
    """Two ranks with two chunks: stages 0 and 2 send activations over the same channel."""
    assert programs_for("interleaved", 2, 2, 2).text() == (
        "rank 0: 0F0 0SF0 0F1 0SF1 2RF0 2F0 2SF0 2RF1 2F1 2SF1 2RB0 2B0 2SB0 2RB1 2B1 2SB1 0RB0 0B0 0RB1 0B1\n"
        "rank 1: 1RF0 1F0 1SF0 1RF1 1F1 1SF1 3RF0 3F0 3B0 3SB0 3RF1 3F1 3B1 3SB1 1RB0 1B0 1SB0 1RB1 1B1 1SB1")


def test_what_was_sent_first_is_received_first_even_if_it_is_needed_later() -> None:
    """Rank 1 begins with its stage 3, for which it must take the message for stage 1 out of the channel."""
    programs = lower(schedule_of((0, 1, 0, 1), "0F1 2F1 0F0 2F0", "1F1 3F1 1F0 3F0"))
    assert programs.text() == ("rank 0: 0F1 0SF1 2RF1 2F1 2SF1 0F0 0SF0 2RF0 2F0 2SF0\n"
                               "rank 1: 1RF1 1F1 1SF1 3RF1 3F1 1RF0 1F0 1SF0 3RF0 3F0")
    programs = lower(schedule_of((0, 1), "0F0 0F1", "1F1 1F0"))
    assert programs.text() == "rank 0: 0F0 0SF0 0F1 0SF1\nrank 1: 1RF0 1RF1 1F1 1F0"


def schedule_of(placement: tuple[int, ...], *ranks: str) -> Schedule:
    """Ops by rank as they print."""
    def op(text: str) -> Op:
        parts = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", text)
        assert parts is not None
        return Op(Kind(parts[2]), int(parts[1]), int(parts[3]))

    ops = tuple(tuple(map(op, rank.split())) for rank in ranks)
    return Schedule(name="drawn", num_micro_batches=2, placement=placement, ops=ops)


def test_one_rank_sends_nothing() -> None:
    assert lower(one_forward_one_backward(1, 2)).text() == "rank 0: 0F0 0B0 0F1 0B1"
    assert programs_for("zb_v", 1, 1, 2).text() == "rank 0: 0F0 1F0 1I0 1W0 0I0 0W0"


@pytest.mark.parametrize(("name", "chunks"), NAMED)
@pytest.mark.parametrize("training", [True, False])
def test_every_message_is_sent_and_received_once(name: str, chunks: int, training: bool) -> None:
    for ranks, micro_batches in product((1, 2, 3, 4, 7), (0, 1, 2, 5, 16)):
        programs = programs_for(name, ranks, micro_batches, chunks, training=training)
        every = [op for ops in programs.ops for op in ops]
        assert len(set(every)) == len(every)
        assert {receive_of(op) for op in every if op.kind in SENDS} == {op for op in every if op.kind in RECEIVES}
        borders = ranks * chunks - 1 - (name == "zb_v") if ranks > 1 else 0
        assert sum(op.kind in SENDS for op in every) == (1 + training) * borders * micro_batches
        compute = tuple(tuple(op for op in ops if programs.channel(op) is None) for ops in programs.ops)
        assert compute == programs.schedule.ops
        assert training or all(op.kind is Kind.FORWARD for ops in compute for op in ops)


def test_channels_name_both_ends() -> None:
    programs = programs_for("zb_v", 3, 4, 2)
    down, up = Channel(sender=1, receiver=2, forward=True), Channel(sender=2, receiver=1, forward=True)
    back = Channel(sender=2, receiver=1, forward=False)
    assert [str(channel) for channel in (down, up, back)] == ["1->2 activations", "2->1 activations", "2->1 gradients"]
    assert programs.channel(Op(Kind.SEND_FORWARD, 1, 0)) == programs.channel(Op(Kind.RECEIVE_FORWARD, 2, 0)) == down
    assert programs.channel(Op(Kind.SEND_FORWARD, 3, 0)) == programs.channel(Op(Kind.RECEIVE_FORWARD, 4, 0)) == up
    assert programs.channel(Op(Kind.SEND_BACKWARD, 2, 0)) == programs.channel(Op(Kind.RECEIVE_BACKWARD, 1, 0)) == back
    assert programs.channel(Op(Kind.FORWARD, 1, 0)) is None


def test_a_swapped_receive_is_rejected_naming_both_ops() -> None:
    programs = swapped(lower(one_forward_one_backward(3, 4)), 1, "1RF0", "1RF1")
    with pytest.raises(PlanError, match=r"channel 0->1 activations: message 0 is sent by 0SF0 but received by 1RF1"):
        prove(programs)


def test_receives_of_two_stages_on_one_channel_are_not_to_be_swapped() -> None:
    programs = swapped(programs_for("interleaved", 2, 2, 2), 1, "1RF1", "3RF0")
    with pytest.raises(PlanError, match=r"channel 0->1 activations: message 1 is sent by 0SF1 but received by 3RF0"):
        prove(programs)


def test_a_missing_receive_or_send_is_rejected() -> None:
    programs = lower(one_forward_one_backward(2, 2))
    with pytest.raises(PlanError, match="message 1 is sent by 0SF1 but received by no op"):
        prove(without(programs, 1, "1RF1"))
    with pytest.raises(PlanError, match="message 1 is sent by no op but received by 1RF1"):
        prove(without(programs, 0, "0SF1"))


def test_a_cycle_is_rejected_naming_both_ops() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends the activations that the gradient comes from."""
    programs = swapped(lower(one_forward_one_backward(2, 1)), 0, "0SF0", "0RB0")
    with pytest.raises(PlanError, match=r"the programs cannot run: rank 0 at 0RB0 waits for rank 1's 1SB0, "
                                        r"rank 1 at 1RF0 waits for rank 0's 0SF0$"):
        prove(programs)


def test_of_many_ranks_that_wait_the_ring_is_named() -> None:
    """Rank 0 waits for rank 1, which is in a ring with rank 2."""
    programs = swapped(lower(one_forward_one_backward(3, 1)), 1, "1SF0", "1RB0")
    with pytest.raises(PlanError, match=r"cannot run: rank 1 at 1RB0 waits for rank 2's 2SB0, "
                                        r"rank 2 at 2RF0 waits for rank 1's 1SF0$"):
        prove(programs)


def test_an_op_before_its_input_is_rejected() -> None:
    programs = lower(one_forward_one_backward(2, 2))
    with pytest.raises(PlanError, match="rank 1 at 1F0 waits for its own later 1RF0"):
        prove(swapped(programs, 1, "1RF0", "1F0"))
    with pytest.raises(PlanError, match="rank 0 at 0SF0 waits for its own later 0F0"):
        prove(swapped(programs, 0, "0F0", "0SF0"))
    with pytest.raises(PlanError, match="rank 1 at 1SB0 waits for its own later 1B0"):
        prove(swapped(programs, 1, "1B0", "1SB0"))
    with pytest.raises(PlanError, match="rank 0 at 0W0 waits for its own later 0I0"):
        prove(swapped(programs_for("zb_h1", 2, 2), 0, "0W0", "0I0"))
    with pytest.raises(PlanError, match="rank 1 at 1I0 waits for its own later 2I0"):
        prove(swapped(programs_for("zb_v", 2, 1, 2), 1, "1I0", "2I0"))
    with pytest.raises(PlanError, match="rank 1 at 2F0 waits for 1F0, which nobody runs"):
        prove(without(programs_for("zb_v", 2, 1, 2), 1, "1F0"))


@pytest.mark.parametrize(("placement", "ranks", "message"), [
    ((0, 1), ("0B0 0F0", "1F0 1B0"), "rank 0 at 0RB0 waits for rank 1's 1SB0, rank 1 at 1RF0 waits for rank 0's 0SF0"),
    ((0, 1), ("0F0 0B0", "1B0 1F0"), "rank 1 at 1B0 waits for its own later 1F0"),
    ((0, 1), ("", "1F0"), "rank 1 at 1F0 waits for 1RF0, which nobody runs"),
    ((0, 1, 0, 1), ("0F0 2F1 2F0 0F1", "1F0 1F1 3F0 3F1"),
     "rank 0 at 2RF1 waits for rank 1's 1SF1, rank 1 at 3RF1 waits for rank 0's 2SF1"),
])
def test_a_schedule_that_cannot_run_is_rejected_by_lowering(placement: tuple[int, ...], ranks: tuple[str, ...],
                                                            message: str) -> None:
    with pytest.raises(PlanError, match=f"the programs cannot run: {message}$"):
        lower(schedule_of(placement, *ranks))


@pytest.mark.parametrize(("name", "chunks"), NAMED)
def test_order_of_execution_has_sends_before_their_receives(name: str, chunks: int) -> None:
    programs = programs_for(name, 4, 3, chunks)
    seen: set[Op] = set()
    for rank, op in in_order(programs):
        assert programs.schedule.rank_of(op.stage) == rank
        assert op.kind not in RECEIVES or op in seen
        if op.kind in SENDS:
            seen.add(receive_of(op))
