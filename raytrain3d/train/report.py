"""What a rank reports of a step, and how reports of all ranks become one line of metrics."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal


Place = Literal["weights", "forward", "backward", "gradient", "sum"]
"""Where a layer's numbers are not finite: its weights, its output, the gradient of its input, that of its weights on one
rank, or only that of its weights added up over replicas."""
PLACES: tuple[Place, ...] = ("weights", "forward", "backward", "gradient", "sum")
"""In the order in which a step comes by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where finite numbers became others on one rank."""

    layer: str
    place: Place
    op: str | None
    """The op under way, if one was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When one rank ran each op of a step: what `raytrain3d trace` draws."""

    start: float
    """Of the pipeline part, in seconds since 1970."""
    seconds: float
    """Length of the pipeline part."""
    spans: tuple[tuple[str, float, float], ...]
    """(op, start, end), in seconds from `start`; sends, which take no time, left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step as one rank saw it. Times in seconds."""

    step: int
    rank: int
    loss: float
    """Mean loss of the step's loss tokens over all replicas, in nats; the same on every rank."""
    tokens: int
    """Loss tokens of the step over all replicas."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    skipped: bool = False
    """Loss or gradient was not finite, or the step was passed over: parameters stayed as they were."""
    origin: Origin | None = None
    """Where on this rank finite numbers became others, if they did."""
    stop: bool = False
    """Some rank was asked to stop: every rank leaves its lease after this step."""
    seconds: float
    compute_s: float
    """Time in forward and backward ops."""
    data_wait_s: float
    receive_wait_s: float
    """Waiting for activations and gradients of other stages."""
    reduce_wait_s: float
    """Waiting for gradient reductions after the last backward."""
    commit_wait_s: float
    optimizer_s: float
    memory_bytes: int | None = None
    """Most that was allocated on its GPU so far, or resident memory of its process on a CPU. Absent: not measured."""
    peak_flops: float | None = None
    """FLOPs a second that its device reaches at most: a GPU by data sheet, a CPU as measured. Absent: not known."""
    layer_forward_s: dict[int, float] = field(default_factory=dict)
    """By layer index, summed over micro-batches."""
    layer_backward_s: dict[int, float] = field(default_factory=dict)
    """Whole backwards, and input gradients of split ones."""
    layer_weight_s: dict[int, float] = field(default_factory=dict)
    """Weight gradients of split backwards."""
    timeline: Timeline | None = None
    """Of a recorded step (`run.trace_interval`), until the rank has written it down."""

    @property
    def idle_share(self) -> float:
        """Share of the step in which this rank did not compute."""
        return max(0.0, 1.0 - (self.compute_s + self.optimizer_s) / self.seconds)


def merge_reports(reports: Iterable[StepReport], ranks: int, tensor: int) -> list[StepReport]:
    """Reports of the steps that all of `ranks` neighbouring ranks have done, one for each tensor group, in order of step and
    rank. The ranks of a group wait for each other inside a layer: layers are as its slowest rank has them, whose number the
    report carries, waits are the group's means."""
    steps: dict[int, list[StepReport]] = {}
    for report in reports:
        steps.setdefault(report.step, []).append(report)
    return [_merged(list(group)) for step in sorted(steps) if len(steps[step]) == ranks
            for _, group in groupby(sorted(steps[step], key=lambda r: r.rank), key=lambda r: r.rank // tensor)]


def _merged(group: Sequence[StepReport]) -> StepReport:
    if len(group) == 1:
        return group[0]
    slowest = max(group, key=lambda r: r.compute_s)
    memory = max((r.memory_bytes for r in group if r.memory_bytes is not None), default=None)
    return replace(slowest, seconds=max(r.seconds for r in group), memory_bytes=memory, **{
        name: sum(getattr(r, name) for r in group) / len(group)
        for name in ("compute_s", "data_wait_s", "receive_wait_s", "reduce_wait_s", "commit_wait_s", "optimizer_s")})


@dataclass(frozen=True, kw_only=True, slots=True)
class SetReport:
    """Loss on one validation set; the same on every rank and, but for rounding, under every layout."""

    name: str
    loss: float
    """Mean over the set's loss tokens, in nats."""
    tokens: int
    """Loss tokens."""
    bytes_per_token: float | None = None
    """Of the whole split's text; None when it is not known."""

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that is no number any more."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers."""
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token

    def to_record(self) -> dict[str, float | int | None]:
        """For a line of JSON."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte, "tokens": self.tokens}

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"{self.name}: loss {self.loss:.4f}, perplexity {self.perplexity:.4g}{bits} ({self.tokens:,} tokens)"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Losses on the validation sets; the same on every rank."""

    sets: tuple[SetReport, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Loss tokens of all sets."""
        return sum(each.tokens for each in self.sets)

    @property
    def loss(self) -> float:
        """Mean over the loss tokens of all sets, in nats."""
        return sum(each.loss * each.tokens for each in self.sets) / max(self.tokens, 1)


class Stopwatch:
    """Time since it was made, cut into named laps. Seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Time since the last lap ended belongs to `name`."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def lap_of(self, name: str) -> float:
        """0 for one that was not reached."""
        return self.laps.get(name, 0.0)

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start
