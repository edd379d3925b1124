"""Compiled blocks: one graph for all of them, whatever the schedule and what is recomputed, with the numbers of eager ones.

One rank with several stages runs every kind of op; jobs on several ranks show that graphs meet at the seams of divided
matrices, and live with weights that come and go.
"""

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import JobRunner, small_job
from parity import Reference, check_parity
from torch._dynamo.utils import counters

from raytrain3d.config import JobConfig
from raytrain3d.errors import ConfigError
from raytrain3d.model.compiled import check_backend
from raytrain3d.plan.schedule import SCHEDULES
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]  # warnings: the compiler's own

CHUNKS = {"interleaved": 2, "breadth_first": 2, "zb_v": 2}
RECOMPUTE = ("none", "full", "selective")
STEPS = 20


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def job(schedule: str, recompute: str, backend: str, **train: Any) -> JobConfig:
    return small_job(model={"blocks": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "feed_forward": 24},
                     pipeline={"schedule": schedule, "chunks": CHUNKS.get(schedule)},
                     train={"steps": STEPS, "dtype": "fp32", "loss_chunk": 8, "recompute": recompute, "compile": backend,
                            "global_batch": 2, **train})


def numbers(reports: list[StepReport]) -> list[float]:
    return [value for report in reports for value in (report.loss, report.gradient_norm)]


def test_one_graph_serves_all_blocks_steps_and_schedules(run_job: JobRunner) -> None:
    """A block that recomputes its attention is of another kind; with the loss that makes three graphs in all."""
    expected = numbers(run_job(job("1f1b", "none", "none"), STEPS)[0][0])
    graphs: list[tuple[str, str, int]] = []
    for recompute, schedule in itertools.product(RECOMPUTE, SCHEDULES):
        (reports, _), = run_job(job(schedule, recompute, "aot_eager"), STEPS)
        assert numbers(reports) == pytest.approx(expected, rel=1e-5)
        graphs.append((recompute, schedule, counters["stats"]["unique_graphs"]))
    assert graphs == [(recompute, schedule, 3 if recompute == "selective" else 2)
                      for recompute, schedule in itertools.product(RECOMPUTE, SCHEDULES)]
    assert not counters["graph_break"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
def test_generated_kernels_have_one_graph_too(run_job: JobRunner) -> None:
    """A run that is repeated is the same to the bit, and so is one that computes its blocks again."""
    expected = numbers(run_job(job("zb_v", "none", "none"), STEPS)[0][0])
    first, again, full = (numbers(run_job(job("zb_v", recompute, "inductor"), STEPS)[0][0])
                          for recompute in ("none", "none", "full"))
    assert first == pytest.approx(expected, rel=1e-5)
    assert first != expected
    assert first == again == full
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("mesh", "schedule", "train"), [
    ({"pipeline": 2, "tensor": 2}, "zb_h1", {"sequence_parallel": True}),
    ({"data": 2, "tensor": 2}, "1f1b", {"sharding": "full", "recompute": "full"}),
], ids=["sequence_parallel", "sharded"])
def test_graphs_meet_at_seams(mesh: dict[str, int], schedule: str, train: dict[str, Any], run_job: JobRunner,
                              reference: Reference) -> None:
    config = small_job(mesh=mesh, pipeline={"schedule": schedule}, model={"freeze": ("blocks.1",)},
                       train={"steps": 6, "compile": "aot_eager", **train})
    check_parity(run_job, reference, config)


def test_gradients_of_another_type_than_the_weights(run_job: JobRunner) -> None:
    """bf16: a compiler must not stumble over FP32 gradient buffers, and they get what they get without one."""
    config, plain = (job("zb_v", "none", backend, dtype="bf16") for backend in ("aot_eager", "none"))
    found, expected = (numbers(run_job(each, 5)[0][0]) for each in (config, plain))
    assert found == pytest.approx(expected, rel=0.01)


def evaluated(trainer: Trainer) -> float:
    return trainer.evaluate().loss


def test_documents_apart_and_evaluation(run_job: JobRunner) -> None:
    def losses(backend: str) -> list[float]:
        config = job("1f1b", "none", backend)
        config = replace(config, data=replace(config.data, mask_documents=True))
        (reports, loss), = run_job(config, 3, after=evaluated)
        return [*numbers(reports), loss]

    assert losses("aot_eager") == pytest.approx(losses("none"), rel=1e-5)


@pytest.mark.parametrize(("model", "train", "key"), [
    ({"dropout": 0.1}, {}, "model.dropout"), ({"attention_dropout": 0.1}, {}, "model.attention_dropout"),
    ({}, {"offload_activations": True}, "train.offload_activations"),
])
def test_what_cannot_be_compiled_is_refused(model: dict[str, Any], train: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        small_job(model=model, train={"compile": "inductor", **train})


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_backend("aot_eager", torch.device("cpu"))
    with pytest.raises(ConfigError, match="there is no 'no-such-compiler': install one"):
        check_backend("inductor", torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton"):
        check_backend("inductor", torch.device("cuda"))
