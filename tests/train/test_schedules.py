"""Every schedule trains as one rank with whole backwards does: losses, gradient norms, each gradient and weight.

The normal run takes one layout for each schedule and each trait that meets the split backward; `pytest -m slow
tests/train/test_schedules.py` runs every schedule on every mesh of pipeline 2, 3, 4 x tensor 1, 2 x data 1, 2 with fewer
micro-batches than stages, as many, and a number that the stages do not divide; each time plain and with a trait, in turn.
"""

import itertools
import shutil
from typing import Any

import pytest
from jobs import JobRunner, small_job
from parity import Reference, check_parity

from raytrain3d.config import JobConfig
from raytrain3d.plan.schedule import SCHEDULES

pytestmark = pytest.mark.dist

CHUNKED = {"interleaved": 2, "breadth_first": 2, "zb_v": 2}
BLOCKS = 8


def job(schedule: str, mesh: tuple[int, int, int], micro_batches: int, *, dtype: str = "fp64", chunks: int | None = None,
        model: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> JobConfig:
    """Six steps with `micro_batches` on each replica and an uneven split: the first stage has what is left over."""
    data, pipeline, tensor = mesh
    stages = pipeline * (chunks or CHUNKED.get(schedule, 1))
    layers = (BLOCKS + 2 - (stages - 1), *[1] * (stages - 1))
    return small_job(mesh={"data": data, "pipeline": pipeline, "tensor": tensor},
                     pipeline={"schedule": schedule, "chunks": chunks, "layers": layers},
                     model={"blocks": BLOCKS, "hidden": 16, "heads": 4, "kv_heads": 2, "feed_forward": 24, **(model or {})},
                     train={"steps": 6, "global_batch": micro_batches * data, "dtype": dtype, **(train or {})})


TRAITS: dict[str, dict[str, Any]] = {
    "tied": {"model": {"tied_embeddings": True}},
    "frozen": {"model": {"freeze": ("embedding", "blocks.0-1", "blocks.4")}},
    "frozen_head": {"model": {"freeze": ("head", "blocks.7")}},
    "dropout": {"model": {"dropout": 0.1, "attention_dropout": 0.1}},
    "recompute": {"train": {"recompute": "full"}},
    "whole_logits": {"train": {"loss_chunk": None}},
    "sequence_parallel": {"train": {"sequence_parallel": True, "recompute": "selective"}, "model": {"dropout": 0.1}},
    "optimizer_sharding": {"train": {"sharding": "optimizer"}},
    "gpt2": {"model": {"family": "gpt2", "kv_heads": 4, "tied_embeddings": True}},
    "qwen": {"model": {"qkv_bias": True, "qk_norm": True}},
}
"""What a split backward or a rank with several stages may get wrong."""

CASES = [
    pytest.param("interleaved", (1, 2, 2), 3, {}, id="interleaved"),
    pytest.param("interleaved", (1, 3, 1), 4, {"chunks": 3, "dtype": "fp32"}, id="interleaved-3-chunks"),
    pytest.param("breadth_first", (1, 2, 1), 3, {"dtype": "fp32"}, id="breadth_first"),
    pytest.param("zb_h1", (1, 4, 1), 5, {}, id="zb_h1"),
    pytest.param("zb_h1", (2, 3, 1), 2, {"dtype": "fp32"}, id="zb_h1-fewer-micro-batches"),
    pytest.param("zb_v", (1, 4, 1), 3, {}, id="zb_v-fewer-micro-batches"),
    pytest.param("zb_v", (1, 2, 2), 5, {"dtype": "fp32"}, id="zb_v"),
    pytest.param("zb_v", (1, 1, 1), 2, {}, id="zb_v-alone"),
    pytest.param("zb_h1", (1, 2, 2), 3, TRAITS["sequence_parallel"], id="zb_h1-sequence_parallel"),
    *(pytest.param(schedule, (2, 2, 1), 3, trait, id=f"{schedule}-{name}")
      for schedule, name in [("zb_h1", "tied"), ("zb_v", "tied"), ("zb_v", "frozen"), ("zb_h1", "frozen_head"),
                             ("zb_v", "dropout"), ("zb_h1", "recompute"), ("zb_h1", "whole_logits"),
                             ("zb_v", "optimizer_sharding"), ("zb_v", "gpt2"), ("zb_h1", "qwen"),
                             ("interleaved", "tied")]
      for trait in [TRAITS[name]]),
]


@pytest.mark.parametrize(("schedule", "mesh", "micro_batches", "more"), CASES)
def test_schedule_trains_as_one_rank_does(schedule: str, mesh: tuple[int, int, int], micro_batches: int,
                                          more: dict[str, Any], run_job: JobRunner, reference: Reference) -> None:
    check_parity(run_job, reference, job(schedule, mesh, micro_batches, **more))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_split_their_backward(recompute: str, run_job: JobRunner, reference: Reference) -> None:
    backend = "inductor" if shutil.which("g++") else "aot_eager"
    config = job("zb_h1", (1, 2, 1), 3, dtype="fp32", model={"freeze": ("blocks.2",)},
                 train={"recompute": recompute, "compile": backend})
    check_parity(run_job, reference, config)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("mesh", list(itertools.product((1, 2), (2, 3, 4), (1, 2))), ids=str)
def test_every_schedule_trains_as_one_rank_does(dtype: str, mesh: tuple[int, int, int], run_job: JobRunner,
                                                reference: Reference) -> None:
    pipeline = mesh[1]
    failures = []
    traits = itertools.cycle(TRAITS.items())
    for schedule, micro_batches in itertools.product(SCHEDULES, (pipeline - 1, pipeline, 2 * pipeline + 1)):
        for name, trait in (("plain", {}), next(traits)):
            try:
                check_parity(run_job, reference, job(schedule, mesh, micro_batches, dtype=dtype, **trait))
            except AssertionError as error:
                failures.append(f"{schedule} with {micro_batches} micro-batches, {name}: {error}")
    assert not failures, "\n".join(failures)
