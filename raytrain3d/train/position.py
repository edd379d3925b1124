"""How far a rank is in its step, as another thread sees it."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["data", "program", "reduction", "commit", "update"]
"""Parts of a step, in order."""
PHASES: tuple[Phase, ...] = ("data", "program", "reduction", "commit", "update")


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Of one rank, at one moment."""

    step: int = 0
    """The step under way, else the last one."""
    phase: Phase | None = None
    """None: not in a step."""
    finished: int = 0
    """Ops of its program that are over, on the device too."""
    op: str | None = None
    """The op under way."""
    waits: bool = False
    """Inside a communication with other ranks."""
    stack: str = ""
    """Where its training thread is."""

    @property
    def progress(self) -> tuple[int, int, int]:
        """Grows as the rank goes on."""
        return self.step, PHASES.index(self.phase) if self.phase is not None else len(PHASES), self.finished
