"""Which sample stands at which place of which step: a pure function of the seed and the step number.

The mixture says which source gives it. Samples of a source are walked epoch by epoch, each epoch in its own pseudo-random
order of all of them. The order is never stored:
a Feistel network over a square just large enough, walked until it lands inside (cycle walking; Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), gives the sample of any position in constant time and memory.
Replicas, micro-batches and shares do not appear here, so no layout changes what a step reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isqrt

from raytrain3d.data.mixture import Mixture

_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8


def _mix(value: int) -> int:
    """Finalizer of splitmix64 (Steele, Lea and Flood, 2014): 64 bits to 64 bits, every input bit reaches all."""
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    """One key a round; seeds of any size count in full."""
    state = _mix(epoch + 1)
    while True:
        state = _mix((state ^ (seed & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
        seed >>= 64
        if not seed:
            break
    return tuple(_mix(state + i * 0x9E3779B97F4A7C15 & _MASK) for i in range(1, _ROUNDS + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """A pseudo-random order of [0, size)."""

    size: int
    side: int
    keys: tuple[int, ...]

    def __call__(self, position: int) -> int:
        """The number at `position`; both in [0, size)."""
        value = self._shuffle(position)
        while value >= self.size:
            value = self._shuffle(value)
        return value

    def _shuffle(self, value: int) -> int:
        """A bijection of the square [0, side * side), which holds fewer than 2 * side numbers outside [0, size)."""
        side = self.side
        left, right = divmod(value, side)
        for key in self.keys:  # as `_mix` does it: calls would take as long as copying the sample
            mixed = right ^ key
            mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
            left, right = right, (left + (mixed ^ (mixed >> 31))) % side
        return left * side + right


@lru_cache(maxsize=256)
def permutation(seed: int, epoch: int, size: int) -> Permutation:
    """The order of one epoch over `size` samples."""
    return Permutation(size=size, side=isqrt(size - 1) + 1, keys=_keys(seed, epoch))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Order of training samples in steps of `global_batch`."""

    seed: int
    sizes: tuple[int, ...]
    """Samples of each source."""
    mixture: Mixture
    global_batch: int

    def samples(self, step: int, places: Sequence[int]) -> list[tuple[int, int]]:
        """(source, sample number) at `places` (indices in the global batch) of `step`, which counts from 1."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        start = (step - 1) * self.global_batch
        return [self._sample(*self.mixture(start + place)) for place in places]

    def _sample(self, source: int, number: int) -> tuple[int, int]:
        """The `number`-th sample that a source gives. Each source has orders of its own."""
        epoch, position = divmod(number, self.sizes[source])
        return source, permutation(self.seed + (source << 64), epoch, self.sizes[source])(position)


def deal(count: int, replicas: int) -> list[range]:
    """`count` pieces in contiguous runs, one run a replica (maybe empty), the remainder to the first ones."""
    each, rest = divmod(count, replicas)
    starts = [replica * each + min(replica, rest) for replica in range(replicas + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def spread(places: Sequence[int], chosen: int, total: int) -> list[int]:
    """Numbers of those samples that stand at `places` when `chosen` of `total` are taken at even distances."""
    return [place * total // chosen for place in places]
