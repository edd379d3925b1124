"""Which source gives the n-th sample of a run, as a pure function of n: phase after phase, each with its own mix."""

from bisect import bisect_right
from collections.abc import Sequence

from raytrain3d.config import JobConfig
from raytrain3d.data.ideal import Phase, limits_of, phases_of, segments
from raytrain3d.data.stretch import Counts, Stretch
from raytrain3d.errors import DataError

LONGEST_GAP = 1 << 20
"""Samples from one of a source to its next, above which finding the place in a run would take seconds."""


class Mixture:
    """Order of the sources' samples in a run. In every phase each source is less than a sample away from its share at any
    time."""

    def __init__(self, names: Sequence[str], phases: Sequence[Phase], limits: Sequence[int | None], length: int) -> None:
        """names: of the sources; limits: most samples of each; length: samples of the run. DataError when the sources are
        used up before its end, or a share is too small."""
        self._starts = [phase.start for phase in phases]
        self._before: list[Counts] = []
        self._stretches: list[Stretch] = []
        counts: Counts = tuple(0 for _ in names)
        for phase, end in zip(phases, [*self._starts[1:], None], strict=True):
            left = [None if limit is None else limit - count for limit, count in zip(limits, counts, strict=True)]
            ideal = list(segments(phase.weights, left))
            last = length if end is None else min(end, length)
            if not any(ideal[-1].shares) and phase.start + ideal[-1].start < last:
                raise DataError(f"data.sources.epochs: what is mixed from sample {phase.start:,} on is used up after "
                                f"{phase.start + int(ideal[-1].start):,} samples of the run, which needs {length:,}: raise "
                                "it, or shorten the run (train.steps)")
            if not any(ideal[-1].shares):
                ideal.pop()  # the run is over by then
            _check_gap(names, phase)
            self._before.append(counts)
            self._stretches.append(Stretch(ideal))
            if end is None or end >= length:
                break
            counts = tuple(map(sum, zip(counts, self._stretches[-1].counts(end - phase.start), strict=True)))

    @staticmethod
    def of(config: JobConfig, tokens: Sequence[int], samples: Sequence[int]) -> "Mixture":
        """Of a job whose sources have so many training tokens, and samples in an epoch."""
        return Mixture([source.name for source in config.data.all_sources], phases_of(config, tokens),
                       limits_of(config, samples), config.train.steps * config.train.global_batch)

    def __call__(self, place: int) -> tuple[int, int]:
        """(source, number of the sample among those of this source, from 0) at a place of the run, from 0."""
        phase = self._phase(place)
        source, number = self._stretches[phase](place - self._starts[phase])
        return source, self._before[phase][source] + number

    def counts(self, places: int) -> Counts:
        """Samples of each source among the first `places`."""
        phase = self._phase(places)
        inside = self._stretches[phase].counts(places - self._starts[phase])
        return tuple(map(sum, zip(self._before[phase], inside, strict=True)))

    def _phase(self, place: int) -> int:
        return min(bisect_right(self._starts, place), len(self._stretches)) - 1


def _check_gap(names: Sequence[str], phase: Phase) -> None:
    total = sum(phase.weights)
    for name, weight in zip(names, phase.weights, strict=True):
        if weight and total / weight > LONGEST_GAP:
            raise DataError(f"data.sources: '{name}' would give one of {float(total / weight):,.0f} samples, at least one "
                            f"of {LONGEST_GAP:,} is needed: raise its weight (or data.temperature), or leave it out")
