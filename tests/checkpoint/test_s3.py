"""Checkpoints in a real S3 server on loopback, which now and then refuses a request."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import fake_job, with_steps
from fake_trainer import FakeTrainer
from object_store import ObjectStore

from raytrain3d.checkpoint.store import (
    clean,
    commit,
    damage,
    prune,
    read_into,
    read_manifest,
    step_directory,
    steps,
    write_shard,
)
from raytrain3d.gang.run import run_job


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    server = ObjectStore()
    yield server
    server.close()


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    yield server
    server.fail(lambda number: False)


def save(run: str, step: int, checkpoints: Any) -> str:
    """A checkpoint of two sharded replicas."""
    config, directory = checkpoints.config(), step_directory(run, step)
    truth = checkpoints.truth(config, step)
    ranks = checkpoints.ranks(config, truth, tensor=1, data=2, stages=[range(4)], sharded=True)
    for rank in ranks:
        checkpoints.fill(rank, truth)
    receipts = [write_shard(directory, i, rank.pieces, step=step) for i, rank in enumerate(ranks)]
    commit(directory, step, receipts, config=config)
    return directory


def check(directory: str, step: int, checkpoints: Any) -> None:
    config = checkpoints.config()
    truth = checkpoints.truth(config, step)
    for rank in checkpoints.ranks(config, truth, tensor=2, data=1, stages=[range(4)], sharded=False):
        read_into(directory, rank.pieces)
        checkpoints.check(rank, truth)


def test_checkpoints_survive_a_server_that_refuses_every_third_request(store: ObjectStore, checkpoints: Any) -> None:
    run = store.uri("third")
    store.fail(lambda number: number % 3 == 0)
    for step in (1, 2):
        check(save(run, step, checkpoints), step, checkpoints)
    assert prune(run, 1) == [1] and steps(run) == [2]
    assert damage(step_directory(run, 2)) == []
    assert store.refused >= 10, len(store.requests)


def test_only_what_is_needed_is_fetched(store: ObjectStore, checkpoints: Any) -> None:
    directory = save(store.uri("part"), 1, checkpoints)
    config = checkpoints.config()
    (rank,) = checkpoints.ranks(config, checkpoints.truth(config, 1), tensor=1, data=1, stages=[range(1)], sharded=False)
    store.fail(lambda number: False)
    read_into(directory, [piece for piece in rank.pieces if piece.kind == "weight"])
    shards = [request for request in store.requests if request.endswith(".safetensors") and request.startswith("GET")]
    assert len(set(shards)) == 1, "the first replica has all that is wanted"
    assert len(shards) <= 3, "small boxes come together"


def test_unfinished_saves_are_cleaned(store: ObjectStore, checkpoints: Any) -> None:
    run = store.uri("left")
    save(run, 1, checkpoints)
    config = checkpoints.config()
    rank = checkpoints.one_rank(config, checkpoints.truth(config))
    write_shard(step_directory(run, 2), 0, rank.pieces, step=2)
    assert steps(run) == [1] and clean(run) == [2] and clean(run) == []


def test_a_job_runs_and_resumes_there(store: ObjectStore, tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(1, 1, 1), steps=6, checkpoint=3)
    config = replace(config, run=replace(config.run, directory=store.uri("runs")))
    store.fail(lambda number: number % 3 == 0)
    for job, start in ((config, "fresh"), (with_steps(config, 9), "resumed from")):
        output = io.StringIO()
        assert run_job(job, launcher="inline", output=output, trainer=InlineTrainer) == 0
        assert start == "fresh" or start in output.getvalue()
    assert steps(store.uri("runs/job")) == [6, 9]
    assert "secret" not in output.getvalue().replace("//key:secret@", "")


class InlineTrainer(FakeTrainer):
    """Whose faults would be read from the run directory, which is no path here."""

    def _fail(self, step: int | str) -> None:
        pass

    def load(self, directory: str) -> None:
        assert read_manifest(directory).step == 6
