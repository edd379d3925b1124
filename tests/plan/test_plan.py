import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import raytrain3d
from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.plan import Plan, make_plan, split_micro_batches
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import SCHEDULES
from raytrain3d.plan.sharding import LEVELS, volumes
from raytrain3d.plan.table import amount, layer_names, size

Job = Callable[..., JobConfig]


@pytest.mark.parametrize(("data", "pipeline", "tensor", "schedule"),
                         list(product((1, 3), (1, 2), (1, 4), (*SCHEDULES, "auto"))))
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


@pytest.mark.parametrize(("schedule", "stages_of_ranks"), [
    ("interleaved", [(0, 2), (1, 3)]), ("breadth_first", [(0, 2), (1, 3)]), ("zb_v", [(0, 3), (1, 2)])])
def test_stages_and_layers_of_ranks(job: Job, schedule: str, stages_of_ranks: list[tuple[int, ...]]) -> None:
    plan = make_plan(job(pipeline=2, schedule=schedule, layers=(1, 2, 1, 2)))
    layers = {0: (0,), 1: (1, 2), 2: (3,), 3: (4, 5)}
    assert (plan.schedule, plan.chunks, len(plan.stages)) == (schedule, 2, 4)
    for rank, stages in enumerate(stages_of_ranks):
        assert plan.stages_of(rank) == plan.estimates[rank].stages == stages
        assert plan.layers_of_rank(rank) == tuple(layer for stage in stages for layer in layers[stage])
        assert {plan.rank_of(stage) for stage in stages} == {rank}


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_tied_weight_is_counted_on_every_rank_that_holds_it_once(job: Job, schedule: str) -> None:
    """Both ends on rank 0 in a V, on ranks 0 and 1 round robin."""
    plan = make_plan(job(pipeline=2, schedule=schedule, tied_embeddings=True))
    copies = sum(e.parameters for e in plan.estimates) - plan.num_parameters
    assert copies == (256 * 64 if schedule == "interleaved" else 0)


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


EVEN = {"pipeline": 4, "blocks": 30, "vocabulary": 8, "hidden": 64, "global_batch": 16}
"""Embedding and head weigh next to nothing, and every schedule can be had: 1 to 4 chunks on 4 ranks."""


def with_limit(config: JobConfig, gib: float) -> JobConfig:
    return replace(config, placement=replace(config.placement, memory_per_rank_gib=gib))


