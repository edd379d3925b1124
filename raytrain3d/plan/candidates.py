"""Layouts of a job that could run on a number of ranks: the space that a search goes through.

Rules of placement: a tensor group stays inside a node and fills it evenly; every replica gets the same number of
micro-batches; a stage keeps at least one layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from raytrain3d.config import JobConfig, MeshConfig, PipelineConfig, TrainConfig
from raytrain3d.errors import ConfigError
from raytrain3d.plan.catalogue import Node

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
SCHEDULES: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4),
                                          ("zb_h1", 1), ("zb_v", 2))
"""Schedule and chunks. GPipe holds more than 1F1B and gains nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What a search may choose. Each is a tuple of values to try."""

    schedules: tuple[tuple[str, int], ...] = SCHEDULES
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    shardings: tuple[str, ...]
    recomputes: tuple[str, ...]
    sequence_parallel: tuple[bool, ...] = (False, True)
    tensors: tuple[int, ...] | None = None
    """Absent: all that divide a node."""
    pipelines: tuple[int, ...] | None = None
    """Absent: all that divide the ranks."""


def whole_space() -> Space:
    """Every level that a job file knows, whatever the version."""
    return Space(shardings=_levels("sharding"), recomputes=_levels("recompute"))


def _levels(key: str) -> tuple[str, ...]:
    return tuple(level for level in get_args(get_type_hints(TrainConfig)[key]) if level != "auto")


def candidates(config: JobConfig, num_ranks: int, node: Node, space: Space) -> Iterator[JobConfig]:
    """Every job like `config` on `num_ranks` ranks that is valid."""
    for mesh in meshes(config, num_ranks, node, space):
        for train in _trainings(config, mesh, space):
            for schedule, chunks in space.schedules if mesh.pipeline > 1 else (("1f1b", 1),):
                yield from _valid(config, mesh, schedule, chunks, train)


def meshes(config: JobConfig, num_ranks: int, node: Node, space: Space) -> Iterator[MeshConfig]:
    """Meshes of `num_ranks` ranks, tensor groups inside a node."""
    for tensor in space.tensors or divisors(node.devices):
        rest, remainder = divmod(num_ranks, tensor)
        for pipeline in () if remainder else space.pipelines or divisors(rest):
            data, left = divmod(rest, pipeline)
            if not left and pipeline <= config.model.blocks + 2 and data <= config.train.global_batch:
                yield MeshConfig(data=data, pipeline=pipeline, tensor=tensor)


def _trainings(config: JobConfig, mesh: MeshConfig, space: Space) -> Iterator[dict[str, Any]]:
    for micro_batch in space.micro_batches:
        if config.train.global_batch % (micro_batch * mesh.replicas):
            continue
        for recompute in space.recomputes:
            for sharding in space.shardings if mesh.replicas > 1 else space.shardings[:1]:
                for sequence_parallel in space.sequence_parallel if mesh.tensor > 1 else (False,):
                    yield {"micro_batch": micro_batch, "recompute": recompute, "sharding": sharding,
                           "sequence_parallel": sequence_parallel}


def _valid(config: JobConfig, mesh: MeshConfig, schedule: str, chunks: int, train: dict[str, Any]) -> Iterator[JobConfig]:
    try:
        pipeline = PipelineConfig(schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
        yield replace(config, mesh=mesh, pipeline=pipeline, train=replace(config.train, **train))
    except ConfigError:  # what the job's own rules refuse is no candidate
        return


def divisors(number: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, number + 1) if number % i == 0)
