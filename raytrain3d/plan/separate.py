"""Whose time is it? The time of a layer on a rank is cost of the layer x slowdown of the rank.

A single measured time does not tell the two apart. What does, by trust:

1. Layers alike (equal FLOPs, as blocks are) are expected to cost the same. A rank on which more than half of at least two
   such layers are slow is a slow rank; a layer slower than its fellows on the same rank is a costly layer.
2. Else layers whose cost is known from such ranks: they were here before a move, or are there in another replica.
3. Else what a layer takes in other replicas: what all have in common is the layer's cost.
4. Else the rank's only layer that has fellows anywhere, again expected to cost as much as they.

Embedding and head have no fellows and take the slowdown of the blocks on their rank. Slowdown 1 is the lower median of
all ranks, so of two ranks the faster one. Ambiguous, and decided so: a rank with a single block that was measured nowhere
else is slow, not its block costly; a rank that never had a block is normal; if most ranks are slow alike, they are normal
and the rest is fast.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from raytrain3d.plan.cost import LayerCost

Place = tuple[int, int]
"""Replica and pipeline rank."""
Times = Mapping[Place, Mapping[int, LayerCost]]
"""Seconds of one micro-batch by place and layer."""
Totals = Mapping[Place, Mapping[int, float]]
"""The same, forward and backward together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Separated:
    """Costs and slowdowns whose product is what was measured."""

    costs: Mapping[int, LayerCost]
    """By layer: seconds of one micro-batch on a rank of slowdown 1."""
    slowdowns: Mapping[Place, float]


def separate(now: Times, former: Times, flops: Sequence[LayerCost]) -> Separated:
    """Costs of the layers in `now` and slowdowns of its places.

    now: layers where they are. former: layers where they were, as long as the place's speed is the same since. flops: by
    layer; equal ones make layers alike. Summed over the layers of a place, cost x slowdown is exactly the measured time;
    with one replica layer by layer.
    """
    totals = {place: {layer: time.total for layer, time in {**former.get(place, {}), **times}.items()}
              for place, times in now.items()}
    slowdowns = _slowdowns(totals, _levels(totals, flops))
    costs = {layer: median_cost([now[place][layer] * (1 / slowdowns[place]) for place in now if layer in now[place]])
             for layer in {layer for times in now.values() for layer in times}}
    one = {layer: cost.total for layer, cost in costs.items()}
    measured = {place: {layer: time.total for layer, time in times.items()} for place, times in now.items()}
    return Separated(costs=costs, slowdowns={place: _ratio(measured[place], one) or slowdowns[place] for place in now})


def _levels(totals: Totals, flops: Sequence[LayerCost]) -> dict[int, float]:
    """By layer that has fellows: what such a layer takes on a normal rank."""
    number, levels = Counter(flops), {}
    for kind in (kind for kind in number if number[kind] > 1):
        alike = [[time for layer, time in own.items() if flops[layer] == kind] for own in totals.values()]
        if any(alike):
            levels[kind] = median_low(median_low(times) for times in alike if times)
    return {layer: levels[kind] for layer, kind in enumerate(flops) if kind in levels}


def _slowdowns(totals: Totals, levels: Mapping[int, float]) -> dict[Place, float]:
    ratios = {place: [time / levels[layer] for layer, time in own.items() if levels.get(layer)]
              for place, own in totals.items()}
    found = {place: median_low(own) for place, own in ratios.items() if len(own) > 1}
    known = _medians({place: {layer: time / found[place] for layer, time in totals[place].items()} for place in found})
    common = {layer: time for layer, time in _medians(totals).items() if sum(layer in own for own in totals.values()) > 1}
    for place in totals.keys() - found.keys():
        ways = (_ratio(totals[place], references) for references in (known, common, levels))
        found[place] = next((way for way in ways if way is not None), 1.0)
    return found


def _medians(totals: Totals) -> dict[int, float]:
    """By layer, the lower median over its places."""
    found: dict[int, list[float]] = {}
    for layer, time in _flat(totals):
        found.setdefault(layer, []).append(time)
    return {layer: median_low(times) for layer, times in found.items()}


def _flat(totals: Totals) -> Iterator[tuple[int, float]]:
    return (item for own in totals.values() for item in own.items())


def _ratio(times: Mapping[int, float], references: Mapping[int, float]) -> float | None:
    """Time over reference, summed over the layers that have one; None: no layer has."""
    expected = sum(references[layer] for layer in times if layer in references)
    return sum(time for layer, time in times.items() if layer in references) / expected if expected else None


def median_cost(costs: Sequence[LayerCost]) -> LayerCost:
    """Kind by kind."""
    return LayerCost(forward=median(cost.forward for cost in costs),
                     backward_input=median(cost.backward_input for cost in costs),
                     backward_weight=median(cost.backward_weight for cost in costs))
