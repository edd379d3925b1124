"""From one split to another by the smallest steps there are: one layer across one stage boundary."""

from dataclasses import dataclass

from raytrain3d.plan.partition import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """One layer that goes to the next or the previous stage."""

    layer: int
    source: int
    """Stage that gives it."""
    target: int
    """Stage that takes it: source + 1 or source - 1."""

    @property
    def boundary(self) -> int:
        """The boundary it crosses: i lies between stages i and i + 1."""
        return min(self.source, self.target)


def num_moves(current: Stages, target: Stages) -> int:
    """Fewest shifts from one to the other: how far each boundary has to go."""
    return sum(abs(end - wanted) for (_, end), (_, wanted) in zip(current, target, strict=True))


def moves(current: Stages, target: Stages) -> tuple[Shift, ...]:
    """`num_moves` shifts from `current` to `target`, of splits of the same layers over the same number of stages.

    Every stage keeps at least one layer all along, and wherever that leaves a choice it holds no more than before or
    after.
    """
    ends, wanted = [end for _, end in current], [end for _, end in target]
    most = [max(end - first, last - start) for (first, end), (start, last) in zip(current, target, strict=True)]
    shifts = []
    while ends != wanted:
        shift = min(_possible(ends, wanted), key=lambda shift: _excess(ends, most, shift))
        ends[shift.boundary] += 1 if shift.target < shift.source else -1
        shifts.append(shift)
    return tuple(shifts)


def _possible(ends: list[int], wanted: list[int]) -> list[Shift]:
    """Shifts toward `wanted` that leave their source a layer. One is there always: of boundaries that go the same way
    side by side, the foremost is held up by nothing."""
    sizes = _sizes(ends)
    found = []
    for i, (end, goal) in enumerate(zip(ends, wanted, strict=True)):
        if end < goal and sizes[i + 1] > 1:
            found.append(Shift(layer=end, source=i + 1, target=i))
        elif end > goal and sizes[i] > 1:
            found.append(Shift(layer=end - 1, source=i, target=i + 1))
    return found


def _excess(ends: list[int], most: list[int], shift: Shift) -> int:
    """Layers by which the taking stage exceeds what it may hold."""
    return max(_sizes(ends)[shift.target] + 1 - most[shift.target], 0)


def _sizes(ends: list[int]) -> list[int]:
    return [end - first for first, end in zip([0, *ends], ends, strict=False)]


def after(stages: Stages, shift: Shift) -> Stages:
    """The split that `shift` leads to."""
    ends = [end for _, end in stages]
    ends[shift.boundary] += 1 if shift.target < shift.source else -1
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
