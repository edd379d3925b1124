"""The smallest change of a job that makes it fit: one key, else two, else as many as it takes, else more ranks.

Among changes of as many keys the smallest is the one after which a step is shortest. Every change that is named was tried:
the changed job fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.errors import ConfigError, PlanError
from raytrain3d.plan.sharding import LEVELS

Fit = Callable[[JobConfig], float | None]
"""A step of the job, in any unit of time; None if it does not fit, or is no valid job."""
Change = tuple[tuple[str, str, Any], ...]
"""(section, key, value) of one thing that changes."""
CHUNK = 1024
"""Tokens whose logits exist at a time, where memory is short."""
SHOWN = 3
MOST_RANKS = 8
"""Times as many ranks, at most, that are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Changes that together make a job fit."""

    changes: tuple[Change, ...]
    step: float
    """In the unit of `Fit`."""

    def __str__(self) -> str:
        """As overrides of the command line: `train.recompute=full train.micro_batch=1`."""
        return " ".join(f"{section}.{key}={_yaml(value)}" for change in self.changes for section, key, value in change)


def remedies(config: JobConfig, fit: Fit) -> tuple[Remedy, ...]:
    """Ways to make `config` fit, the smallest first; nothing if none was found, or if it fits as it is."""
    if fit(config) is not None:
        return ()
    on_same = _fewest_changes(config, tuple(_savers(config)), fit)
    return (*on_same, *_more_ranks(config, fit))


def remedy_text(found: Sequence[Remedy]) -> str:
    """`the smallest change that fits: train.recompute=full; so do ... or ...`. Empty without any."""
    if not found:
        return ""
    first, *others = map(str, found[:SHOWN])
    also = f"; so do {' or '.join(others)}" if others else ""
    return f"the smallest change that fits: {first}{also}"


def changed(config: JobConfig, changes: Sequence[Change]) -> JobConfig | None:
    """The job after the changes; None if its own rules refuse it."""
    sections: dict[str, dict[str, Any]] = {}
    for section, key, value in (part for change in changes for part in change):
        sections.setdefault(section, {})[key] = value
    try:
        return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})
    except ConfigError:
        return None


def _fewest_changes(config: JobConfig, savers: Sequence[Change], fit: Fit) -> tuple[Remedy, ...]:
    for count in (1, 2):
        found = list(_fitting(config, combinations(savers, count), fit))
        if found:
            return tuple(sorted(found, key=lambda remedy: remedy.step))
    strongest = tuple({_key(change): change for change in savers}.values())  # of one key the last value saves most
    if (step := _fit_after(config, strongest, fit)) is None:
        return ()
    for change in strongest:  # leave out what is not needed
        rest = tuple(kept for kept in strongest if kept != change)
        if (without := _fit_after(config, rest, fit)) is not None:
            strongest, step = rest, without
    return (Remedy(changes=strongest, step=step),)


def _fitting(config: JobConfig, choices: Iterator[tuple[Change, ...]], fit: Fit) -> Iterator[Remedy]:
    for changes in choices:
        if len({_key(change) for change in changes}) == len(changes):
            step = _fit_after(config, changes, fit)
            if step is not None:
                yield Remedy(changes=changes, step=step)


def _fit_after(config: JobConfig, changes: Sequence[Change], fit: Fit) -> float | None:
    job = changed(config, changes)
    return None if job is None else fit(job)


def _key(change: Change) -> tuple[str, str]:
    return change[0][:2]


def _savers(config: JobConfig) -> Iterator[Change]:
    """What lowers the memory of a rank on the same ranks, of one key the stronger value later."""
    train, mesh, pipeline = config.train, config.mesh, config.pipeline
    yield from _more_recompute(config)
    if mesh.replicas > 1 and not mesh.is_elastic and train.sharding in LEVELS:
        for level in LEVELS[LEVELS.index(train.sharding) + 1:]:
            yield (("train", "sharding", level),)
    if mesh.tensor > 1 and not train.sequence_parallel:
        yield (("train", "sequence_parallel", True),)
    yield from ((("train", "micro_batch", size),) for size in _smaller(train.micro_batch))
    if train.loss_chunk is None or train.loss_chunk > CHUNK:
        yield (("train", "loss_chunk", CHUNK),)
    if mesh.pipeline > 1 and pipeline.schedule != "1f1b" and pipeline.layers is None and pipeline.recompute is None:
        rest = () if pipeline.chunks is None else (("pipeline", "chunks", None),)
        yield (("pipeline", "schedule", "1f1b"), *rest)
    if not train.offload_optimizer:
        yield (("train", "offload_optimizer", True),)


def _more_recompute(config: JobConfig) -> Iterator[Change]:
    train, by_stage = config.train, config.pipeline.recompute
    if by_stage is not None:
        if set(by_stage) != {"full"}:
            yield (("pipeline", "recompute", ("full",) * len(by_stage)),)
    elif train.recompute != "full":
        if train.recompute == "none" and config.model.attention_dropout:  # fused attention keeps nothing that is quadratic
            yield (("train", "recompute", "selective"),)
        yield (("train", "recompute", "full"),)
    if train.recompute_every > 1:
        yield (("train", "recompute_every", 1),)


def _smaller(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size


def _more_ranks(config: JobConfig, fit: Fit) -> tuple[Remedy, ...]:
    """The fewest more ranks along one axis, with nothing else changed. A split or recompute by stage stays behind."""
    mesh, free = config.mesh, replace(config.pipeline, layers=None, recompute=None)
    shares = config.train.sharding != "none"  # replicas that share nothing need as much each
    sizes = {"pipeline": mesh.pipeline, "tensor": mesh.tensor} | ({"data": mesh.replicas} if shares else {})
    for factor in range(2, MOST_RANKS + 1):
        wider = [((("mesh", axis, factor * size),),) for axis, size in sizes.items()]
        found = list(_fitting(replace(config, pipeline=free), iter(wider), fit))
        if found:
            return (min(found, key=lambda remedy: remedy.step),)
    return ()


def fit_of(step_of: Callable[[JobConfig], float | None]) -> Fit:
    """`step_of`, and None for jobs that have no plan."""
    def fit(config: JobConfig) -> float | None:
        try:
            return step_of(config)
        except (ConfigError, PlanError):
            return None
    return fit


def _yaml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case tuple():
            return f"[{','.join(map(str, value))}]"
    return str(value)
