"""The ideal course of a mixture: how many of the first n samples of a phase each source should give, as exact fractions.

Within a phase shares are constant until a source has used up its epochs, whose place the others then share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from raytrain3d.config import JobConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part of a phase in which shares are constant: from `start` samples on, to the next segment."""

    start: Fraction
    """In samples of the phase."""
    amounts: tuple[Fraction, ...]
    """Samples of each source before it."""
    shares: tuple[Fraction, ...]
    """By source; their sum is 1, or 0 when all are used up."""

    def amount(self, source: int, at: int) -> Fraction:
        """Ideal samples of a source among the first `at`."""
        return self.amounts[source] + (at - self.start) * self.shares[source]


def segments(weights: Sequence[Fraction], limits: Sequence[int | None]) -> Iterator[Segment]:
    """Of a phase without end. weights: relative, by source; limits: most samples of each."""
    at, amounts = Fraction(0), tuple(Fraction(0) for _ in weights)
    while True:
        left = [weight if limit is None or amount < limit else Fraction(0)
                for weight, amount, limit in zip(weights, amounts, limits, strict=True)]
        total = sum(left)
        shares = tuple(weight / total if total else Fraction(0) for weight in left)
        yield Segment(start=at, amounts=amounts, shares=shares)
        lengths = [(limit - amount) / share for amount, share, limit in zip(amounts, shares, limits, strict=True)
                   if limit is not None and share]
        if not lengths:
            return
        at += min(lengths)
        amounts = tuple(amount + min(lengths) * share for amount, share in zip(amounts, shares, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a run with its own mix."""

    start: int
    """First sample of the run that belongs to it."""
    weights: tuple[Fraction, ...]
    """By source, relative."""


def phases_of(config: JobConfig, tokens: Sequence[int]) -> list[Phase]:
    """Of a job whose sources have so many training tokens."""
    data = config.data
    sizes = [exact(source.weight) if source.weight is not None else Fraction(size)
             for source, size in zip(data.all_sources, tokens, strict=True)]
    if data.temperature != 1:
        sizes = [Fraction(float(size) ** (1 / data.temperature)) for size in sizes]
    later = [Phase(start=-(-phase.tokens // config.train.sequence),
                   weights=tuple(exact(phase.weights.get(source.name, 0.0)) for source in data.sources))
             for phase in data.phases]
    return [Phase(start=0, weights=tuple(sizes)), *later]


def limits_of(config: JobConfig, samples: Sequence[int]) -> list[int | None]:
    """Most samples of each source, of which an epoch has so many."""
    return [None if source.epochs is None else floor(exact(source.epochs) * size)
            for source, size in zip(config.data.all_sources, samples, strict=True)]


def exact(decimal: float) -> Fraction:
    """The number as it is written: a tenth for 0.1, which no binary number is."""
    return Fraction(str(decimal))
