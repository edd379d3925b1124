"""The fastest layout of a job that fits its devices.

Every candidate gets a bound that costs microseconds: no split of its layers is faster. In the order of these bounds
candidates are split, bounded again, simulated and checked against memory, until the bounds pass the best step found. Each
candidate has one split, the one whose slowest stage is fastest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.candidates import Space, candidates, whole_space
from raytrain3d.plan.cost import model_flops_per_token, op_cost
from raytrain3d.plan.device_memory import Allocation, DeviceMemory, device_memory, least_bytes, usable_bytes
from raytrain3d.plan.params import ModelSpec, model_spec
from raytrain3d.plan.partition import Stages, split_by_cost, split_by_counts
from raytrain3d.plan.program import Programs, programs_for
from raytrain3d.plan.simulate import Timeline, simulate
from raytrain3d.plan.step_time import Cluster, StepTime, StepTimer, simulated_micro_batches
from raytrain3d.plan.table import counted

TIE = 3e-3
"""Steps within this are equal: then less memory wins."""
MOST_RANKS = 64
"""Times as many ranks, at most, that are tried when nothing fits."""
NEARER = 8
"""Numbers of ranks that are tried between one that is too small and twice as many."""
LESS_MEMORY = (0.5,)
"""Shares of a device's memory within which the fastest layout is shown beside the best."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout with its split, timed."""

    timer: StepTimer
    stages: Stages
    step: StepTime
    allocation: Allocation

    @cached_property
    def config(self) -> JobConfig:
        """The job, with `pipeline.layers`."""
        job = self.timer.config
        return replace(job, pipeline=replace(job.pipeline, layers=tuple(end - first for first, end in self.stages)))

    @property
    def num_ranks(self) -> int:
        return self.timer.mesh.size

    @cached_property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """By pipeline rank."""
        return tuple(map(self.memory_of, range(self.timer.mesh.pipeline)))

    def memory_of(self, rank: int) -> DeviceMemory:
        timer = self.timer
        launching = sum(time.launch.total for time in timer.layer_times)
        computing = sum((time.compute + time.tensor).total for time in timer.layer_times)
        return device_memory(timer.config, timer.spec, self.stages, self._programs, rank, allocation=self.allocation,
                             launching_s=launching, computing_s=computing)

    def timeline(self) -> Timeline:
        """The pipeline of a replica, simulated with the seconds of its stages; of many micro-batches the first ones."""
        costs = self.timer.stage_costs(self.stages)
        return simulate(self._programs, lambda op: op_cost(op, costs), hop_s=self.timer.hop_s)

    @property
    def _programs(self) -> Programs:
        timer, pipeline = self.timer, self.timer.config.pipeline
        count = simulated_micro_batches(timer.mesh.pipeline, timer.num_micro_batches)
        return programs_for(pipeline.schedule, timer.mesh.pipeline, count, pipeline.num_chunks)

    @property
    def limit(self) -> float:
        """Bytes that can be had of a device."""
        return usable_bytes(self.timer.cluster.node, self.allocation)

    @property
    def needed(self) -> float:
        """Bytes on the fullest rank."""
        return max(memory.needed for memory in self.memory)

    def fits(self, share: float = 1.0) -> bool:
        """Whether every rank keeps to `share` of a device. The first and the last are asked first: mostly they decide."""
        ends = (self.memory_of(rank).needed for rank in {0, self.timer.mesh.pipeline - 1})
        return all(needed <= share * self.limit for needed in ends) and self.needed <= share * self.limit

    @property
    def tokens_per_s(self) -> float:
        train = self.config.train
        return train.global_batch * train.sequence / self.step.total

    @property
    def flops_per_s(self) -> float:
        """FLOPs that the model needs, a second and rank; of attention the causal half."""
        return (self.tokens_per_s * model_flops_per_token(self.timer.spec, self.config.train.sequence) / self.num_ranks)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Splits and times layouts of one job on one cluster."""

    cluster: Cluster
    allocation: Allocation
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def limit(self) -> float:
        """Bytes that can be had of a device."""
        return usable_bytes(self.cluster.node, self.allocation)

    def timer(self, config: JobConfig) -> StepTimer:
        key = config.mesh.tensor, config.train.sequence_parallel
        if key not in self.known:
            self.known[key] = model_spec(config.model, config.train, config.mesh.tensor)
        spec: ModelSpec = self.known[key]
        return StepTimer(config=config, spec=spec, cluster=self.cluster, known=self.known)

    def evaluate(self, config: JobConfig) -> Choice:
        """Of the job's own split if it has one, else of the one whose slowest stage is fastest."""
        timer = self.timer(config)
        return self.choice(timer, stages_of(timer))

    def choice(self, timer: StepTimer, stages: Stages) -> Choice:
        return Choice(timer=timer, stages=stages, step=timer.time(stages), allocation=self.allocation)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found."""

    best: Choice
    """Fastest that fits."""
    smaller: tuple[Choice, ...]
    """Fastest within LESS_MEMORY of a device, where that is another one."""
    roomy: Choice
    """Fastest if devices had all the memory in the world; `best` itself where memory is no limit."""
    num_candidates: int
    num_simulated: int


class Search:
    """Finds the fastest layout of `config` on a number of ranks, within any share of a device's memory."""

    def __init__(self, config: JobConfig, num_ranks: int, evaluator: Evaluator, space: Space) -> None:
        self._evaluator = evaluator
        timers = map(evaluator.timer, candidates(config, num_ranks, evaluator.cluster.node, space))
        self._bounded = sorted(((timer.ideal_s(), timer) for timer in timers), key=lambda pair: pair[0])
        self._choices: dict[int, Choice] = {}

    def run(self) -> Found | None:
        """None: nothing fits."""
        best = self.fastest()
        if best is None:
            return None
        smaller = [self.fastest(share) for share in LESS_MEMORY]
        others = {id(choice): choice for choice in smaller if choice is not None and choice is not best}
        roomy = self.fastest(inf) or best
        return Found(best=best, smaller=tuple(others.values()), roomy=roomy, num_candidates=len(self._bounded),
                     num_simulated=len(self._choices))

    def fastest(self, share: float = 1.0) -> Choice | None:
        """Within `share` of a device's memory; of equally fast ones the smallest."""
        equal: list[Choice] = []
        least = inf
        for i, (bound, timer) in enumerate(self._bounded):
            if bound > least * (1 + TIE):
                break
            if self._least_bytes(timer) > share * self._evaluator.limit:
                continue
            choice = self._choice(i, least * (1 + TIE))
            if choice is not None and choice.step.total <= least * (1 + TIE) and choice.fits(share):
                equal.append(choice)
                least = min(least, choice.step.total)
        return min((choice for choice in equal if choice.step.total <= least * (1 + TIE)),
                   key=lambda choice: choice.needed, default=None)

    def ranked(self, count: int) -> tuple[Choice, ...]:
        """The fastest that fit, in order, each of another mesh, schedule or micro-batch than those before it."""
        found: dict[object, Choice] = {}
        for i, (bound, _) in enumerate(self._bounded):
            ordered = sorted(found.values(), key=lambda choice: choice.step.total)[:count]
            limit = ordered[-1].step.total if len(ordered) == count else inf
            if bound > limit:
                break
            choice = self._choice(i, limit)
            if choice is not None and choice.step.total < limit and choice.fits():
                key = _kind_of(choice.timer.config)
                if key not in found or choice.step.total < found[key].step.total:
                    found[key] = choice
        return tuple(sorted(found.values(), key=lambda choice: choice.step.total)[:count])

    def _choice(self, i: int, limit: float) -> Choice | None:
        """Candidate `i`, simulated; None if its split already shows that it takes more than `limit` seconds."""
        if i not in self._choices:
            timer = self._bounded[i][1]
            stages = stages_of(timer)
            if timer.bound_s(stages) > limit:
                return None
            self._choices[i] = self._evaluator.choice(timer, stages)
        return self._choices[i]

    def _least_bytes(self, timer: StepTimer) -> float:
        return least_bytes(timer.config, timer.spec, sum(timer.elements), self._evaluator.allocation)


