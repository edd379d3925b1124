"""What would fit: the change that is named fits, and no smaller one does."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.remedy import Remedy, changed, fit_of, remedies, remedy_text

Job = Callable[..., JobConfig]


def memory(config: JobConfig) -> float:
    """Most bytes on a rank."""
    return max(estimate.memory.total for estimate in make_plan(config).estimates)


def limited(config: JobConfig, limit: float) -> JobConfig:
    return replace(config, placement=replace(config.placement, memory_per_rank_gib=limit / 2**30))


def after(config: JobConfig, remedy: Remedy) -> JobConfig:
    job = changed(replace(config, pipeline=replace(config.pipeline, layers=None)), remedy.changes)
    assert job is not None
    return job


def found_for(config: JobConfig, limit: float) -> tuple[Remedy, ...]:
    return remedies(config, fit_of(lambda job: None if memory(job) > limit else 1.0))


def test_nothing_to_change_where_it_fits(job: Job) -> None:
    config = job(pipeline=2)
    assert found_for(config, memory(config)) == ()
    assert remedy_text(()) == ""


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.4, 0.25])
def test_named_changes_fit_and_fewer_do_not(job: Job, share: float) -> None:
    config = job(data=2, pipeline=2, micro_batch=4, sequence=128, blocks=8)
    limit = share * memory(config)
    found = found_for(config, limit)
    assert found
    for remedy in found:
        assert memory(after(config, remedy)) <= limit
        for left_out in remedy.changes:
            rest = tuple(change for change in remedy.changes if change != left_out)
            assert memory(after(config, Remedy(changes=rest, step=0))) > limit, f"{remedy} needs no {left_out}"


def test_the_smallest_change_costs_the_least_step_time(job: Job) -> None:
    config = job(data=2, pipeline=2, micro_batch=4, sequence=256)
    times = {"train.recompute=full": 1.3, "train.micro_batch=2": 1.1, "train.micro_batch=1": 1.2}

    def step_of(changed_job: JobConfig) -> float | None:
        train = changed_job.train
        if (train.recompute, train.micro_batch) == ("full", 4):
            return 1.3
        return {2: 1.1, 1: 1.2}.get(train.micro_batch) if train.recompute == "none" else None

    same_ranks = [str(remedy) for remedy in remedies(config, step_of) if "mesh" not in str(remedy)]
    assert same_ranks == sorted(times, key=lambda text: times[text])


def test_more_ranks_are_named_beside(job: Job) -> None:
    """When no key of the job helps enough, and as an alternative."""
    config = job(data=1, pipeline=2, blocks=14)
    limit = memory(job(data=1, pipeline=6, blocks=14))
    *_, last = found_for(config, limit)
    assert str(last).startswith("mesh.")
    assert memory(after(config, last)) <= limit


def test_nothing_helps(job: Job) -> None:
    assert found_for(job(data=2, pipeline=2), 1000) == ()


def test_a_plan_that_is_refused_names_the_smallest_change(job: Job) -> None:
    config = job(data=2, pipeline=2, micro_batch=4, sequence=128, blocks=8)
    limit = 0.7 * memory(config)
    with pytest.raises(PlanError, match=r"less is needed with .*; the smallest change that fits: ") as caught:
        make_plan(limited(config, limit))
    first = str(caught.value).partition("the smallest change that fits: ")[2].partition(";")[0]
    sections = {"train": config.train}
    for text in first.split():
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        kind = type(getattr(sections[section], name))
        sections[section] = replace(sections[section], **{name: value == "true" if kind is bool else kind(value)})
    make_plan(limited(replace(config, train=sections["train"]), limit))


def test_text_is_overrides() -> None:
    many = [Remedy(changes=((("train", "offload_optimizer", True),), (("train", "micro_batch", 1),)), step=1),
            Remedy(changes=((("pipeline", "recompute", ("full", "full")),),), step=2),
            Remedy(changes=((("pipeline", "schedule", "1f1b"), ("pipeline", "chunks", None)),), step=2)]
    assert remedy_text(many) == ("the smallest change that fits: train.offload_optimizer=true train.micro_batch=1; so do "
                                 "pipeline.recompute=[full,full] or pipeline.schedule=1f1b pipeline.chunks=null")
