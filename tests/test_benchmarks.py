"""The benchmarks: their statistics and what they compare in the normal run, each in its smallest mode under `slow`."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rebalance
import torch
from common import figure, interval, means, ratios, wall_times
from contestants import SameLayers, summed_loss
from language_model import QUICK, Model
from pipeline_mesh import Measured, loss_difference
from pipeline_real import difference, ideal_s
from plain_llama import PlainStage
from sharding_precision import SMALL, heads_of
from simulator import predicted_s, replay

from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import Kind

ROOT = Path(__file__).parent.parent
HEADER = "run,pipeline,micro_batches,seq,vocab,partition,forward_us,backward_us,measured_step_ms"


@pytest.mark.parametrize("count", [5, 8, 15, 16, 40])
def test_interval_holds_the_median_nine_times_in_ten_and_no_narrower_one_does(count: int) -> None:
    draw, trials = random.Random(count), 4000
    held = narrower = 0
    for _ in range(trials):
        values = sorted(draw.gauss(0, 1) for _ in range(count))
        low, high = interval(values)
        at = values.index(low)
        assert high == values[-1 - at]
        held += low <= 0 <= high
        narrower += values[at + 1] <= 0 <= values[-2 - at]
    assert held / trials > 0.89
    assert narrower / trials < 0.91


def test_interval_of_few_values_is_their_range() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_figure_names_median_and_interval() -> None:
    assert figure("ratio", [1.0, 3.0, 2.00004]) == {"ratio": 2.0, "ratio_interval_90": [1.0, 3.0]}


def test_ratios_and_means_go_round_by_round() -> None:
    assert ratios([1.0, 9.0], [2.0, 3.0]) == [0.5, 3.0]
    assert means([1.0, 9.0], [2.0, 3.0]) == [1.5, 6.0]


def test_wall_time_is_from_the_first_start_to_the_last_end() -> None:
    ranks = [{"ours": [(0.0, 5.0), (10.0, 11.0)]}, {"ours": [(1.0, 4.0), (10.5, 12.0)]}]
    assert wall_times(ranks) == {"ours": [5.0, 2.0]}


def row(forward_us: str, backward_us: str, measured_ms: float) -> str:
    return f"a run,3,5,2048,32k,uniform,{forward_us},{backward_us},{measured_ms}"


def test_replay_of_equal_stages_is_the_closed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1F1B of m micro-batches on p equal stages takes m + p - 1 forwards and backwards: 7 x 3 ms."""
    runs = tmp_path / "runs.csv"
    stages = ("1000 1000 1000", "2000 2000 2000")
    runs.write_text("\n".join([HEADER, row(*stages, 20), row(*stages, 30)]))
    assert replay(str(runs)) == {"replay_mape": pytest.approx((0.05 + 0.3) / 2), "replay_max": pytest.approx(0.3)}
    assert "+5.00%" in capsys.readouterr().out


def test_replay_of_unequal_stages_waits_for_the_slowest() -> None:
    cells = dict(zip(HEADER.split(","), row("1000 1000 4000", "2000 2000 8000", 0).split(","), strict=True))
    assert predicted_s(cells) == pytest.approx(1e-3 * (1 + 1 + 5 * (4 + 8) + 2 + 2))


def test_ideal_step_is_made_of_the_measured_ops() -> None:
    """Two ranks, eight micro-batches, 1F1B: (8 + 1) x (1 + 2) seconds."""
    ops = programs_for("1f1b", 2, 8).schedule.ops
    seconds = [{op: 1.0 if op.kind is Kind.FORWARD else 2.0 for op in rank} for rank in ops]
    assert ideal_s(seconds) == pytest.approx(27.0)


def test_difference_is_the_largest_relative_one() -> None:
    found, expected = [torch.tensor(2.0), torch.tensor([3.0, 4.0])], [torch.tensor(2.0), torch.tensor([3.0, 5.0])]
    assert difference(found, expected) == pytest.approx(1 / 34**0.5)


def test_losses_are_compared_over_the_first_steps_only() -> None:
    rank = Measured(steps={}, our_losses=[1.0, 1.0, 1.0, 9.0], torch_losses=[1.0, 1.1, 1.0, 1.0])
    assert loss_difference(rank) == pytest.approx(0.1 / 1.1)


def test_layers_are_split_in_order_and_evenly() -> None:
    assert QUICK.split_evenly(4) == (range(3), range(3, 6), range(6, 8), range(8, 10))


def test_plain_model_is_ours() -> None:
    """Same loss, and the same gradient of every parameter, so that what is compared does the same work."""
    config, layers = QUICK.job(), range(QUICK.model.blocks + 2)
    ours, plain = Model(config, layers), PlainStage(config, layers)
    tokens, targets = QUICK.batch(1)
    own = summed_loss(SameLayers(list(ours.layers.values()))(tokens), targets)
    other = summed_loss(plain(tokens), targets)
    assert own.item() == pytest.approx(other.item(), rel=1e-6)
    own.backward()
    other.backward()
    for index, state in ours.states.items():
        for name, parameter in state.parameters.items():
            expected = plain.layers[str(index)].get_parameter(name).grad
            assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), f"layer {index}: {name}"


