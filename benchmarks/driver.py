"""What the driver costs: a job of 2 ranks on Ray against the same trainers in plain processes without any driver.

Ray is started as the package starts one. Pairs of runs are interleaved. A run's step time is the median time from the start
of one step to the start of the next; what the driver adds between leases, once in 20 steps, is in the mean of these times
and in `driver_share`. Prints a table and one line of JSON: `ratio_vs_plain_processes` (median, 90 % interval) and the same
of means, both also of the plain runs against each other, `driver_share` (time between steps over all time),
`commit_wait_share`, `telemetry_share` (all that is done to see a step, on a rank and on the driver, over the step) and
`scrape_ms` (a scrape of all metrics of 64 stages x 16 replicas).

    python benchmarks/driver.py [--quick]
"""

import argparse
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
from common import figure, means, ratios
from telemetry import driver_step_seconds, mark_seconds, ray_copy_share, scrape_figures

from raytrain3d.config import (DataConfig, JobConfig, LearningRateConfig, MeshConfig, ModelConfig, PlacementConfig,
                               RebalanceConfig, RunConfig, TrainConfig)
from raytrain3d.data.prepare import prepare
from raytrain3d.gang.ray_cluster import OWN_ENVIRONMENT
from raytrain3d.gang.run import run_job
from raytrain3d.metrics.trace import COMPUTE
from raytrain3d.parallel.groups import serve_store
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.program import programs_for
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

WARMUP = 5
"""Steps of every run that are not counted."""


class TimedTrainer(Trainer):
    """Writes (start, end, commit wait, telemetry) of every step to `<run.directory>/times-<rank>.json` when it closes."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank)
        self._times: list[tuple[float, float, float, float]] = []
        self._reporting_s = 0.0
        self._path = Path(config.run.directory) / f"times-{rank}.json"

    def step(self, n: int) -> StepReport:
        start = time.monotonic()
        report = super().step(n)
        self._times.append((start, time.monotonic(), report.commit_wait_s, self._reporting_s))
        return report

    def _report(self, n: int, *more: Any) -> StepReport:
        start = time.perf_counter()
        report = super()._report(n, *more)
        self._reporting_s = time.perf_counter() - start
        return report

    def close(self) -> None:
        if self._times:
            self._path.write_text(json.dumps(self._times))
        super().close()


def job(directory: Path, steps: int) -> JobConfig:
    """2 stages, about 0.1 s a step on one thread each."""
    prepare(["{stdlib}/*.py"], str(directory / "data"), "bytes", 0.05)
    return JobConfig(
        run=RunConfig(name="driver", directory=str(directory)), data=DataConfig(path=str(directory / "data")),
        model=ModelConfig(vocabulary=257, hidden=128, blocks=4, heads=4, feed_forward=352),
        mesh=MeshConfig(pipeline=2), learning_rate=LearningRateConfig(peak=1e-3),
        train=TrainConfig(steps=steps, global_batch=8, micro_batch=2, sequence=128, lease=20),
        placement=PlacementConfig(device="cpu", cpus_per_rank=0.5),
        rebalance=RebalanceConfig(mode="advise"))  # decisions are the driver's work; moves would make it another job


def plain_rank(config: JobConfig, plan: Plan, rank: int, port: int) -> None:
    trainer = TimedTrainer(config, plan, rank)
    trainer.connect("127.0.0.1", port, 0)
    trainer.initialize()
    for n in range(1, config.train.steps + 1):
        trainer.step(n)
    trainer.close()


def run_plain(config: JobConfig) -> dict[str, float]:
    plan, store, context = make_plan(config), serve_store("127.0.0.1"), multiprocessing.get_context("spawn")
    processes = [context.Process(target=plain_rank, args=(config, plan, rank, store.port)) for rank in range(plan.mesh.size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return figures(config)


def run_on_ray(config: JobConfig, number: int) -> dict[str, float]:
    named = replace(config, run=replace(config.run, name=f"driver-{number}"))
    code = run_job(named, launcher="ray", output=io.StringIO(), trainer=TimedTrainer)
    assert code == 0, f"the job ended with {code}"
    return figures(config)


def figures(config: JobConfig) -> dict[str, float]:
    """Means over ranks: seconds per step (median and mean), shares of time between steps and of waiting for the commit
    vector, seconds of a step's report."""
    found: list[dict[str, float]] = []
    for path in Path(config.run.directory).glob("times-*.json"):
        times: list[tuple[float, float, float, float]] = json.loads(path.read_text())[WARMUP:]
        total = times[-1][1] - times[0][0]
        inside = sum(end - start for start, end, *_ in times)
        between = [later[0] - earlier[0] for earlier, later in pairwise(times)]
        found.append({"step_s": statistics.median(between), "mean_step_s": total / len(times),
                      "driver_share": 1 - inside / total, "commit_wait_share": sum(wait for _, _, wait, _ in times) / total,
                      "report_s": statistics.median(report for *_, report in times)})
        path.unlink()
    assert len(found) == 2, "both ranks leave their times"
    return {key: statistics.mean(one[key] for one in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pairs, under a minute")
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    pairs, steps = (2, 25) if arguments.quick else (arguments.pairs, 65)
    os.environ |= {**OWN_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        config = job(Path(scratch), steps)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        rows = []
        for number in range(pairs):
            plain, on_ray, again = run_plain(config), run_on_ray(config, number), run_plain(config)
            rows.append((plain, on_ray, again))
            print(f"pair {number:2d}  plain {plain['step_s'] * 1e3:7.1f} ms  ray {on_ray['step_s'] * 1e3:7.1f} ms  "
                  f"driver {on_ray['driver_share']:.2%}  commit wait {on_ray['commit_wait_share']:.2%}", flush=True)
        copy_share = ray_copy_share(config)
        ray.shutdown()
        step_s = statistics.median(row[0]["step_s"] for row in rows)
        on_rank = statistics.median(row[0]["report_s"] for row in rows) + marks_of(config) * mark_seconds()
        on_driver = driver_step_seconds(config)
    seen = {"telemetry_share": round((on_rank + on_driver) / step_s + copy_share, 5),
            "telemetry_rank_us": round(1e6 * on_rank, 1), "telemetry_driver_us": round(1e6 * on_driver, 1),
            "ray_copy_share": round(copy_share, 5), **scrape_figures()}
    print(json.dumps(summary(rows) | seen))


def marks_of(config: JobConfig) -> int:
    """Marks of a rank in a step, at most: two around each op, and two around each layer's part in a compute op."""
    plan = make_plan(config)
    program = programs_for(plan.schedule, plan.mesh.pipeline, plan.shares[0], plan.chunks)
    layers = max(len(plan.layers_of_rank(rank)) for rank in range(plan.mesh.pipeline))
    return max(sum(2 + 2 * layers * (op.kind in COMPUTE) for op in ops) for ops in program.ops)


def summary(rows: list[tuple[dict[str, float], dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, suffix in (("step_s", ""), ("mean_step_s", "_means")):
        plain, on_ray, again = ([run[key] for run in runs] for runs in zip(*rows, strict=True))
        found |= figure(f"ratio_vs_plain_processes{suffix}", ratios(on_ray, means(plain, again)))
        found |= figure(f"plain_vs_itself{suffix}", ratios(again, plain))
    return {
        **found,
        "driver_share": round(statistics.median(row[1]["driver_share"] for row in rows), 5),
        "commit_wait_share": round(statistics.median(row[1]["commit_wait_share"] for row in rows), 4),
        "pairs": len(rows), "ranks": 2,
    }


if __name__ == "__main__":
    main()
