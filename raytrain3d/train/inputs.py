"""What a step's layers are given from outside: tokens, targets, where documents lie, and the keys of dropout masks.

On a GPU micro-batches lie in pinned memory, where the loader's thread puts them a step ahead. So copies to the device are
issued like kernels, in order with the compute that reads them, and nobody waits for them.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from raytrain3d.config import TrainConfig
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.model.dropout import DropoutKeys
from raytrain3d.model.packing import Packing, packing
from raytrain3d.parallel.layer_state import DTYPES
from raytrain3d.parallel.pipeline import Feed


def feed(micro_batches: Sequence[MicroBatch], train: TrainConfig, *, step: int | None, head: int,
         device: torch.device) -> Feed:
    """Of one run. step: keys the dropout masks; None: evaluation, nothing is dropped. head: index of the last layer."""
    def tokens(i: int) -> Tensor:
        return micro_batches[i].tokens.to(device, non_blocking=True)

    @lru_cache(maxsize=1)  # the layers of an op share one; what waits for its backward keeps its own
    def documents(i: int) -> Packing | None:
        starts = micro_batches[i].starts
        return None if starts is None else packing(starts.to(device, non_blocking=True), DTYPES[train.dtype])

    def arguments(i: int, layer: int) -> tuple[Tensor | DropoutKeys | Packing | None, ...]:
        if layer == head:
            return (micro_batches[i].targets.to(device, non_blocking=True),)
        if step is None:
            return None, documents(i)
        return DropoutKeys(seed=train.seed, step=step, samples=micro_batches[i].samples), documents(i)

    return Feed(tokens, arguments, len(micro_batches))
