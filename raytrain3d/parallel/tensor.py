"""Tensor parallelism as a table, applied to a layer from outside (https://arxiv.org/abs/1909.08053).

Which slice of a matrix a rank holds is in the parameter manifest. What the activations need is here: inputs of column
slices are entered, outputs of row slices are reduced, vocabulary slices know their first row. A block costs two
all-reduces forward and two backward.
"""

from typing import Any

from torch import nn

from raytrain3d.parallel.collectives import Enter, Reduce, ReduceValue
from raytrain3d.parallel.groups import Group

TABLE = {
    "tokens": "vocabulary rows",
    "attention": "heads",
    "attention.output": "row slice",
    "mlp": "column slices",
    "mlp.down": "row slice",
    "output": "vocabulary columns",
}
"""Module path inside a layer -> how it is divided."""


def apply_tensor_parallelism(layer: nn.Module, group: Group, *, heads: int) -> None:
    """Fill the seams of one layer whose parameters are bound already. `heads`: of the whole model."""
    modules: dict[str, Any] = dict(layer.named_modules())
    for path, style in TABLE.items():
        module = modules.get(path)
        if module is None:
            continue
        match style:
            case "row slice":
                module.reduce = Reduce(group)
            case "column slices":
                module.enter = Enter(group)
            case "heads":
                module.enter = Enter(group)
                module.first_head = group.index * (heads // group.size)
            case "vocabulary rows":
                module.first_row = group.index * module.weight.shape[0]
                module.reduce = Reduce(group)
            case "vocabulary columns":
                head: Any = layer
                head.first_row = group.index * module.weight.shape[0]
                head.enter = Enter(group)
                head.maximum, head.total = ReduceValue(group, maximum=True), ReduceValue(group)
