"""FLOPs of layers and steps, and what share of a device's peak a measured speed is.

Counting: 2 FLOPs per weight and token, attention as in `LayerSpec.forward_flops`, norms and activations not counted.
With dense attention the sums are the formulas of https://arxiv.org/abs/2104.04473 (72 and 96 B s L h^2 ...).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raytrain3d.config import JobConfig
from raytrain3d.plan.params import LayerSpec, ModelSpec
from raytrain3d.plan.schedule import Kind, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Work of one layer, or of a row of layers, in any one unit (FLOPs or seconds)."""

    forward: float
    backward_input: float
    """Input gradient, recompute included."""
    backward_weight: float

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "LayerCost") -> "LayerCost":
        return LayerCost(forward=self.forward + other.forward,
                         backward_input=self.backward_input + other.backward_input,
                         backward_weight=self.backward_weight + other.backward_weight)

    def repeating(self, share: float) -> "LayerCost":
        """With so much of the forward computed again before the backward."""
        if not share:
            return self
        return LayerCost(forward=self.forward, backward_input=self.backward_input + share * self.forward,
                         backward_weight=self.backward_weight)

    def __mul__(self, factor: float) -> "LayerCost":
        return LayerCost(forward=self.forward * factor, backward_input=self.backward_input * factor,
                         backward_weight=self.backward_weight * factor)


NO_COST = LayerCost(forward=0.0, backward_input=0.0, backward_weight=0.0)


def layer_flops(layer: LayerSpec, sequence: int, *, causal: bool = True) -> LayerCost:
    """FLOPs of one sample through one layer, over all tensor ranks, without recompute.

    The backward costs a forward for the input gradient and another for the weight gradient (a frozen layer saves it).
    """
    forward = layer.forward_flops(sequence, causal=causal)
    return LayerCost(forward=forward, backward_input=forward, backward_weight=0.0 if layer.frozen else forward)


def layer_costs(config: JobConfig, spec: ModelSpec) -> tuple[LayerCost, ...]:
    """FLOPs of one sample by layer, without recompute.

    The embedding multiplies nothing; it gets one FLOP per element that it looks up, so that no layer is free. A head that
    goes through its tokens in chunks makes all gradients in its forward.
    """
    sequence = config.train.sequence
    lookup = float(sequence * config.model.hidden)

    def cost(layer: LayerSpec) -> LayerCost:
        flops = layer_flops(layer, sequence)
        if layer.kind == "embedding":
            return LayerCost(forward=lookup, backward_input=lookup, backward_weight=0.0)
        if layer.kind == "head" and config.train.loss_chunk is not None:
            return LayerCost(forward=flops.total, backward_input=lookup, backward_weight=0.0)
        return flops

    return tuple(map(cost, spec.layers))


def stage_cost(costs: Sequence[LayerCost], layers: range, repeated: Callable[[int], float] = lambda layer: 0.0) -> LayerCost:
    """Sum over the layers of a stage. repeated: share of a layer's forward that is computed again."""
    return sum((costs[i].repeating(repeated(i)) for i in layers), NO_COST)


def op_cost(op: Op, stages: tuple[LayerCost, ...]) -> float:
    """Cost of a compute op, given the cost of one micro-batch by stage; sends and receives cost nothing themselves."""
    match op.kind:
        case Kind.FORWARD:
            return stages[op.stage].forward
        case Kind.BACKWARD:
            return stages[op.stage].backward
        case Kind.BACKWARD_INPUT:
            return stages[op.stage].backward_input
        case Kind.BACKWARD_WEIGHT:
            return stages[op.stage].backward_weight
    return 0.0


def model_flops_per_token(spec: ModelSpec, sequence: int, *, causal: bool = True) -> float:
    """FLOPs that training needs per token: forward and full backward, without recompute."""
    return 3 * sum(layer.forward_flops(sequence, causal=causal) for layer in spec.layers) / sequence


def model_flops_utilization(flops_per_token: float, *, tokens_per_s: float, num_ranks: int, peak_flops: float) -> float:
    """MFU: share of the peak (`peak_flops` per rank and second) that goes into FLOPs the model needs."""
    return flops_per_token * tokens_per_s / (num_ranks * peak_flops)
