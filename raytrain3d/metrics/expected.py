"""A step against its plan: its speed in FLOPs of the model and as a share of the device's peak, the predicted step time, and
how layers and micro-batches were divided. Pure."""

from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.metrics.summary import StepSummary
from raytrain3d.plan.cost import model_flops_per_token, model_flops_utilization
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.partition import counts_of
from raytrain3d.plan.plan import Plan


class Expected:
    """Of one job. plan: as it was made, whose idle share is the predicted one."""

    def __init__(self, config: JobConfig, plan: Plan) -> None:
        spec = model_spec(config.model, config.train, plan.mesh.tensor)
        self._flops_per_token = model_flops_per_token(spec, config.train.sequence)
        given = config.metrics.peak_tflops
        self._peak_flops = None if given is None else given * 1e12
        self._idle_share = plan.idle_share

    def values(self, summary: StepSummary, plan: Plan) -> dict[str, Any]:
        """More for the step's line of metrics.jsonl. plan: the step was done under its split."""
        gangs = plan.mesh.data - len(plan.vacant)
        values = {
            "stages": counts_of(plan.stages), "shares": plan.shares, "gangs": gangs,
            "predicted_s": self._predicted_s(summary),
            "model_flops_per_s": self._flops_per_token * summary.tokens_per_s}
        peak = summary.peak_flops if self._peak_flops is None else self._peak_flops
        if peak is not None:
            values["mfu"] = model_flops_utilization(
                self._flops_per_token, tokens_per_s=summary.tokens_per_s, num_ranks=gangs * plan.mesh.ranks_per_gang,
                peak_flops=peak)
        return values

    def _predicted_s(self, summary: StepSummary) -> float:
        """The measured compute, in a pipeline as idle as the plan says; then the optimizer."""
        ranks = summary.pipeline_ranks
        compute = sum(rank.compute_s for rank in ranks) / len(ranks)
        return compute / (1 - self._idle_share) + sum(rank.optimizer_s for rank in ranks) / len(ranks)
