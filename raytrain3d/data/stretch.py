"""Which source gives the n-th sample of a phase, as a pure function of n: no prefix is a whole sample off for any source.

Let I(s, n) be the ideal number of samples of source s among the first n (`ideal.py`). Sample k + 1 of s may come at place
n when I(s, n + 1) > k, and must have come when I(s, n) >= k + 1; then |count - I| < 1 everywhere. That is scheduling unit
jobs with releases and deadlines on one machine, where earliest deadline first finds a schedule whenever there is one, and
there is one since the ideals add up to n (Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", 1996).

Such a schedule depends on all that came before. To start anywhere, the phase is cut into blocks longer than the time
between release and deadline of any sample. Which sources are ahead of their ideal at a border is found by earliest deadline
first over the block before it, begun with those ahead whose next deadlines are earliest. From such a border any schedule
can go on, and such a border can be come to from any one a block before: Hall's condition holds for all intervals, since
each touches one border or none. So every block is scheduled between its two borders alone.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, lcm

from raytrain3d.data.ideal import Segment

SHORTEST_BLOCK = 256
NEVER = 1 << 100
"""Later than any sample."""

Counts = tuple[int, ...]
"""Samples by source."""


@dataclass(frozen=True, slots=True)
class Line:
    """Samples of the phase until a source shall have given `amount`: (factor * amount + offset) / divisor. Whole numbers are
    many times as fast as fractions."""

    factor: int
    offset: int
    divisor: int

    def rounded_down(self, amount: int) -> int:
        return (self.factor * amount + self.offset) // self.divisor

    def rounded_up(self, amount: int) -> int:
        return -((self.factor * amount + self.offset) // -self.divisor)


def _line(segment: Segment, source: int) -> Line | None:
    """None where the source gives nothing."""
    share = segment.shares[source]
    if not share:
        return None
    slope, start = 1 / share, segment.start - segment.amounts[source] / share
    divisor = lcm(slope.denominator, start.denominator)
    return Line(int(slope * divisor), int(start * divisor), divisor)


@dataclass(frozen=True, slots=True)
class Block:
    """The order of the sources' samples in a block."""

    sources: bytearray
    numbers: "array[int]"
    """Of each sample among those of its source in the phase."""


class Stretch:
    """Order of the sources' samples in a phase. Places and counts are those of the phase."""

    def __init__(self, ideal: Sequence[Segment]) -> None:
        self._segments, self._starts = ideal, [segment.start for segment in ideal]
        self._sources = range(len(ideal[0].shares))
        self._amounts = [[segment.amounts[source] for segment in ideal] for source in self._sources]
        self._lines = [[_line(segment, source) for segment in ideal] for source in self._sources]
        self.block_size = max(SHORTEST_BLOCK, longest_gap(ideal[0]) + 2)
        self._block = lru_cache(maxsize=4)(self._schedule)
        self._border = lru_cache(maxsize=4)(self._counts_at)

    def __call__(self, place: int) -> tuple[int, int]:
        """(source, number of the sample among those of this source, from 0) at a place, from 0."""
        number, offset = divmod(place, self.block_size)
        block = self._block(number)
        return block.sources[offset], block.numbers[offset]

    def counts(self, places: int) -> Counts:
        """Samples of each source among the first `places`."""
        number, rest = divmod(places, self.block_size)
        sources = self._block(number).sources if rest else bytearray()
        return tuple(count + sources.count(source, 0, rest) for source, count in enumerate(self._border(number)))

    def ideal(self, source: int, at: int) -> Fraction:
        """Samples that a source should have among the first `at`."""
        return self._segments[bisect_right(self._starts, at) - 1].amount(source, at)

    def _schedule(self, number: int) -> Block:
        return self._run(number * self.block_size, self._border(number), self._border(number + 1))

    def _counts_at(self, number: int) -> Counts:
        """At the beginning of a block."""
        if number == 0:
            return tuple(0 for _ in self._sources)
        start = (number - 1) * self.block_size
        counts = self._with_earliest_deadlines(start)
        ordered = self._run(start, counts, None).sources
        return tuple(count + ordered.count(source) for source, count in enumerate(counts))

    def _with_earliest_deadlines(self, at: int) -> Counts:
        """Ideals rounded down, but up for as many as it takes: those whose next sample is due first."""
        counts = [floor(self.ideal(source, at)) for source in self._sources]
        between = [source for source in self._sources if self.ideal(source, at) != counts[source]]
        between.sort(key=lambda source: (self._deadline(source, counts[source]), source))
        for source in between[:at - sum(counts)]:
            counts[source] += 1
        return tuple(counts)

    def _run(self, start: int, counts: Counts, until: Counts | None) -> Block:
        """A block by earliest deadline first. until: counts at its end. Absent: what earliest deadlines give."""
        end, done = start + self.block_size, list(counts)
        if len(done) == 1:  # the usual case, for which the search would take as long as reading the samples
            return Block(bytearray(self.block_size), array("q", range(start, end)))

        def window(source: int) -> tuple[int, int]:
            """First place of the source's next sample, and its deadline."""
            if until is None:
                return self._release(source, done[source]), self._deadline(source, done[source])
            if done[source] == until[source]:
                return NEVER, NEVER
            return self._release(source, done[source]), min(self._deadline(source, done[source]), end)

        windows = [window(source) for source in self._sources]
        block = Block(bytearray(), array("q"))
        for place in range(start, end):
            _, source = min([(due, each) for each, (release, due) in enumerate(windows) if release <= place])
            block.sources.append(source)
            block.numbers.append(done[source])
            done[source] += 1
            windows[source] = window(source)
        return block

    def _release(self, source: int, done: int) -> int:
        """First place where the source may give one more than `done` samples."""
        line = self._lines[source][bisect_right(self._amounts[source], done) - 1]
        return NEVER if line is None else line.rounded_down(done)

    def _deadline(self, source: int, done: int) -> int:
        """Number of samples of the phase by which the source must have given one more than `done`."""
        line = self._lines[source][bisect_left(self._amounts[source], done + 1) - 1]
        return NEVER if line is None else line.rounded_up(done + 1)


def longest_gap(segment: Segment) -> int:
    """Most samples from one of a source to its next in the ideal, rounded up; it only gets shorter in later segments."""
    return max((ceil(1 / share) for share in segment.shares if share), default=1)
