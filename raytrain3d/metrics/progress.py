"""What a person sees while a job runs: a live display on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain3d.metrics.summary import StepSummary

LINE_INTERVAL_S = 1.0
"""Plain lines come no faster than this, but for the first and the last step."""
SHOWN_RANKS = 16
"""Pipeline ranks in the live display."""
BAR_WIDTH = 10
RECENT_STEPS = 50
"""Time left is counted from the mean of as many recent steps."""


class Progress(Protocol):
    """Shows steps and events."""

    def step(self, summary: StepSummary, mfu: float | None = None) -> None:
        """mfu: model FLOPs utilization, if it is known."""

    def say(self, text: str) -> None:
        """One event, or any text for the reader."""

    def close(self) -> None: ...


def make_progress(output: TextIO, num_steps: int) -> Progress:
    """The display for `output`: live if it is a terminal."""
    return LiveProgress(output, num_steps) if output.isatty() else PlainProgress(output, num_steps)


class TimeLeft:
    """Seconds until the last step, from recent steps. Time between steps (validation, saving) counts as far as it
    fell among them."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    def after(self, summary: StepSummary) -> float:
        if self._ends and summary.step <= self._ends[-1][0]:  # the run went back to a checkpoint
            self._ends.clear()
        self._ends.append((summary.step, time.monotonic()))
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        # Reports come in batches, so few steps say little about the time between them.
        per_step = (end - start) / (last - first) if end - start > 2 * LINE_INTERVAL_S else summary.seconds
        return (self._num_steps - summary.step) * per_step


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def figures(summary: StepSummary, num_steps: int, left_s: float, mfu: float | None = None) -> list[tuple[str, str]]:
    """Name and text of every figure of a step."""
    utilization = [] if mfu is None else [("MFU", f"{mfu:.1%}")]
    return [("step", f"{summary.step}/{num_steps}"), ("loss", f"{summary.loss:.4f}"),
            ("tokens/s", f"{summary.tokens_per_s:,.0f}"), *utilization, ("lr", f"{summary.learning_rate:.3g}"),
            ("gradient norm", f"{summary.gradient_norm:.3f}"), ("s/step", f"{summary.seconds:.3f}"),
            ("idle", f"{summary.idle_share:.0%}"), ("imbalance", f"{summary.imbalance:.2f}"), ("left", duration(left_s))]


def rank_table(summary: StepSummary) -> Table:
    """A row for each pipeline rank: compute and waits in seconds, idle share as a bar too. Of many only the idlest and the
    busiest ones."""
    ranks = sorted(enumerate(summary.pipeline_ranks), key=lambda each: -each[1].idle_share)
    half = SHOWN_RANKS // 2
    shown = sorted(ranks if len(ranks) <= SHOWN_RANKS else ranks[:half] + ranks[-half:], key=lambda each: each[0])
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "compute", "stages", "reduce", "commit", "data", "idle"):
        table.add_column(name, justify="right")
    table.add_column("", width=BAR_WIDTH)
    for rank, each in shown:
        waits = (each.receive_wait_s, each.reduce_wait_s, each.commit_wait_s, each.data_wait_s)
        table.add_row(str(rank), f"{each.compute_s:.3f} s", *(f"{wait:.3f}" for wait in waits), f"{each.idle_share:.0%}",
                      ProgressBar(total=1.0, completed=min(each.idle_share, 1.0), width=BAR_WIDTH))
    return table


class PlainProgress:
    """Lines of text."""

    def __init__(self, output: TextIO, num_steps: int) -> None:
        self._output, self._num_steps = output, num_steps
        self._time_left = TimeLeft(num_steps)
        self._last_line = float("-inf")

    def step(self, summary: StepSummary, mfu: float | None = None) -> None:
        left = self._time_left.after(summary)
        now = time.monotonic()
        if now - self._last_line >= LINE_INTERVAL_S or summary.step == self._num_steps:
            self._last_line = now
            self.say("  ".join(f"{name} {text}" for name, text in figures(summary, self._num_steps, left, mfu)))

    def say(self, text: str) -> None:
        self._output.write(text + "\n")
        self._output.flush()

    def close(self) -> None:
        self._output.flush()


class LiveProgress:
    """Figures of the step and of each pipeline rank that change in place, events scrolling above."""

    def __init__(self, output: TextIO, num_steps: int) -> None:
        self._console = Console(file=output, highlight=False)
        self._num_steps = num_steps
        self._time_left = TimeLeft(num_steps)
        self._live = Live(console=self._console, refresh_per_second=4, redirect_stdout=output is sys.stdout,
                          redirect_stderr=False)
        self._started = False

    def step(self, summary: StepSummary, mfu: float | None = None) -> None:
        if not self._started:
            self._live.start()
            self._started = True
        table = Table(box=None, padding=(0, 2, 0, 0))
        shown = figures(summary, self._num_steps, self._time_left.after(summary), mfu)
        for name, _ in shown:
            table.add_column(name, justify="right")
        table.add_row(*(text for _, text in shown))
        bar = Padding(ProgressBar(total=self._num_steps, completed=summary.step), 0)  # a bar alone does not end its line
        self._live.update(Group(table, bar, rank_table(summary)))

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        if self._started:
            self._live.stop()
