"""One step as the whole fleet did it, from the reports of all ranks. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain3d.plan.mesh import Mesh
from raytrain3d.train.report import StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRankSummary:
    """Means over the ranks that stand at one place of their pipelines, in seconds a step."""

    compute_s: float
    forward_s: float
    backward_s: float
    """Weight gradients of split backwards among them."""
    receive_wait_s: float
    reduce_wait_s: float
    commit_wait_s: float
    data_wait_s: float
    optimizer_s: float
    idle_share: float
    """Share of the step in which its ranks did not compute."""
    memory_bytes: int | None
    """Of the rank that has most; absent where none has measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceSummary:
    """Means over the tensor ranks at one place of one replica's pipeline."""

    compute_s: float
    """In a step."""
    idle_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceSummary:
    """What rebalancing has done up to a step, since the job was started or resumed."""

    decisions: int = 0
    """Those that left everything where it was among them."""
    moves: int = 0
    """Decisions and wishes that were carried out."""
    layers: int = 0
    """One layer across one stage boundary counts once."""
    bytes: int = 0
    """Sent between ranks by moves."""
    seconds: float = 0.0
    """That training stood still for moves."""
    predicted_gain: float | None = None
    """Of the last move that was decided: step time before over after. Absent: there was none."""
    achieved_gain: float | None = None
    """Of the same move, once it is measured."""


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
    pipeline_ranks: tuple[PipelineRankSummary, ...]
    places: tuple[tuple[PlaceSummary | None, ...], ...]
    """By replica, then by pipeline rank. None where nobody has reported: the replica takes no part, or was lost."""
    layer_forward_s: dict[int, float]
    """By layer: mean over the ranks that hold it, summed over a step's micro-batches."""
    layer_backward_s: dict[int, float]
    """Whole backwards, and input gradients of split ones."""
    layer_weight_s: dict[int, float]
    """Weight gradients of split backwards."""
    rebalance: RebalanceSummary = RebalanceSummary()
    peak_flops: float | None = None
    """FLOPs a second that a rank's device reaches at most, mean of the ranks. Absent: not known of all."""

    @property
    def imbalance(self) -> float:
        """Compute of the busiest pipeline rank over the mean of all; 1 is even."""
        work = [each.compute_s for each in self.pipeline_ranks]
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


def summarize(reports: Sequence[StepReport], mesh: Mesh, rebalance: RebalanceSummary = RebalanceSummary()) -> StepSummary:
    """reports: of one step, from every rank. rebalance: what was done before it."""
    first = reports[0]
    pipeline_ranks = tuple(_pipeline_rank([r for r in reports if mesh.coordinate(r.rank).pipeline == each])
                           for each in range(mesh.pipeline))
    return StepSummary(
        step=first.step, loss=first.loss, tokens=first.tokens, gradient_norm=first.gradient_norm,
        learning_rate=first.learning_rate, skipped=first.skipped, seconds=max(r.seconds for r in reports),
        idle_share=_mean(reports, lambda r: r.idle_share), pipeline_ranks=pipeline_ranks, places=_places(reports, mesh),
        rebalance=rebalance, peak_flops=_mean_peak([r.peak_flops for r in reports]),
        layer_forward_s=_by_layer([r.layer_forward_s for r in reports]),
        layer_backward_s=_by_layer([r.layer_backward_s for r in reports]),
        layer_weight_s=_by_layer([r.layer_weight_s for r in reports]))


def _mean(reports: Sequence[StepReport], value: Callable[[StepReport], float]) -> float:
    """0 when nobody has reported: a lost rank took its reports with it."""
    return sum(map(value, reports)) / max(len(reports), 1)


def _mean_peak(peaks: Sequence[float | None]) -> float | None:
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / len(known) if known and len(known) == len(peaks) else None


def _pipeline_rank(reports: Sequence[StepReport]) -> PipelineRankSummary:
    memory = [r.memory_bytes for r in reports if r.memory_bytes is not None]
    return PipelineRankSummary(
        compute_s=_mean(reports, lambda r: r.compute_s), forward_s=_mean(reports, lambda r: sum(r.layer_forward_s.values())),
        backward_s=_mean(reports, lambda r: sum(r.layer_backward_s.values()) + sum(r.layer_weight_s.values())),
        receive_wait_s=_mean(reports, lambda r: r.receive_wait_s),
        reduce_wait_s=_mean(reports, lambda r: r.reduce_wait_s),
        commit_wait_s=_mean(reports, lambda r: r.commit_wait_s), data_wait_s=_mean(reports, lambda r: r.data_wait_s),
        optimizer_s=_mean(reports, lambda r: r.optimizer_s), idle_share=_mean(reports, lambda r: r.idle_share),
        memory_bytes=max(memory, default=None))


def _places(reports: Sequence[StepReport], mesh: Mesh) -> tuple[tuple[PlaceSummary | None, ...], ...]:
    by_place: dict[tuple[int, int], list[StepReport]] = {}
    for report in reports:
        at = mesh.coordinate(report.rank)
        by_place.setdefault((at.data, at.pipeline), []).append(report)

    def place(replica: int, pipeline: int) -> PlaceSummary | None:
        here = by_place.get((replica, pipeline))
        return None if here is None else PlaceSummary(
            compute_s=_mean(here, lambda r: r.compute_s), idle_share=_mean(here, lambda r: r.idle_share))

    return tuple(tuple(place(replica, pipeline) for pipeline in range(mesh.pipeline)) for replica in range(mesh.data))


def _by_layer(times: Sequence[dict[int, float]]) -> dict[int, float]:
    layers = sorted({layer for each in times for layer in each})
    held = {layer: [each[layer] for each in times if layer in each] for layer in layers}
    return {layer: sum(values) / len(values) for layer, values in held.items()}
