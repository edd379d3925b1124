"""Schedules op for op against the tables of torch.distributed.pipelining (not its 1F1B table, which has a fault).

A table comes from the method that makes it, called on a stand-in for the schedule object: no process group, no stages.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from raytrain3d.plan.schedule import SCHEDULES, Kind, Op, Schedule

Table = list[list[str]]


def table(rows: list[list[Any]]) -> Table:
    """Compute ops of torch's rows by rank. None is an idle slot; torch writes stage, kind, micro-batch as we do."""
    kinds = {"F", "B", "I", "W"}
    return [[str(action) for action in row if action is not None and action.computation_type.value in kinds] for row in rows]


def table_of(schedule: Schedule) -> Table:
    return [[str(op) for op in ops] for ops in schedule.ops]


def rows_by_rank(torch_class: Any, ranks: int, **fields: Any) -> Table:
    stand_in = SimpleNamespace(pp_group_size=ranks, **fields)
    return table([torch_class._calculate_single_rank_operations(stand_in, rank) for rank in range(ranks)])


def torch_gpipe(p: int, m: int) -> Table:
    rows = torch_schedules.ScheduleGPipe._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    return table([rows[rank] for rank in range(p)])


def torch_interleaved(p: int, m: int, chunks: int) -> Table:
    rounds = max(1, m // p)
    return rows_by_rank(torch_schedules.ScheduleInterleaved1F1B, p, n_local_stages=chunks, _n_microbatches=m,
                        microbatches_per_round=m // rounds)


def torch_breadth_first(p: int, m: int, chunks: int) -> Table:
    return rows_by_rank(torch_schedules.ScheduleLoopedBFS, p, _stages=[None] * chunks, _n_microbatches=m)


def torch_zero_bubble_v(p: int, m: int) -> Table:
    return rows_by_rank(torch_schedules.ScheduleZBVZeroBubble, p, num_stages=2 * p, _n_microbatches=m)


@pytest.mark.parametrize("p", range(1, 9))
def test_gpipe(p: int) -> None:
    for m in range(1, 3 * p + 1):
        assert table_of(SCHEDULES["gpipe"](p, m, 1)) == torch_gpipe(p, m)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved(p: int, chunks: int) -> None:
    """Every m that torch takes: fewer than p, and all that cut into m // p equal groups, multiples of p among them."""
    sizes = [m for m in range(1, 4 * p + 1) if m % max(1, m // p) == 0]
    assert {p, 2 * p, 3 * p, 4 * p} <= set(sizes)
    for m in sizes:
        assert table_of(SCHEDULES["interleaved"](p, m, chunks)) == torch_interleaved(p, m, chunks)


@pytest.mark.parametrize("p", range(1, 9))
def test_zero_bubble_v(p: int) -> None:
    """Fewer than 2p - 1 micro-batches included."""
    for m in range(1, 4 * p + 1):
        assert table_of(SCHEDULES["zb_v"](p, m, 2)) == torch_zero_bubble_v(p, m)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_breadth_first_but_for_the_order_of_backwards(p: int, chunks: int) -> None:
    """torch takes the micro-batches of a chunk's backwards last to first; here gradients always add up first to last."""
    def renamed(op: Op, m: int) -> str:
        return str(Op(op.kind, op.stage, m - 1 - op.micro_batch) if op.kind is Kind.BACKWARD else op)

    for m in range(1, 2 * p + 2):
        ours = [[renamed(op, m) for op in ops] for ops in SCHEDULES["breadth_first"](p, m, chunks).ops]
        assert ours == torch_breadth_first(p, m, chunks)
