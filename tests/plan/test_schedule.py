from itertools import product

import pytest

from raytrain3d.plan.program import lower
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op, gpipe, one_forward_one_backward
from raytrain3d.plan.simulate import simulate

SIZES = list(product((1, 2, 3, 4, 8), (0, 1, 2, 3, 4, 7, 16)))


def grid(ops: tuple[tuple[Op, ...], ...]) -> list[str]:
    return [" ".join(f"{op.kind}{op.micro_batch}" for op in rank) for rank in ops]


def test_op_prints_as_stage_kind_micro_batch() -> None:
    assert str(Op(Kind.FORWARD, 2, 0)) == "2F0"
    assert str(Op(Kind.RECEIVE_BACKWARD, 1, 13)) == "1RB13"


def test_gpipe_grid() -> None:
    assert grid(gpipe(2, 3).ops) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_one_forward_one_backward_grid() -> None:
    assert grid(one_forward_one_backward(4, 6).ops) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_fewer_micro_batches_than_stages() -> None:
    assert grid(one_forward_one_backward(4, 2).ops) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_stage_does_every_micro_batch_once_forward_first(name: str, ranks: int, micro_batches: int) -> None:
    schedule = SCHEDULES[name](ranks, micro_batches)
    assert schedule.name == name
    assert schedule.num_ranks == schedule.num_stages == ranks
    for rank, ops in enumerate(schedule.ops):
        assert len(ops) == len(set(ops)) == 2 * micro_batches
        for i in range(micro_batches):
            assert ops.index(Op(Kind.FORWARD, rank, i)) < ops.index(Op(Kind.BACKWARD, rank, i))


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_peak_of_activations_in_flight(ranks: int, micro_batches: int) -> None:
    """1F1B: min(p - i, m) on rank i; GPipe: m."""
    def peak(name: str) -> tuple[int, ...]:
        return simulate(lower(SCHEDULES[name](ranks, micro_batches)), lambda op: 1.0).peak_in_flight

    assert peak("1f1b") == tuple(min(ranks - rank, micro_batches) for rank in range(ranks))
    assert peak("gpipe") == (micro_batches,) * ranks
    assert peak("forward") == (0,) * ranks
