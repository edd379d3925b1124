"""FLOPs of layers and steps, and what share of a device's peak a measured speed is.

Counting: 2 FLOPs per weight and token, attention as in `LayerSpec.forward_flops`, norms and activations not counted.
With dense attention the sums are the formulas of https://arxiv.org/abs/2104.04473 (72 and 96 B s L h^2 ...).
"""

from dataclasses import dataclass

from raytrain3d.config import JobConfig
from raytrain3d.plan.params import LayerSpec, ModelSpec
from raytrain3d.plan.schedule import Kind, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Work of one layer, or of a row of layers, in any one unit (FLOPs or seconds)."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "LayerCost") -> "LayerCost":
        return LayerCost(forward=self.forward + other.forward, backward=self.backward + other.backward)


def layer_flops(layer: LayerSpec, sequence: int, *, recompute: bool = False, causal: bool = True) -> LayerCost:
    """FLOPs of one sample through one layer, over all tensor ranks.

    The backward costs a forward for the input gradient, another for the weight gradient (a frozen layer saves it), and
    a third when the layer is recomputed.
    """
    forward = layer.forward_flops(sequence, causal=causal)
    passes = 1 + (not layer.frozen) + recompute
    return LayerCost(forward=forward, backward=passes * forward)


def layer_costs(config: JobConfig, spec: ModelSpec) -> tuple[LayerCost, ...]:
    """FLOPs of one sample by layer, as this job computes them. Recompute covers every layer, the head too.

    The embedding multiplies nothing; it gets one FLOP per element that it looks up, so that no layer is free.
    """
    sequence, recompute = config.train.sequence, config.train.recompute == "full"
    lookup = float(sequence * config.model.hidden)
    return tuple(LayerCost(forward=lookup, backward=lookup) if layer.kind == "embedding"
                 else layer_flops(layer, sequence, recompute=recompute) for layer in spec.layers)


def stage_cost(costs: tuple[LayerCost, ...], layers: range) -> LayerCost:
    """Sum over the layers of a stage."""
    return sum((costs[i] for i in layers), LayerCost(forward=0.0, backward=0.0))


def op_cost(op: Op, stages: tuple[LayerCost, ...]) -> float:
    """Cost of a compute op, given the cost of one micro-batch by stage; sends and receives cost nothing themselves."""
    match op.kind:
        case Kind.FORWARD:
            return stages[op.stage].forward
        case Kind.BACKWARD:
            return stages[op.stage].backward
    return 0.0


def model_flops_per_token(spec: ModelSpec, sequence: int, *, causal: bool = True) -> float:
    """FLOPs that training needs per token: forward and full backward, without recompute."""
    return 3 * sum(layer.forward_flops(sequence, causal=causal) for layer in spec.layers) / sequence


def model_flops_utilization(flops_per_token: float, *, tokens_per_s: float, num_ranks: int, peak_flops: float) -> float:
    """MFU: share of the peak (`peak_flops` per rank and second) that goes into FLOPs the model needs."""
    return flops_per_token * tokens_per_s / (num_ranks * peak_flops)
