"""Bytes on a rank, state and activations together, and what ranks lack under a limit.

Not counted: the framework, communication buffers, temporaries of a forward, fragmentation (`device_memory.py` does that).
"""

from collections.abc import Callable, Iterable, Mapping

from raytrain3d.config import JobConfig
from raytrain3d.plan.activations import activation_memory
from raytrain3d.plan.params import ModelSpec
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.program import Programs
from raytrain3d.plan.schedule import Op
from raytrain3d.plan.state_memory import Memory, layer_state_memory, transient_memory


def rank_memory(config: JobConfig, spec: ModelSpec, stages: Mapping[int, range], ops: Iterable[Op]) -> Memory:
    """Everything on a rank that holds `stages` (stage -> its layers) and runs `ops`."""
    held = spec.states_of(i for layers in stages.values() for i in layers)
    ops = tuple(ops)
    return (sum((layer_state_memory(state, config) for state in held), transient_memory(config, spec, stages, ops))
            + activation_memory(config, spec, stages, ops))


def missing_memory(config: JobConfig, spec: ModelSpec, programs: Programs) -> Callable[[Stages], float] | None:
    """By split: bytes that pipeline ranks lack under placement.memory_per_rank_gib, over all ranks; 0: it fits. None: there
    is no limit."""
    limit, rank_of = config.placement.memory_per_rank_gib, programs.schedule.rank_of
    if limit is None:
        return None

    def missing(stages: Stages) -> float:
        own = [{stage: range(*layers) for stage, layers in enumerate(stages) if rank_of(stage) == rank}
               for rank in range(programs.schedule.num_ranks)]
        needed = [rank_memory(config, spec, held, ops).total for held, ops in zip(own, programs.ops, strict=True)]
        return sum(max(0.0, each - limit * 2**30) for each in needed)

    return missing
