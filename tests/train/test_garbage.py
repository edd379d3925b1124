"""Garbage is collected at planned steps, and until then nothing of size waits for it."""

import gc
from collections.abc import Iterator

import pytest
from jobs import JobRunner, small_job
from rank_pool import RankPool
from torch import Tensor

from raytrain3d.train.garbage import planned_collections
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def run_job() -> Iterator[JobRunner]:
    """On processes that never compiled: calls leave tensors in cycles wherever torch's compiler is loaded."""
    pool = RankPool()
    yield JobRunner(pool)
    pool.close()


def test_collections_come_at_their_steps_and_at_no_other_time() -> None:
    seen: list[int] = []
    now = 0

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(now)

    gc.callbacks.append(watch)
    try:
        with planned_collections(3) as after:
            for now in range(1, 8):
                assert not gc.isenabled()
                rings = [[] for _ in range(20_000)]  # enough for Python to collect by itself
                for ring in rings:
                    ring.append(ring)
                after(now)
            inside = list(seen)  # once it is over, Python may collect at once
    finally:
        gc.callbacks.remove(watch)
    assert inside == [3, 6]
    assert gc.isenabled()


def test_without_a_plan_python_collects() -> None:
    with planned_collections(None) as after:
        assert gc.isenabled()
        after(1)


def test_an_error_gives_collection_back() -> None:
    with pytest.raises(ValueError, match="broken"), planned_collections(5):
        raise ValueError("broken")
    assert gc.isenabled()


def steps_without_collection(trainer: Trainer) -> list[str]:
    """Shapes of the tensors that three steps leave to the collector."""
    gc.collect()
    gc.disable()
    try:
        for n in (2, 3, 4):
            trainer.step(n)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [str(tuple(each.shape)) for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("train", [{"recompute": "full"}, {"recompute": "selective", "sharding": "full"},
                                   {"offload_activations": True}], ids=str)
def test_steps_leave_no_tensor_to_the_collector(train: dict[str, object], run_job: JobRunner) -> None:
    config = small_job(mesh={"data": 2, "pipeline": 2}, pipeline={"schedule": "zb_h1"}, train={"dtype": "bf16", **train})
    for _, tensors in run_job(config, 1, after=steps_without_collection):
        assert tensors == []
