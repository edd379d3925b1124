"""How far a preparation is: a bar on a terminal, a line every few seconds elsewhere."""

import time
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 2.0


class Stage(Protocol):
    """What is told after each piece."""

    @property
    def phase(self) -> str: ...
    @property
    def pieces(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def done_before(self) -> int: ...


class PrepareDisplay:
    """Shows each piece as it is done."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._start = self._last = time.monotonic()
        self._first: Stage | None = None
        self._bar: Progress | None = None
        self._tasks: dict[str, object] = {}
        if output.isatty():
            self._bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                                 TimeRemainingColumn(), TextColumn("{task.fields[rate]}"), console=Console(file=output))
            self._bar.start()

    def __call__(self, stage: Stage) -> None:
        now = time.monotonic()
        if self._first is None or self._first.phase != stage.phase:
            self._first, self._begun = stage, self._start if self._first is None else now
        rate = self._rate(stage, now)
        if self._bar is not None:
            if stage.phase not in self._tasks:
                self._tasks[stage.phase] = self._bar.add_task(f"pieces {stage.phase}", total=stage.num_pieces, rate="")
            self._bar.update(self._tasks[stage.phase], completed=stage.pieces, rate=rate)  # type: ignore[arg-type]
        elif now - self._last >= LINE_INTERVAL_S:
            self._last = now
            print(f"{stage.phase} {stage.pieces} of {stage.num_pieces} pieces  {rate}", file=self._output, flush=True)

    def _rate(self, stage: Stage, now: float) -> str:
        """Of what was done since the start, with what an earlier run had done left out by its share of pieces."""
        if not stage.documents:
            return ""
        new = (stage.pieces - stage.done_before) / stage.pieces / max(now - self._begun, 1e-9)
        return (f"{stage.documents:,} documents, {stage.tokens:,} tokens "
                f"({stage.documents * new:,.0f} documents/s, {stage.tokens * new:,.0f} tokens/s)")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
