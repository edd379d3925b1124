"""Which layers compute again, before their backward, what they did not keep. Exact: dropout masks are pure functions too.

| kind        | kept                            | computed again                                         |
|-------------|---------------------------------|--------------------------------------------------------|
| `none`      | what the backward needs         | nothing                                                |
| `selective` | all but the inside of attention | scores, softmax, dropout, sum over values              |
| `full`      | the input of the block          | its forward                                            |

After https://arxiv.org/abs/2205.05198. Only blocks do so: an embedding keeps next to nothing, and the head costs the most to
compute and keeps the least for it.
"""

from collections.abc import Callable
from functools import cache

from raytrain3d.config import JobConfig, Recompute
from raytrain3d.plan.params import LayerSpec, ModelSpec


def recompute_kind(config: JobConfig, layer: LayerSpec, stage: int) -> Recompute:
    """Of a layer when it is on `stage`."""
    if layer.kind != "block" or (layer.index - 1) % config.train.recompute_every:
        return "none"
    by_stage = config.pipeline.recompute
    return config.train.recompute if by_stage is None else by_stage[stage]


def repeated_share(config: JobConfig, layer: LayerSpec, stage: int) -> float:
    """How much of its forward's FLOPs a layer computes again."""
    match recompute_kind(config, layer, stage):
        case "none":
            return 0.0
        case "selective":
            whole = layer.forward_flops(config.train.sequence)
            return 1 - 2 * layer.matmul_parameters * config.train.sequence / whole
        case "full":
            return 1.0


def repeats(config: JobConfig, spec: ModelSpec) -> Callable[[int, int], float]:
    """(stage, layer) -> `repeated_share`."""
    return cache(lambda stage, layer: repeated_share(config, spec.layers[layer], stage))


def describe(config: JobConfig) -> str:
    """`none`, `full, one block of 2`, `full | selective | none | none by stage`."""
    by_stage, every = config.pipeline.recompute, config.train.recompute_every
    kinds = config.train.recompute if by_stage is None else f"{' | '.join(by_stage)} by stage"
    return kinds if every == 1 or kinds == "none" else f"{kinds}, one block of {every}"