def search_layouts(config: JobConfig, num_ranks: int, evaluator: Evaluator) -> Found:
    """The fastest layout of `config` on that many ranks. PlanError, naming the smallest change that would do, if none fits.
    """
    node = evaluator.cluster.node
    found = Search(config, num_ranks, evaluator, whole_space()).run()
    if found is not None:
        return found
    raise PlanError(f"no layout of this job fits {counted(num_ranks, 'device')} of {node.name} "
                    f"({node.memory_gib:.0f} GiB each) under any sharding, recompute and micro-batch"
                    f"{_what_would_fit(config, num_ranks, evaluator)}")


def _what_would_fit(config: JobConfig, num_ranks: int, evaluator: Evaluator) -> str:
    """The smallest change: one key that a search leaves alone, else the fewest devices more."""
    on_host = replace(config, train=replace(config.train, offload_optimizer=True))
    ways = []
    if not config.train.offload_optimizer and (same := Search(on_host, num_ranks, evaluator, whole_space()).fastest()):
        ways.append(f"train.offload_optimizer=true is enough: {_needs(same)}")
    if (more := fewest_ranks(config, num_ranks, evaluator)) is not None:
        ways.append(f"{more.num_ranks} devices are enough: {_needs(more)}")
    if not ways:
        return (f", nor up to {MOST_RANKS} times as many: train.global_batch ({config.train.global_batch}) bounds the "
                f"replicas, {config.model.blocks + 2} layers bound the stages, so devices need more memory")
    return f"; the smallest change that fits: {'; else '.join(ways)}"


