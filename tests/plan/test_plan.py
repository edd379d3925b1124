import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import raytrain3d
from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.plan import Plan, make_plan, split_micro_batches
from raytrain3d.plan.table import amount, layer_names, size

Job = Callable[..., JobConfig]


@pytest.mark.parametrize(("data", "pipeline", "tensor", "schedule"),
                         list(product((1, 3), (1, 4), (1, 4), ("gpipe", "1f1b"))))
def test_json_keeps_the_plan_exactly(job: Job, data: int, pipeline: int, tensor: int, schedule: str) -> None:
    plan = make_plan(job(data=data, pipeline=pipeline, tensor=tensor, schedule=schedule, dtype="bf16"), device="gpu")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert hash(again) == hash(plan)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"mesh": {"rows": 2}}', '{"estimates": 3}'])
def test_other_json_is_not_a_plan(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


def test_layers_and_owners(job: Job) -> None:
    plan = make_plan(job(pipeline=3, layers=(1, 4, 1)))
    assert [list(plan.layers_of(stage)) for stage in range(3)] == [[0], [1, 2, 3, 4], [5]]
    assert [plan.stage_of(layer) for layer in range(plan.num_layers)] == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(("micro_batches", "data", "shares"), [
    (8, 2, (4, 4)), (8, 3, (3, 3, 2)), (2, 4, (1, 1, 0, 0)), (1, 1, (1,))])
def test_shares(job: Job, micro_batches: int, data: int, shares: tuple[int, ...]) -> None:
    assert split_micro_batches(micro_batches, data) == shares
    plan = make_plan(job(data=data, pipeline=2, global_batch=micro_batches * 2, micro_batch=2))
    assert plan.shares == shares
    assert [plan.first_micro_batch(replica) for replica in range(data)] == [sum(shares[:i]) for i in range(data)]
    assert plan.tokens_per_step == micro_batches * 2 * 32


def test_idle_share_counts_replicas_with_fewer_micro_batches(job: Job) -> None:
    assert make_plan(job(data=2, global_batch=3)).idle_share == pytest.approx(1 / 4)
    assert make_plan(job(data=2, global_batch=4)).idle_share == 0
    assert make_plan(job(data=4, global_batch=2)).idle_share == pytest.approx(1 / 2)


def test_memory_is_that_of_the_replica_with_most_micro_batches(job: Job) -> None:
    def most(global_batch: int) -> list[int]:
        return [e.peak_in_flight for e in make_plan(job(data=4, pipeline=2, global_batch=global_batch)).estimates]

    assert (most(2), most(5), most(8)) == ([1, 1], [2, 1], [2, 1])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_idle_share_of_equal_stages(job: Job, schedule: str) -> None:
    """The embedding and a head of 8 token ids weigh next to nothing: p = 4, m = 8."""
    plan = make_plan(job(pipeline=4, vocabulary=8, hidden=512, feed_forward=2048, schedule=schedule))
    assert plan.idle_share == pytest.approx(3 / 11, abs=2e-3)
    assert plan.idle_of_ideal == pytest.approx(3 / 8, abs=4e-3)
    assert [e.peak_in_flight for e in plan.estimates] == ([8] * 4 if schedule == "gpipe" else [4, 3, 2, 1])


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_parameters_of_all_ranks_add_up(job: Job, tensor: int) -> None:
    plan = make_plan(job(tensor=tensor, pipeline=3, vocabulary=64 * tensor))
    replicated = (4 * 2 + 1) * 64 * (tensor - 1)  # norms
    assert tensor * sum(e.parameters for e in plan.estimates) == plan.num_parameters + replicated


def test_device_must_be_decided(job: Job) -> None:
    with pytest.raises(PlanError, match="'auto'"):
        make_plan(job(), device="auto")


def test_table(job: Job) -> None:
    plan = make_plan(job(data=2, pipeline=3, tensor=2, global_batch=7, dtype="bf16"))
    lines = plan.table().splitlines()
    assert lines[:8] == [
        "mesh      data 2 x pipeline 3 x tensor 2 = 12 ranks on cpu",
        "placement 2 gangs, 3 bundles of {CPU: 2} each",
        "model     246.34K parameters, 6 layers",
        "state     bf16, sharding none, recompute none",
        "batch     7 samples of 32 tokens = 224 tokens a step",
        "          7 micro-batches of 1 sample, 3 to 4 a replica",
        "schedule  1f1b",
        f"idle      {plan.idle_share:.1%} of wall time ({plan.idle_of_ideal:.1%} of ideal time), predicted",
    ]
    assert lines[9].split() == ["rank", "layers", "params/rank", "work", "in", "flight", "weights", "gradients",
                                "master", "moments", "activations", "logits", "total"]
    assert [" ".join(line.split()[:4]) for line in lines[10:13]] == [
        "0 embedding, block 0", "1 blocks 1-2 53.50K", "2 block 3, head"]
    assert len({len(line) for line in lines[9:13]}) == 1


@pytest.mark.parametrize(("layers", "text"), [
    (range(6), "embedding, blocks 0-3, head"), (range(1), "embedding"), (range(5, 6), "head"), (range(1, 2), "block 0"),
    (range(3, 6), "blocks 2-3, head")])
def test_layer_names(layers: range, text: str) -> None:
    assert layer_names(layers, 6) == text


def test_units() -> None:
    assert [amount(n) for n in (999, 1500, 124_439_808, 8_030_261_248)] == ["999", "1.50K", "124.44M", "8.03B"]
    assert [size(n) for n in (0, 3 * 2**19, 5 * 2**30)] == ["0.0 MiB", "1.5 MiB", "5.00 GiB"]


def test_planning_needs_no_installed_package(job: Job) -> None:
    """Everything in plan/ imports in an interpreter without site-packages."""
    root = Path(raytrain3d.__file__).parent
    modules = [f"raytrain3d.plan.{path.stem}" for path in (root / "plan").glob("*.py") if path.stem != "__init__"]
    code = f"import sys; sys.path.insert(0, {str(root.parent)!r}); import {', '.join(modules)}; print('imported')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr
