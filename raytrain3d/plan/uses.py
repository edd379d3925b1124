"""A rank's program layer by layer: in which order its ops use weights, and in which of them matrices get their gradient."""

from collections.abc import Iterable, Mapping, Sequence

from raytrain3d.config import TrainConfig
from raytrain3d.plan.params import LayerSpec
from raytrain3d.plan.program import STEP
from raytrain3d.plan.schedule import Kind, Op

Use = tuple[Kind, int]
"""Kind of an op, and a layer that it goes through."""


def in_order(kind: Kind, layers: Sequence[int]) -> list[int]:
    """Layers of a stage as an op goes through them."""
    return list(layers) if kind is Kind.FORWARD else list(reversed(layers))


def layer_uses(ops: Iterable[Op], stages: Mapping[int, Sequence[int]]) -> list[Use]:
    """Everything that a rank computes, in the order of its program. stages: stage -> its layers."""
    return [(op.kind, layer) for op in ops if op.kind not in STEP for layer in in_order(op.kind, stages[op.stage])]


def makes_gradient(kind: Kind, layer: LayerSpec, train: TrainConfig) -> bool:
    """Whether an op adds to the gradients of the layer's matrices. Where a backward is split that is the weight gradient;
    the embedding has its in the input gradient. A head that goes through its tokens in chunks makes its own in its
    forward."""
    if layer.kind == "head" and train.loss_chunk is not None:
        return kind is Kind.FORWARD
    split = Kind.BACKWARD_INPUT if layer.kind == "embedding" else Kind.BACKWARD_WEIGHT
    return kind in (Kind.BACKWARD, split)
