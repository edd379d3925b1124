"""After ranks were lost: from which step do all go on, and who fills those that hold nothing? Pure.

Survivors differ by one step at most. If anyone has got the commit vector of a step, everyone had finished its part of it,
so it can be carried out everywhere; else nobody has changed anything, and the step is done again. A rank that holds nothing
is filled by one that holds the same, its nearest neighbour on the data axis. Where there is none, all go back to the newest
snapshot that is whole: of every rank its own copy, or the one that its peer keeps. Without one, to a checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.partition import Stages
from raytrain3d.train.standing import Standing


@dataclass(frozen=True, kw_only=True, slots=True)
class GoOn:
    """All come to hold `step`."""

    step: int
    values: tuple[float, ...] | None
    """The commit vector of `step`, for ranks that have not carried it out yet."""
    forward: tuple[int, ...]
    """Ranks that carry it out."""
    fills: tuple[tuple[int, int], ...]
    """(rank that holds nothing, rank that holds the same as it should)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewind:
    """All go back to the snapshot of `step`."""

    step: int
    stages: Stages
    """How layers were split then."""
    fills: tuple[tuple[int, int], ...]
    """(rank without its copy, rank that keeps it)"""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GoBack:
    """To the newest checkpoint."""

    reason: str


def decide(standings: Mapping[int, Standing], mesh: Mesh, *, shards: int, peers: Sequence[int] = (),
           saved: int = 0, ranks: Sequence[int] | None = None) -> GoOn | Rewind | GoBack:
    """standings: of the ranks that are left. ranks: all that there should be, default those of the mesh. shards: parts that
    a layer's state is cut into along the data axis, 1 where every replica holds all of it. peers: rank -> rank that keeps
    its snapshots. saved: step of the newest checkpoint."""
    ranks = range(mesh.size) if ranks is None else ranks
    decision = _go_on(standings, mesh, shards, ranks)
    if isinstance(decision, GoOn) or not peers:
        return decision
    rewind = _rewind(standings, peers, ranks, decision.reason)
    return decision if rewind is None or rewind.step < saved else rewind


def _go_on(standings: Mapping[int, Standing], mesh: Mesh, shards: int, ranks: Sequence[int]) -> GoOn | GoBack:
    held = {rank: standing.held for rank, standing in standings.items() if standing.held is not None}
    agreed = dict(standing.agreed for standing in standings.values() if standing.agreed is not None)
    if not held:
        return GoBack(reason="no rank is left that holds anything")
    step = max([*held.values(), *agreed])
    forward = tuple(sorted(rank for rank, n in held.items() if n < step))
    if any(held[rank] != step - 1 for rank in forward) or (forward and step not in agreed):
        return GoBack(reason=f"ranks that are left stand at steps {', '.join(map(str, sorted(set(held.values()))))}")
    donors = {rank: _donor(rank, held, mesh, shards) for rank in ranks if rank not in held}
    alone = [rank for rank, donor in donors.items() if donor is None]
    if alone:
        return GoBack(reason=f"nobody else holds what {ranks_text(alone)} held")
    fills = tuple((rank, donor) for rank, donor in sorted(donors.items()) if donor is not None)
    return GoOn(step=step, values=agreed.get(step), forward=forward, fills=fills)


def _rewind(standings: Mapping[int, Standing], peers: Sequence[int], ranks: Sequence[int],
            reason: str) -> Rewind | None:
    """To the newest step of which every rank's copy is left."""
    stages = {step: split for standing in standings.values() for step, split in standing.own.items()}
    for step in sorted(stages, reverse=True):
        without = [rank for rank in ranks if rank not in standings or step not in standings[rank].own]
        if all(peers[rank] in standings and step in standings[peers[rank]].client for rank in without):
            fills = tuple((rank, peers[rank]) for rank in without)
            return Rewind(step=step, stages=stages[step], fills=fills, reason=reason)
    return None


def _donor(rank: int, holders: Iterable[int], mesh: Mesh, shards: int) -> int | None:
    """The nearest rank on the data axis that holds the same shard."""
    at, found = mesh.coordinate(rank), set(holders)
    same = [mesh.rank(replace(at, data=data)) for data in sorted(range(mesh.data), key=lambda data: abs(data - at.data))
            if data % shards == at.data % shards]
    return next((other for other in same if other in found), None)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
