"""Timelines as text, for people and for golden tests: a row for each pipeline rank, time from left to right in equal cells.

An op stands in its first cell as it prints everywhere (`2F0`: stage, kind, micro-batch), `-` goes on with it, `.` is idle.
With unit costs a schedule is the same thing as its grid: `parse_grid` reads it back.
"""

import re
from collections.abc import Iterator

from raytrain3d.errors import PlanError
from raytrain3d.plan.program import Programs
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.simulate import Span, Timeline, simulate

COLUMNS = 100
"""Longest line of a grid in text for people."""
COMPUTE = {Kind.RECEIVE_FORWARD: Kind.FORWARD, Kind.SEND_FORWARD: Kind.FORWARD,
           Kind.RECEIVE_BACKWARD: Kind.BACKWARD, Kind.SEND_BACKWARD: Kind.BACKWARD}
"""Kind of the op that a communication belongs to; a split backward has I instead of B."""
IDLE, MORE = ".", "-"


def unit_cost(op: Op) -> float:
    """Cells of an op: a forward, an input gradient and a weight gradient take one each."""
    return 2.0 if op.kind is Kind.BACKWARD else 1.0


def schedule_grid(programs: Programs) -> str:
    """The schedule under unit costs and free messages, a line for each rank."""
    return "\n".join(_lines(timeline_cells(simulate(programs, unit_cost), 1.0)))


def timeline_grid(timeline: Timeline, cell_s: float, *, columns: int = COLUMNS) -> str:
    """A timeline in cells of `cell_s` seconds, cut into blocks of lines no longer than `columns`."""
    cells = timeline_cells(timeline, cell_s)
    count = _cells_in(columns, cells)
    blocks = ([row[first:first + count] for row in cells] for first in range(0, len(cells[0]), count))
    return "\n\n".join("\n".join(_lines(block)) for block in blocks)


def program_grid(programs: Programs, rank: int, op: Op) -> str:
    """Where in its schedule a pipeline rank failed: the ops around `op` under unit costs, `op` marked as `>2F3<`.

    A send or receive is marked at the op that it belongs to.
    """
    timeline = simulate(programs, unit_cost)
    marked = next(span for span in timeline.spans[rank] if _belongs(op, span.op))
    cells, column = timeline_cells(timeline, 1.0), round(marked.start)
    count = _cells_in(COLUMNS, cells)
    first = max(0, min(column - count // 2, len(cells[0]) - count))
    return "\n".join(_lines([row[first:first + count] for row in cells], mark=(rank, column - first)))


def _belongs(op: Op, compute: Op) -> bool:
    kind = COMPUTE.get(op.kind, op.kind)
    kinds = (kind, Kind.BACKWARD_INPUT) if kind is Kind.BACKWARD else (kind,)
    return compute.kind in kinds and (compute.stage, compute.micro_batch) == (op.stage, op.micro_batch)


def timeline_cells(timeline: Timeline, cell_s: float) -> list[list[str]]:
    """Text of every cell by rank, rows of one length. An op has one cell at least, so short ones may push others right."""
    rows = [_row(spans, cell_s) for spans in timeline.spans]
    length = max(map(len, rows))
    return [row + [IDLE] * (length - len(row)) for row in rows]


def _row(spans: tuple[Span, ...], cell_s: float) -> list[str]:
    row: list[str] = []
    for span in spans:
        row += [IDLE] * (round(span.start / cell_s) - len(row))
        row.append(str(span.op))
        row += [MORE] * (round(span.end / cell_s) - len(row))
    return row


def _width(cells: list[list[str]]) -> int:
    return max((len(text) for row in cells for text in row), default=0)


def _label(rank: int, num_ranks: int) -> str:
    return f"rank {rank:>{len(str(num_ranks - 1))}}:"


def _cells_in(columns: int, cells: list[list[str]]) -> int:
    """How many cells fit into a line."""
    return max(1, (columns - len(_label(0, len(cells)))) // (_width(cells) + 1))


def _lines(cells: list[list[str]], mark: tuple[int, int] | None = None) -> Iterator[str]:
    """A line for each rank. mark: (rank, column) of the cell to mark."""
    width = _width(cells)
    for rank, row in enumerate(cells):
        borders = [" "] * (len(row) + 1)
        if mark is not None and mark[0] == rank:
            borders[mark[1]:mark[1] + 2] = "><"
        line = "".join(f"{border}{text:<{width}}" for border, text in zip(borders, [*row, ""], strict=True))
        yield (_label(rank, len(cells)) + line).rstrip()


def parse_op(text: str) -> Op:
    """The op that prints as `text`. PlanError if none does."""
    parts = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", text)
    if parts is None or parts[2] not in list(Kind):
        raise PlanError(f"{text!r} is no op: write stage, kind ({', '.join(Kind)}) and micro-batch, such as 2F0")
    return Op(Kind(parts[2]), int(parts[1]), int(parts[3]))


def parse_grid(text: str) -> tuple[tuple[Op, ...], ...]:
    """Ops by rank of a grid of one block or several. PlanError if a cell is none of a grid's."""
    ops: dict[int, list[Op]] = {}
    for line in filter(str.strip, text.splitlines()):
        label = re.match(r"\s*rank +(\d+):", line)
        if label is None:
            raise PlanError(f"{line!r} is no line of a grid: it must begin with 'rank N:'")
        cells = re.sub("[<>]", " ", line[label.end():]).split()
        ops.setdefault(int(label[1]), []).extend(parse_op(cell) for cell in cells if cell not in (IDLE, MORE))
    return tuple(tuple(ops[rank]) for rank in sorted(ops))
