"""Micro-batches: the same tokens in every layout, one step ahead, and errors that reach the caller."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain3d.config import JobConfig, MeshConfig, SourceConfig
from raytrain3d.data.loader import Loader
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.data.manifest import DatasetManifest
from raytrain3d.data.mixture import Mixture
from raytrain3d.data.sampler import Sampler
from raytrain3d.data.tokens import Dataset
from raytrain3d.errors import DataError
from raytrain3d.plan.params import NO_LOSS
from raytrain3d.plan.plan import Plan, make_plan

Job = Callable[..., JobConfig]
Rows = dict[int, tuple[list[int], list[int]]]


def _plan(config: JobConfig, data: int, shares: tuple[int, ...] | None = None) -> Plan:
    plan = make_plan(replace(config, mesh=MeshConfig(data=data)))
    return plan if shares is None else replace(plan, shares=shares)


@pytest.fixture
def load() -> Iterator[Callable[[JobConfig, Plan, int], Loader]]:
    made: list[Loader] = []

    def make(config: JobConfig, plan: Plan, replica: int = 0) -> Loader:
        made.append(Loader(config, plan, replica))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def _rows(micro_batches: list[MicroBatch]) -> Rows:
    return {sample: (tokens, targets) for micro_batch in micro_batches for sample, tokens, targets in zip(
        micro_batch.samples, micro_batch.tokens.tolist(), micro_batch.targets.tolist(), strict=True)}


def test_rows_are_what_the_sampler_says(
        job: Job, load: Callable[..., Loader], dataset: tuple[Path, DatasetManifest]) -> None:
    config = job(micro_batch=4)
    opened = Dataset.open(str(dataset[0]), "train")
    size = opened.num_samples(16)
    sampler = Sampler(seed=3, sizes=(size,), mixture=Mixture.of(config, [opened.num_tokens], [size]), global_batch=12)
    loader = load(config, _plan(config, 1))
    for step in (1, 2, 6):
        micro_batches = loader.micro_batches(step)
        assert [micro_batch.samples for micro_batch in micro_batches] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
        for place, (_, number) in enumerate(sampler.samples(step, range(12))):
            sample = opened.sample(number, 16).tolist()
            assert _rows(micro_batches)[place] == (sample[:-1], sample[1:])


def test_types_and_shapes(job: Job, load: Callable[..., Loader]) -> None:
    config = job(micro_batch=3)
    for micro_batch in load(config, _plan(config, 1)).micro_batches(1):
        for tensor in (micro_batch.tokens, micro_batch.targets):
            assert tensor.shape == (3, 16)
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
        assert micro_batch.num_loss_tokens == 48


@pytest.mark.parametrize(("data", "micro_batch", "shares"), [
    (1, 1, None), (1, 12, None), (2, 1, None), (2, 3, None), (3, 1, None), (3, 4, None), (3, 2, (0, 5, 1)),
    (4, 6, None), (2, 4, (3, 0))])
def test_same_tokens_in_every_layout(job: Job, load: Callable[..., Loader], data: int, micro_batch: int,
                                     shares: tuple[int, ...] | None) -> None:
    reference, config = job(micro_batch=2), job(micro_batch=micro_batch)
    whole, plan = load(reference, _plan(reference, 1)), _plan(config, data, shares)
    loaders = [load(config, plan, replica) for replica in range(data)]
    for step in range(1, 7):
        parts = [_rows(loader.micro_batches(step)) for loader in loaders]
        assert sum(map(len, parts)) == 12
        assert {sample: row for part in parts for sample, row in part.items()} == _rows(whole.micro_batches(step))


def test_any_step_of_a_mixture_is_the_same_in_every_layout(
        job: Job, load: Callable[..., Loader], dataset: tuple[Path, DatasetManifest]) -> None:
    """200 random steps of a long run: tokens, targets and starts of documents in order, from loaders that jump to them."""
    draw, sources = random.Random(5), tuple(SourceConfig(name=name, path=str(dataset[0]), weight=weight)
                                            for name, weight in (("a", 0.61), ("b", 0.3), ("c", 0.09)))
    data = {"path": None, "sources": sources, "mask_documents": True}
    whole = job(steps=10**6, data=data)
    reference = load(whole, _plan(whole, 1))
    others = []
    for count, micro_batch in ((1, 4), (2, 3), (3, 1), (4, 2), (3, 2)):
        config = job(steps=10**6, data=data, micro_batch=micro_batch)
        cuts = sorted(draw.choices(range(12 // micro_batch + 1), k=count - 1))
        shares = tuple(after - before for before, after in pairwise([0, *cuts, 12 // micro_batch]))
        plan = _plan(config, count, shares)
        others.append([load(config, plan, replica) for replica in range(count)])
    for step in draw.sample(range(1, 10**6), 200):
        wanted = _in_order(reference._read(step))
        assert len(wanted) == 12
        for loaders in others:
            assert _in_order([each for loader in loaders for each in loader._read(step)]) == wanted


def _in_order(micro_batches: list[MicroBatch]) -> list[tuple[int, list[list[int]]]]:
    rows = []
    for each in micro_batches:
        assert each.starts is not None
        values = torch.stack((each.tokens, each.targets, each.starts), dim=1).tolist()
        rows += list(zip(each.samples, values, strict=True))
    return rows


def test_resume_reads_what_the_unbroken_run_reads(job: Job, load: Callable[..., Loader]) -> None:
    config = job(micro_batch=3)
    unbroken = load(config, _plan(config, 1))
    steps = {step: _rows(unbroken.micro_batches(step)) for step in range(1, 7)}
    assert len({str(rows) for rows in steps.values()}) == 6
    resumed = load(config, _plan(config, 1))
    assert [_rows(resumed.micro_batches(step)) for step in (4, 5, 5, 2)] == [steps[step] for step in (4, 5, 5, 2)]


@pytest.mark.parametrize("samples", [1, 7, 64, 1000])
@pytest.mark.parametrize(("data", "micro_batch"), [(1, 3), (2, 2), (3, 4), (4, 6)])
def test_validation_in_every_layout(job: Job, load: Callable[..., Loader], dataset: tuple[Path, DatasetManifest],
                                    samples: int, data: int, micro_batch: int) -> None:
    config = job(micro_batch=micro_batch, evaluate=samples)
    opened = Dataset.open(str(dataset[0]), "validation")
    total = opened.num_samples(16)
    expected = min(samples, total)
    plan = _plan(config, data)
    pieces = [load(config, plan, replica).validation(0) for replica in range(data)]
    assert {micro_batch.tokens.shape for part in pieces for micro_batch in part} == {(config.train.micro_batch, 16)}
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    rows = _rows([micro_batch for part in pieces for micro_batch in part])
    assert sorted(rows) == list(range(-(-expected // micro_batch) * micro_batch))
    for sample, (tokens, targets) in rows.items():
        if sample < expected:
            stored = opened.sample(sample * total // expected, 16).tolist()
            assert (tokens, targets) == (stored[:-1], stored[1:])
        else:
            assert (tokens, targets) == ([0] * 16, [NO_LOSS] * 16)
    assert sum(micro_batch.num_loss_tokens for part in pieces for micro_batch in part) == expected * 16


def test_next_step_is_read_ahead_in_one_thread(
        job: Job, load: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, str]] = []
    event, real = threading.Event(), Loader._read

    def spy(loader: Loader, step: int) -> list[MicroBatch]:
        read.append((step, threading.current_thread().name))
        if step == 2:
            event.set()
        return real(loader, step)

    monkeypatch.setattr(Loader, "_read", spy)
    config = job(steps=2)
    loader = load(config, _plan(config, 1))
    loader.micro_batches(1)
    assert event.wait(10)
    loader.micro_batches(2)
    assert [step for step, _ in read] == [1, 2]
    assert {name for _, name in read} == {"loader_0"}


def test_an_error_of_the_thread_is_raised_to_the_caller(
        job: Job, load: Callable[..., Loader], dataset: tuple[Path, DatasetManifest]) -> None:
    for shard in dataset[1].train:
        (dataset[0] / shard.file).write_bytes(b"not arrow")
    config = job()
    with pytest.raises(DataError, match=r"train-.*\.arrow is not a whole Arrow token shard"):
        load(config, _plan(config, 1)).micro_batches(1)


def test_close_ends_the_thread_and_may_be_called_again(job: Job, load: Callable[..., Loader]) -> None:
    config = job()
    loader = load(config, _plan(config, 1))
    loader.micro_batches(1)
    loader.close()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.mark.parametrize(("change", "message"), [
    ({"sequence": 100_000}, "its train split has"), ({"vocabulary": 256}, "model.vocabulary is 256")])
def test_data_that_does_not_fit_is_refused(job: Job, change: dict[str, Any], message: str) -> None:
    config = job(**change)
    with pytest.raises(DataError, match=message):
        Loader(config, _plan(config, 1), 0)