def _needs(choice: Choice) -> str:
    return f"{mesh_text(choice)} needs {choice.needed / 1e9:.1f} GB"


def fewest_ranks(config: JobConfig, num_ranks: int, evaluator: Evaluator) -> Choice | None:
    """The fastest layout on the fewest ranks above `num_ranks` on which one fits: twice as many until one does, then numbers
    between the last two, in whole nodes where those have several. None: MOST_RANKS times as many are not enough."""
    most = num_ranks
    while (most := 2 * most) <= MOST_RANKS * num_ranks:
        if _fits_somehow(config, most, evaluator):
            break
    else:
        return None
    least, devices = most // 2, evaluator.cluster.node.devices
    step = max(devices if least % devices == 0 else 1, least // NEARER)
    numbers = range(least + step, most, step)
    enough = next((number for number in numbers if _fits_somehow(config, number, evaluator)), most)
    return Search(config, enough, evaluator, whole_space()).fastest()


def _fits_somehow(config: JobConfig, num_ranks: int, evaluator: Evaluator) -> bool:
    """Whether layouts that spare memory at any price fit."""
    sparing = Space(schedules=(("1f1b", 1), ("zb_v", 2)), micro_batches=(1,), shardings=("full",), recomputes=("full",),
                    sequence_parallel=(True,))
    return Search(config, num_ranks, evaluator, sparing).fastest() is not None


def _kind_of(config: JobConfig) -> object:
    return config.mesh, config.pipeline.schedule, config.pipeline.num_chunks, config.train.micro_batch


def mesh_text(choice: Choice) -> str:
    """`data 2 x pipeline 4 x tensor 8`."""
    mesh = choice.config.mesh
    return f"data {mesh.replicas} x pipeline {mesh.pipeline} x tensor {mesh.tensor}"


def stages_of(timer: StepTimer) -> Stages:
    """The job's own split if it has one, else the one whose slowest stage is fastest."""
    pipeline = timer.config.pipeline
    if pipeline.layers is not None:
        return split_by_counts(pipeline.layers, len(timer.spec.layers))
    most = max(timer.layer_seconds)
    shares = tuple(round(seconds / most, 2) for seconds in timer.layer_seconds)  # alike jobs share a split
    return _split(shares, timer.mesh.pipeline * pipeline.num_chunks)


@lru_cache(maxsize=1024)
def _split(costs: Sequence[float], num_stages: int) -> Stages:
    return split_by_cost(costs, num_stages)
