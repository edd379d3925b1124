"""What a rank still holds when a step or anything else has failed."""

from dataclasses import dataclass, field

from raytrain3d.plan.partition import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What one rank holds. Nothing, unless said otherwise: it has just started, or was being filled."""

    held: int | None = None
    """The last step that it holds in full."""
    agreed: tuple[int, tuple[float, ...]] | None = None
    """Step and values of the last commit vector that it has got: that step, or the one after, may be carried out from it."""
    own: dict[int, Stages] = field(default_factory=dict)
    """Step -> stages of the snapshots of its own state."""
    client: frozenset[int] = frozenset()
    """Steps of the snapshots that it keeps of another rank."""
