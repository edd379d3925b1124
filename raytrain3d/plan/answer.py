"""An answer to a question about a job: a sentence or two and a table, as text and as JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain3d.plan.table import aligned

COLUMNS = 100
"""Longest line of a text."""
Value = str | float | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """Of a table."""

    key: str
    """For programs; unit included."""
    head: str
    """For people."""
    form: str = ""
    """How a number is written: `.1%`, `,.0f`."""

    def text(self, value: Value) -> str:
        match value:
            case None:
                return "-"
            case bool():
                return "yes" if value else "no"
            case str():
                return value
        return format(value, self.form)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Computed for one job on one kind of node."""

    key: str
    """For programs."""
    question: str
    text: str
    """What the table says."""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]


def answers_text(answers: Sequence[Answer]) -> str:
    """For people."""
    return "\n\n".join(map(_text, answers))


def answers_json(answers: Sequence[Answer]) -> str:
    """For programs: by key, a row is an object."""
    return json.dumps({answer.key: {
        "question": answer.question, "answer": answer.text,
        "rows": [{column.key: value for column, value in zip(answer.columns, row, strict=True)} for row in answer.rows],
    } for answer in answers}, indent=2)


def _text(answer: Answer) -> str:
    heads = [column.head for column in answer.columns]
    cells = [[column.text(value) for column, value in zip(answer.columns, row, strict=True)] for row in answer.rows]
    names = [i for i, value in enumerate(answer.rows[0]) if isinstance(value, str)]
    return "\n".join([answer.question, *textwrap.wrap(answer.text, COLUMNS), "", *aligned([heads, *cells], names)])
