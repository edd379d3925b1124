"""Tensor parallelism as a table, applied to a layer from outside (https://arxiv.org/abs/1909.08053).

Which slice of a matrix a rank holds is in the parameter manifest. What the activations need is here: inputs of column
slices are entered, outputs of row slices are reduced, vocabulary slices know their first row. A block costs two
all-reduces forward and two backward. With sequence parallelism each of them is cut in two halves, between which
(norms, dropout, residual stream, messages between stages) a rank has its part of every sequence only.
"""

from typing import Any

from raytrain3d.parallel.collectives import ReduceValue, enter, reduce
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


def apply_tensor_parallelism(layer: Any, group: Group, *, heads: int, sequence_parallel: bool) -> None:
    """Fill the seams of one layer whose parameters are bound already. `heads`: of the whole model."""
    before = enter(group, sequence_parallel=sequence_parallel)
    behind = reduce(group, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        layer.sequence_part, layer.sequence_parts = group.index, group.size
    modules: dict[str, Any] = dict(layer.named_modules())
    for path, style in TABLE.items():
        module = modules.get(path)
        if module is None:
            continue
        match style:
            case "row slice":
                module.reduce = behind
            case "column slices":
                module.enter = before
            case "heads":
                module.enter = before
                module.first_head = group.index * (heads // group.size)
            case "vocabulary rows":
                module.first_row = group.index * module.weight.shape[0]
                module.reduce = behind
            case "vocabulary columns":
                layer.first_row = group.index * module.weight.shape[0]
                layer.enter = before
                layer.maximum, layer.total = ReduceValue(group, maximum=True), ReduceValue(group)
