"""Who keeps a copy of whose state: a ring in which the neighbour is on another node wherever there is one."""

from collections import Counter
from collections.abc import Sequence


KEPT = 2
"""Copies that a rank keeps of its own state, and of its client's."""


def peers_of(nodes: Sequence[str], neighbour: int) -> tuple[int, ...]:
    """Rank -> the rank that keeps a copy of its state; each keeps one. nodes: of every rank, in rank order. neighbour: how
    far away the peer is where all ranks are on one node.

    Ranks are sorted by node; each one's peer is as many places further as the fullest node has ranks, so on another node
    unless one node has more than half of all ranks.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    on_node = Counter(nodes)
    shift = max(on_node.values()) if len(on_node) > 1 else neighbour
    place = {rank: i for i, rank in enumerate(order)}
    return tuple(order[(place[rank] + shift) % len(order)] for rank in range(len(nodes)))
