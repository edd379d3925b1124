"""One step as the whole fleet did it, from the reports of all ranks. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain3d.plan.mesh import Mesh
from raytrain3d.train.report import StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSummary:
    """Means over the ranks of a stage, in seconds a step."""

    compute_s: float
    receive_wait_s: float
    reduce_wait_s: float
    commit_wait_s: float
    data_wait_s: float
    optimizer_s: float
    idle_share: float
    """Share of the step in which its ranks did not compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """A line of metrics.jsonl."""

    step: int
    loss: float
    """Mean over the step's loss tokens, in nats."""
    tokens: int
    gradient_norm: float
    learning_rate: float
    skipped: bool
    seconds: float
    """Of the slowest rank."""
    idle_share: float
    """Mean over ranks."""
    stages: tuple[StageSummary, ...]
    layer_forward_s: dict[int, float]
    """By layer: mean over the ranks that hold it, summed over a step's micro-batches."""
    layer_backward_s: dict[int, float]
    """Whole backwards, and input gradients of split ones."""
    layer_weight_s: dict[int, float]
    """Weight gradients of split backwards."""

    @property
    def imbalance(self) -> float:
        """Compute of the busiest pipeline rank over the mean of all; 1 is even."""
        work = [stage.compute_s for stage in self.stages]
        mean = sum(work) / len(work)
        return max(work) / mean if mean > 0 else 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def to_record(self) -> dict[str, Any]:
        """Plain values. Numbers that are not finite become null, which JSON has no other word for."""
        record = asdict(self) | {"tokens_per_s": self.tokens_per_s, "imbalance": self.imbalance}
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in record.items()}


def summarize(reports: Sequence[StepReport], mesh: Mesh) -> StepSummary:
    """reports: of one step, from every rank."""
    first = reports[0]
    stages = tuple(_stage([r for r in reports if mesh.coordinate(r.rank).pipeline == stage])
                   for stage in range(mesh.pipeline))
    return StepSummary(
        step=first.step, loss=first.loss, tokens=first.tokens, gradient_norm=first.gradient_norm,
        learning_rate=first.learning_rate, skipped=first.skipped, seconds=max(r.seconds for r in reports),
        idle_share=_mean(reports, lambda r: r.idle_share), stages=stages,
        layer_forward_s=_by_layer([r.layer_forward_s for r in reports]),
        layer_backward_s=_by_layer([r.layer_backward_s for r in reports]),
        layer_weight_s=_by_layer([r.layer_weight_s for r in reports]))


def _mean(reports: Sequence[StepReport], value: Callable[[StepReport], float]) -> float:
    """0 when nobody has reported: a lost rank took its reports with it."""
    return sum(map(value, reports)) / max(len(reports), 1)


def _stage(reports: Sequence[StepReport]) -> StageSummary:
    return StageSummary(
        compute_s=_mean(reports, lambda r: r.compute_s), receive_wait_s=_mean(reports, lambda r: r.receive_wait_s),
        reduce_wait_s=_mean(reports, lambda r: r.reduce_wait_s),
        commit_wait_s=_mean(reports, lambda r: r.commit_wait_s), data_wait_s=_mean(reports, lambda r: r.data_wait_s),
        optimizer_s=_mean(reports, lambda r: r.optimizer_s), idle_share=_mean(reports, lambda r: r.idle_share))


def _by_layer(times: Sequence[dict[int, float]]) -> dict[int, float]:
    layers = sorted({layer for each in times for layer in each})
    held = {layer: [each[layer] for each in times if layer in each] for layer in layers}
    return {layer: sum(values) / len(values) for layer, values in held.items()}
