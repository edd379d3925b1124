"""What a rank tells the driver of a save: plain data. Needs nothing installed."""

from dataclasses import dataclass

from raytrain3d.checkpoint.manifest import Receipt


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStart:
    """What a save has cost the training."""

    pause_s: float
    """Seconds in which this rank did not train: the copy to host memory."""
    num_bytes: int
    """That this rank saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveProgress:
    """How far a rank is with the save that it began last."""

    step: int
    receipt: Receipt | None
    """Absent until the shard is written."""
    seconds: float
    """Spent on writing so far."""
    failures: int
    """Tries that failed; another one follows each."""
    error: str | None
    """Why the last of them failed."""