def test_auto_takes_the_least_step_time(job: Job) -> None:
    plan = make_plan(job(**EVEN, schedule="auto"))
    times = {(each.schedule, each.chunks): each.step_time for each in plan.candidates}
    assert set(times) == {("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("interleaved", 3),
                          ("interleaved", 4), ("breadth_first", 2), ("zb_v", 2)}
    assert times[plan.schedule, plan.chunks] == 1 == min(times.values())
    assert list(times.values()) == sorted(times.values())
    assert times["1f1b", 1] > times["zb_h1", 1] > 1
    assert plan == replace(make_plan(job(**EVEN, schedule=plan.schedule, chunks=plan.chunks)), candidates=plan.candidates)


def test_auto_is_fastest_of_all_that_can_be_asked_for(job: Job) -> None:
    best = make_plan(job(**EVEN, schedule="auto"))
    for each in best.candidates:
        given = make_plan(job(**EVEN, schedule=each.schedule, chunks=each.chunks))
        assert (1 - best.idle_share) / (1 - given.idle_share) == pytest.approx(each.step_time)


@pytest.mark.parametrize("changes", [{"pipeline": 1}, {"pipeline": 1, "data": 8}])
def test_equal_step_times_go_to_the_simpler_schedule_and_less_memory(job: Job, changes: dict[str, int]) -> None:
    assert make_plan(job(**changes, schedule="auto")).schedule == "1f1b"


def test_auto_keeps_chunks_and_layers(job: Job) -> None:
    def tried(**changes: object) -> set[tuple[str, int]]:
        return {(each.schedule, each.chunks) for each in make_plan(job(pipeline=2, schedule="auto", **changes)).candidates}

    one, two = {("gpipe", 1), ("1f1b", 1), ("zb_h1", 1)}, {("interleaved", 2), ("breadth_first", 2), ("zb_v", 2)}
    assert tried() == one | two | {("interleaved", 3)}
    assert tried(chunks=1) == tried(layers=(2, 4)) == one
    assert tried(chunks=2) == tried(layers=(1, 2, 1, 2)) == two
    assert tried(chunks=6, blocks=10) == {("interleaved", 6), ("breadth_first", 6)}


def test_auto_stays_within_the_memory_limit(job: Job) -> None:
    """Just below what the best needs, another split or schedule is taken, the fastest that fits; the table says what was too
    large."""
    config = job(**EVEN, schedule="auto")
    best = make_plan(config)
    most = max(e.memory.total for e in best.estimates)
    assert make_plan(with_limit(config, most / 2**30)).schedule == best.schedule
    second = make_plan(with_limit(config, (most - 1) / 2**30))
    assert max(e.memory.total for e in second.estimates) < most
    assert second.idle_share >= best.idle_share
    fitting = [each for each in second.candidates if each.fits]
    assert (second.schedule, second.chunks) == (fitting[0].schedule, fitting[0].chunks)
    assert fitting[0].step_time == 1 == min(each.step_time for each in fitting)
    large = [each.schedule for each in second.candidates if not each.fits]
    assert "gpipe" in large
    assert f"too large: {large[0]}" in second.table()


@pytest.mark.parametrize(("schedule", "which"), [
    ("auto", "no schedule fits, closest is 1f1b"), ("zb_v", r"too little for pipeline.schedule zb_v \(2 chunks\)")])
def test_no_schedule_fits(job: Job, schedule: str, which: str) -> None:
    config = job(**EVEN, data=2, schedule=schedule)
    least = min(each.memory for each in make_plan(job(**EVEN, data=2, schedule="auto")).candidates)
    with pytest.raises(PlanError, match=f"placement.memory_per_rank_gib is 0.001: {which} with .* MiB on pipeline rank "
                       r"\d, .* MiB too much; less is needed with .*train.recompute full, train.sharding optimizer, "
                       "mesh.pipeline above 4, mesh.tensor above 1") as caught:
        make_plan(with_limit(config, 0.001))
    assert ("pipeline.schedule auto" in str(caught.value)) == (schedule != "auto")
    if schedule == "auto":
        assert f"{size(least)} on" in str(caught.value)
        assert f"{size(least - 2**30 // 1000)} too much" in str(caught.value)


def test_table_of_auto(job: Job) -> None:
    plan = make_plan(job(**EVEN, schedule="auto"))
    first, second, *_ = (each for each in plan.candidates if each.schedule != plan.schedule)
    usual = next(each.step_time for each in plan.candidates if each.schedule == "1f1b")
    lines = plan.table().splitlines()
    assert f"schedule  auto: {plan.schedule} ({plan.chunks} chunks), {1 - 1 / usual:.1%} less step time than 1f1b" in lines
    assert f"          then {first.schedule}" in plan.table()
    assert f"{second.step_time - 1:+.1%}" in plan.table()


def test_auto_takes_moderate_time(job: Job) -> None:
    """0.7 s of one core where this was written."""
    config = job(pipeline=8, blocks=30, global_batch=64, schedule="auto")
    programs_for.cache_clear()
    start = time.process_time()
    assert len(make_plan(config).candidates) == 8
    assert time.process_time() - start < 2.5


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_parameters_of_all_ranks_add_up(job: Job, tensor: int) -> None:
    plan = make_plan(job(tensor=tensor, pipeline=3, vocabulary=64 * tensor))
    replicated = (4 * 2 + 1) * 64 * (tensor - 1)  # norms
    assert tensor * sum(e.parameters for e in plan.estimates) == plan.num_parameters + replicated


def test_sharding_that_sends_least_within_the_memory_limit(job: Job) -> None:
    """Whatever is chosen fits, and no level that sends less does."""
    def fits(level: str, limit: float) -> bool:
        try:
            make_plan(with_limit(job(data=4, pipeline=2, blocks=16, sharding=level), limit))
        except PlanError:
            return False
        return True

    config = job(data=4, pipeline=2, blocks=16, sharding="auto")
    assert make_plan(config).sharding == "none"
    chosen = set()
    for eighths in range(96, 0, -2):
        limit = eighths / 8 / 1024
        first = next((level for level in LEVELS if fits(level, limit)), None)
        if first is None:
            break
        plan = make_plan(with_limit(config, limit))
        assert plan.sharding == plan.decided(config).train.sharding == first
        chosen.add(first)
    assert {"none", "optimizer", "full"} <= chosen
    with pytest.raises(PlanError, match=r"much; less is needed with (?!.*train.sharding)"):
        make_plan(with_limit(config, limit / 2))


def test_volumes_of_the_data_axis() -> None:
    """FACTS: 2 for an all-reduce and ZeRO-1; m + 1 reduced per micro-batch; 3m freed after each use."""
    assert [volumes(level, "op", 5) for level in LEVELS] == [2, 2, 6, 15]
    assert [volumes(level, "op", 1) for level in LEVELS] == [2, 2, 2, 3]
    assert volumes("full", "step", 5) == 6


def test_table_says_how_state_is_shared(job: Job) -> None:
    text = make_plan(job(data=4, sharding="full", shard_group=2)).table()
    assert "sharded over 2 of 4 replicas, weights gathered for each op; 6 volumes a step" in text


def test_device_must_be_decided(job: Job) -> None:
    with pytest.raises(PlanError, match="'auto'"):
        make_plan(job(), device="auto")


def test_table(job: Job) -> None:
    plan = make_plan(job(data=2, pipeline=3, tensor=2, global_batch=7, dtype="bf16"))
    lines = plan.table().splitlines()
    assert [*lines[:8], *lines[9:10]] == [
        "mesh      data 2 x pipeline 3 x tensor 2 = 12 ranks on cpu",
        "placement 2 gangs, 3 bundles of {CPU: 2} each",
        "model     246.34K parameters, 6 layers",
        "state     bf16, sharding none, recompute none",
        "batch     7 samples of 32 tokens = 224 tokens a step",
        "          7 micro-batches of 1 sample, 3 to 4 a replica",
        "schedule  1f1b",
        "split     by flops",
        f"idle      {plan.idle_share:.1%} of wall time ({plan.idle_of_ideal:.1%} of ideal time), predicted",
    ]
    assert lines[8].startswith("          best 3,1,2: 1.000x the speed of uniform, ")
    assert lines[11].split() == ["rank", "layers", "params/rank", "work", "in", "flight", "weights", "gradients",
                                "master", "moments", "activations", "logits", "total"]
    assert [" ".join(line.split()[:4]) for line in lines[12:15]] == [
        "0 embedding, blocks 0-1", "1 block 2 26.75K", "2 block 3, head"]
    assert len({len(line) for line in lines[11:15]}) == 1


def test_table_has_a_row_for_each_rank_with_its_stages(job: Job) -> None:
    lines = make_plan(job(pipeline=2, schedule="zb_v", layers=(2, 1, 2, 1))).table().splitlines()
    assert "schedule  zb_v (2 chunks)" in lines
    rows = [line.split("  ") for line in lines if "|" in line]
    names = [[cell.strip() for cell in row if cell][1] for row in rows]
    assert names == ["embedding, block 0 | head", "block 1 | blocks 2-3"]


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
