"""The layout that rules of thumb give: tensor parallelism as wide as a node, the pipeline as deep as memory needs, then the
micro-batch that is fastest. A search shows it beside what it has found."""

from dataclasses import replace

from raytrain3d.config import JobConfig, MeshConfig, PipelineConfig, Recompute
from raytrain3d.errors import ConfigError
from raytrain3d.plan.candidates import MICRO_BATCHES, divisors
from raytrain3d.plan.search import Choice, Evaluator


def folklore(config: JobConfig, num_ranks: int, evaluator: Evaluator) -> Choice | None:
    """1F1B, optimizer state sharded, without recompute if that fits at all. None: nothing of the kind fits."""
    for recompute in ("none", "full"):
        for tensor in reversed(divisors(evaluator.cluster.node.devices)):
            for pipeline in divisors(num_ranks // tensor) if num_ranks % tensor == 0 else ():
                found = _tuned(config, num_ranks, pipeline, tensor, recompute, evaluator)
                if found is not None:
                    return found
    return None


def _tuned(config: JobConfig, num_ranks: int, pipeline: int, tensor: int, recompute: Recompute,
           evaluator: Evaluator) -> Choice | None:
    """The fastest micro-batch that fits; they grow as long as they do."""
    fitting: list[Choice] = []
    for micro_batch in MICRO_BATCHES:
        job = _job(config, num_ranks, pipeline, tensor, recompute, micro_batch)
        choice = None if job is None else evaluator.evaluate(job)
        if choice is None or not choice.fits():
            break
        fitting.append(choice)
    return min(fitting, key=lambda choice: choice.step.total, default=None)


def _job(config: JobConfig, num_ranks: int, pipeline: int, tensor: int, recompute: Recompute,
         micro_batch: int) -> JobConfig | None:
    """None if there is no such job."""
    data, train = num_ranks // (pipeline * tensor), config.train
    if train.global_batch % (micro_batch * data):
        return None
    try:
        return replace(config, mesh=MeshConfig(data=data, pipeline=pipeline, tensor=tensor), pipeline=PipelineConfig(),
                       train=replace(train, micro_batch=micro_batch, recompute=recompute, sequence_parallel=tensor > 1,
                                     sharding="optimizer" if data > 1 else "none", shard_group=None))
    except ConfigError:
        return None
