"""What a rank knows about its program before it runs: arrivals by channel, and which sends have surely arrived."""

import itertools
from collections import defaultdict

import pytest

from raytrain3d.plan.program import RECEIVES, SENDS, STEP, Channel, programs_for, receive_of
from raytrain3d.plan.rank_program import channels_of, rank_program, rank_program_for
from raytrain3d.plan.schedule import SCHEDULES, Op

CHUNKS = {"interleaved": 3, "breadth_first": 2, "zb_v": 2}


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), list(itertools.product(SCHEDULES, (2, 3, 4), (1, 4, 9))))
def test_a_send_counts_as_delivered_only_after_the_other_rank_took_it(name: str, ranks: int, micro_batches: int) -> None:
    programs = programs_for(name, ranks, micro_batches, CHUNKS.get(name, 1))
    for rank in range(ranks):
        program = rank_program(programs, rank)
        seen: set[object] = set()
        for receive, sends in program.delivered.items():
            for send in sends:
                assert send not in seen
                seen.add(send)
                assert program.ops.index(send) < program.ops.index(receive)
                channel = programs.channel(send)
                assert channel is not None
                theirs = programs.ops[channel.receiver]
                answer = next(op for op in theirs if op.kind in SENDS and receive_of(op) == receive)
                assert theirs.index(receive_of(send)) < theirs.index(answer)
        if name == "1f1b" and rank < ranks - 1:
            forwards = [op for op in program.ops if str(op.kind) == "SF"]
            assert seen.issuperset(forwards), "every activation is answered by its gradient"


@pytest.mark.parametrize("name", SCHEDULES)
def test_arrivals_are_the_receives_of_each_channel_in_order(name: str) -> None:
    programs = programs_for(name, 3, 5, CHUNKS.get(name, 1))
    for rank in range(3):
        program = rank_program(programs, rank)
        receives = [op for op in program.ops if op.kind in RECEIVES]
        assert sorted(map(str, receives)) == sorted(str(op) for ops in program.arrivals.values() for op in ops)
        for channel, ops in program.arrivals.items():
            assert list(ops) == [op for op in receives if program.channels[op] == channel]
            assert channel.receiver == rank


@pytest.mark.parametrize(("name", "present"), list(itertools.product(SCHEDULES, (0, 1, 3, 5))))
def test_without_some_micro_batches_all_compute_stays_and_messages_still_match(name: str, present: int) -> None:
    """A replica with fewer micro-batches runs the ops of the largest share, and sends what it has, in order."""
    whole = programs_for(name, 3, 5, CHUNKS.get(name, 1))
    programs = [rank_program_for(name, 3, 5, CHUNKS.get(name, 1), rank, present=present) for rank in range(3)]
    sent: dict[Channel, list[Op]] = defaultdict(list)
    for program, ops in zip(programs, whole.ops, strict=True):
        assert [op for op in program.ops if op.kind not in STEP] == [op for op in ops if op.kind not in STEP]
        assert all(op.micro_batch < present for op in program.channels)
        for op, channel in program.channels.items():
            if op.kind in SENDS:
                sent[channel].append(receive_of(op))
    assert sent == {channel: list(ops) for program in programs for channel, ops in program.arrivals.items()}
    assert bool(sent) == (present > 0)


def test_channels_join_neighbouring_stages_on_different_ranks() -> None:
    assert [str(channel) for channel in channels_of((0, 1, 1, 0))] == [
        "0->1 activations", "1->0 gradients", "1->0 activations", "0->1 gradients"]
    assert len(channels_of((0, 1, 2, 0, 1, 2))) == 6
    assert channels_of((0,)) == ()
