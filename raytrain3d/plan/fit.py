"""Fits constants to measurements: least squares in logarithms that few wild values cannot bend.

Constants are positive and are moved by factors. Each is drawn a little to where it starts, so that one that the
measurements say nothing about stays there. Levenberg-Marquardt with weights 1 / (1 + (r / s)^2) (Cauchy's loss).
"""

from collections.abc import Callable, Sequence
from math import exp, log, log1p

SCALE = 0.05
"""Relative error from which a measurement counts less and less."""
PRIOR = 0.01
"""Weight of staying at the start, against that of one measurement."""
LONGEST = 0.7
"""Largest change of a logarithm in one iteration."""
DIFFERENCE = 1e-4
ITERATIONS = 25
ENOUGH = 1e-4
"""Share of the loss below which a gain ends the search."""

Predict = Callable[[Sequence[float]], Sequence[float]]
Vector = list[float]


def fit(start: Sequence[float], predict: Predict, measured: Sequence[float]) -> list[float]:
    """Constants (above 0) for which `predict` comes close to `measured` (above 0, too), one value each."""
    target = [log(value) for value in measured]
    origin = [log(value) for value in start]

    def errors(at: Vector) -> Vector:
        return [log(value) - wanted for value, wanted in zip(predict([exp(x) for x in at]), target, strict=True)]

    def loss(at: Vector, found: Vector) -> float:
        away = sum((x - x0) ** 2 for x, x0 in zip(at, origin, strict=True))
        return SCALE**2 * sum(log1p((error / SCALE) ** 2) for error in found) + PRIOR * SCALE**2 * away

    at, damping = list(origin), 1e-2
    found = errors(at)
    now = loss(at, found)
    for _ in range(ITERATIONS):
        normal, gradient = _normal_equations(at, found, errors, origin)
        for _ in range(6):
            damped = [[value + (damping * value if i == j else 0.0) for j, value in enumerate(row)]
                      for i, row in enumerate(normal)]
            step = [max(-LONGEST, min(LONGEST, -change)) for change in solve(damped, gradient)]
            tried = [x + change for x, change in zip(at, step, strict=True)]
            new = errors(tried)
            if (after := loss(tried, new)) < now:
                break
            damping *= 4
        else:
            break
        gain, at, found, now, damping = now - after, tried, new, after, max(damping / 3, 1e-6)
        if gain < ENOUGH * now:
            break
    return [exp(x) for x in at]


def _normal_equations(at: Vector, found: Vector, errors: Callable[[Vector], Vector],
                      origin: Vector) -> tuple[list[Vector], Vector]:
    """Weighted by what each error counts at present."""
    weights = [1 / (1 + (error / SCALE) ** 2) for error in found]
    columns = []
    for i in range(len(at)):
        moved = errors([x + (DIFFERENCE if i == j else 0.0) for j, x in enumerate(at)])
        columns.append([(new - old) / DIFFERENCE for new, old in zip(moved, found, strict=True)])
    weighted = [[w * value for w, value in zip(weights, column, strict=True)] for column in columns]
    normal = [[_dot(row, column) + (PRIOR if i == j else 0.0) for j, column in enumerate(columns)]
              for i, row in enumerate(weighted)]
    gradient = [_dot(row, found) + PRIOR * (x - x0) for row, x, x0 in zip(weighted, at, origin, strict=True)]
    return normal, gradient


def _dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The solution of a system of linear equations, by elimination with row pivots. The matrix must not be singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for row in rows[i + 1:]:
            factor = row[i] / rows[i][i]
            for j in range(i, size + 1):
                row[j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
