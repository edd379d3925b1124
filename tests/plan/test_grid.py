import re
from itertools import product

import pytest

from raytrain3d.errors import PlanError
from raytrain3d.plan.grid import COLUMNS, parse_grid, parse_op, program_grid, schedule_grid, timeline_grid
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op
from raytrain3d.plan.simulate import Span, Timeline, simulate

GRID = """\
rank 0: 0F0 0F1 .   .   0B0 -   0F2 0B1 -   .   0B2 -
rank 1: .   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -   .   ."""
GOLDEN = [("1f1b", 2, 3, GRID), ("gpipe", 2, 2, """\
rank 0: 0F0 0F1 .   .   .   0B0 -   0B1 -
rank 1: .   1F0 1F1 1B0 -   1B1 -   .   .""")]


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "grid"), GOLDEN)
def test_grid_is_written_and_read(name: str, ranks: int, micro_batches: int, grid: str) -> None:
    programs = programs_for(name, ranks, micro_batches)
    assert schedule_grid(programs) == grid
    assert parse_grid(grid) == programs.schedule.ops


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), list(product(SCHEDULES, (1, 2, 4, 11), (1, 5, 12))))
def test_every_grid_reads_back(name: str, ranks: int, micro_batches: int) -> None:
    """In blocks too, and with cells that are shorter or longer than an op."""
    programs = programs_for(name, ranks, micro_batches, 2 if name in ("interleaved", "breadth_first", "zb_v") else 1)
    assert parse_grid(schedule_grid(programs)) == programs.schedule.ops
    timeline = simulate(programs, lambda op: 0.3 + op.stage % 3)
    for cell_s, columns in ((1.0, 100), (7.0, 60), (0.31, 40)):
        grid = timeline_grid(timeline, cell_s, columns=columns)
        assert max(map(len, grid.splitlines())) <= columns
        assert parse_grid(grid) == programs.schedule.ops


def test_cells_are_equal_times() -> None:
    spans = (Span(op=Op(Kind.FORWARD, 0, 10), start=0.0, end=3.0), Span(op=Op(Kind.BACKWARD, 0, 10), start=5.0, end=5.2))
    timeline = Timeline(spans=(spans, ()), critical_path=(), peak_in_flight=(1, 0))
    assert timeline_grid(timeline, 1.0).splitlines() == ["rank 0: 0F10 -    -    .    .    0B10",
                                                         "rank 1: .    .    .    .    .    ."]


@pytest.mark.parametrize(("op", "marked"), [
    ("1F1", ">1F1<"), ("1B1", ">1B1<"), ("1RF1", ">1F1<"), ("1SB2", ">1B2<")])
def test_op_that_failed_is_marked(op: str, marked: str) -> None:
    """A communication at the compute op that it belongs to."""
    grid = program_grid(programs_for("1f1b", 2, 3), 1, parse_op(op))
    assert grid.splitlines()[1].count(marked) == 1
    assert grid.count(">") == grid.count("<") == 1
    assert re.sub("[<>]", " ", grid) == GRID


@pytest.mark.parametrize(("rank", "op"), [(0, "0F0"), (2, "2B30"), (2, "2F59"), (0, "0B59")])
def test_only_the_neighbourhood_of_the_failed_op_is_shown(rank: int, op: str) -> None:
    grid = program_grid(programs_for("1f1b", 4, 60), rank, parse_op(op))
    lines = grid.splitlines()
    assert COLUMNS - 25 < max(map(len, lines)) <= COLUMNS
    assert f">{op}" in lines[rank]
    assert len(lines) == 4


def test_op_of_an_evaluation_is_marked() -> None:
    assert ">1F0<" in program_grid(programs_for("1f1b", 2, 3, training=False), 1, parse_op("1RF0"))


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0FF1", "-1F0", "0f0"])
def test_text_that_is_no_op(text: str) -> None:
    with pytest.raises(PlanError, match=r"is no op: write stage, kind \(F, B, I, W, .* and micro-batch, such as 2F0"):
        parse_op(text)


@pytest.mark.parametrize("kind", Kind)
def test_op_reads_as_it_prints(kind: Kind) -> None:
    assert parse_op(str(Op(kind, 12, 345))) == Op(kind, 12, 345)


def test_text_that_is_no_grid() -> None:
    with pytest.raises(PlanError, match="must begin with 'rank N:'"):
        parse_grid("0F0 0F1")
    with pytest.raises(PlanError, match="'idle' is no op"):
        parse_grid("rank 0: 0F0 idle")