def test_losses_of_the_benchmark_are_one_and_chunks_take_a_fraction_of_the_memory() -> None:
    heads = heads_of(SMALL)
    plain, chunked = heads["torch"], heads["ours in chunks"]
    for head in heads.values():
        head.step()
        for own, other in ((head.x.grad, plain.x.grad), (head.weight.grad, plain.weight.grad)):
            assert own is not None
            assert other is not None
            assert (own - other).norm() <= 1e-5 * other.norm()
        assert head.loss() == pytest.approx(plain.loss(), rel=1e-6)
    assert chunked.peak() < plain.peak() / 4


def test_sleeping_job_runs_to_its_end(tmp_path: Path) -> None:
    rebalance.prepare_data(tmp_path)
    config = rebalance.job(tmp_path, "sleeping", mesh=(1, 1), blocks=1, micro_batches=2, steps=2)
    assert len(rebalance.run(config, launcher="inline").seconds) == 2


def run_quick(*command: str) -> tuple[str, dict[str, float]]:
    """What a benchmark prints in its smallest mode, and its last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command, "--quick"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_simulator_benchmark(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text("\n".join([HEADER, row("1000 1000 1000", "2000 2000 2000", 21)]))
    _, figures = run_quick("benchmarks/simulator.py", "--runs", str(runs))
    assert figures["replay_mape"] == figures["replay_max"] == 0
    assert figures["cases"] == 18
    assert 0 < figures["replay_sleep_max"] < 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_pipeline_benchmark() -> None:
    printed, figures = run_quick("benchmarks/pipeline.py")
    real = ("ratio_1f1b_vs_torch", "ratio_zb_vs_torch_1f1b", "ratio_zb_vs_torch_1f1b_m4", "ratio_1f1b_vs_ideal")
    for key in ("overhead_sleep_pp4", "overhead_sleep_pp8", "ratio_3d_vs_torch", *real, *(f"{key}_bf16" for key in real)):
        low, high = figures[f"{key}_interval_90"]  # type: ignore[misc]
        assert low <= figures[key] <= high
    assert figures["difference"] <= 1e-5
    assert figures["loss_difference_3d"] <= 1e-5
    assert "WRONG" not in printed


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_sharding_benchmark() -> None:
    printed, figures = run_quick("benchmarks/sharding.py")
    for key in ("ratio_vs_ddp", "ratio_vs_fsdp2", "ddp_vs_itself", "fsdp2_vs_itself"):
        low, high = figures[f"{key}_interval_90"]  # type: ignore[misc]
        assert low <= figures[key] <= high
    assert figures["loss_difference"] <= 1e-5
    assert "WRONG" not in printed


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_step_benchmark() -> None:
    printed, figures = run_quick("benchmarks/step.py")
    low, high = figures["compile_speedup_interval_90"]  # type: ignore[misc]
    assert low <= figures["compile_speedup"] <= high
    assert figures["compile_s"] > 0 and figures["loss_difference"] <= 1e-5
    assert sum(value for key, value in figures.items() if key.startswith("share_")) == pytest.approx(1, abs=1e-3)
    assert "WRONG" not in printed


def run_small(name: str) -> dict[str, Any]:
    """Every line of a benchmark for GPUs, at toy size on whatever is here."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, f"benchmarks/{name}.py", "--small"], cwd=ROOT, capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gpu_benchmark_at_toy_size() -> None:
    figures = run_small("gpu")
    for shape in ("1b", "8b"):
        for contestant in ("plain", "plain_bf16", "ours"):
            assert figures[f"{contestant}_tokens_per_s_{shape}"] > 0 and figures[f"{contestant}_mfu_{shape}"] > 0
        assert figures[f"ratio_vs_plain_{shape}"] > 0
        assert figures[f"loss_difference_{shape}"] < 0.01, "bf16 of different roundings"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_nccl_benchmark_at_toy_size() -> None:
    figures = run_small("nccl")
    assert figures["schedule_difference"] <= 1e-5 and figures["shared_difference"] <= 1e-5
    assert all(figures[key] > 0 for key in ("communicator_s", "wake_s", "rebuild_s", "commit_wait_share"))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_rebalance_benchmark() -> None:
    _, figures = run_quick("benchmarks/rebalance.py", "--only", "pp4")
    assert 0.5 < figures["of_best_static"] < 1.2
    assert figures["gain_vs_uniform"] > 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_local_planner_benchmark() -> None:
    _, figures = run_quick("benchmarks/planner_local.py")
    assert 0 <= figures["local_mape"] <= figures["local_max"] < 1
    assert 0 <= figures["local_memory_max"] < 0.3


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_driver_benchmark() -> None:
    _, figures = run_quick("benchmarks/driver.py")
    assert figures["ratio_vs_plain_processes"] > 0
    assert 0 <= figures["driver_share"] < 1
    assert 0 < figures["telemetry_share"] < 1 and 0 < figures["scrape_ms"] < 5000


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_scale_benchmark() -> None:
    _, figures = run_quick("benchmarks/scale.py")
    assert 0 < figures["driver_us_per_rank_step"] < 10_000
    assert 0 < figures["driver_share_16"] < 1
    assert figures["store_operations_per_rank"] > 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_recovery_benchmark() -> None:
    _, figures = run_quick("benchmarks/recovery.py")
    assert all(figures[key] > 0 for key in ("recovery_s_spare", "recovery_s", "restart_s"))
    assert 0 < figures["goodput"] <= 1
