"""What to shard over the data axis: what each level sends, and which one `train.sharding: auto` takes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from raytrain3d.config import JobConfig

Level = Literal["none", "optimizer", "gradients", "full"]
LEVELS: tuple[Level, ...] = ("none", "optimizer", "gradients", "full")
"""In the order of what they send; of equals the simpler one first."""


def volumes(sharding: str, keep_gathered: str, num_micro_batches: int) -> int:
    """What a rank sends over the data axis in a step, in volumes of (d - 1) / d times its parameters' bytes.

    An all-reduce is 2, a reduce-scatter or an all-gather 1. `gradients` scatters for every micro-batch and gathers the
    updated weights; `full` gathers once a step, or for every forward and every backward. At most: a layer that is used
    twice in a row is gathered once.
    """
    match sharding, keep_gathered:
        case "none" | "optimizer", _:
            return 2
        case "full", "op":
            return 3 * num_micro_batches
        case _:
            return num_micro_batches + 1


def with_any_sharding(config: JobConfig) -> Iterator[JobConfig]:
    """The job under every sharding that it may have, least sent first. Weights that stay gathered through a step need no
    less than those of `gradients`, so `auto` leaves them out."""
    train = config.train
    if train.sharding != "auto":
        yield config
        return
    for sharding in LEVELS if config.mesh.replicas > 1 else LEVELS[:1]:
        yield replace(config, train=replace(train, sharding=sharding, keep_gathered="op"))
