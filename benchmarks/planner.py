"""How well the planner foretells time and memory of layouts that others have measured.

1. Runs of nanotron on H100 nodes (`--configs`, a CSV). The constants of the cost model are fitted on the nodes of
   `--fit-nodes`; runs on other numbers of nodes are judged, by groups of at least 5 runs of one model on as many nodes.
   `--stalled` lists runs that lost seconds to a fault; `clean` figures leave them out.

   | figure                        | what it says                                                                          |
   |-------------------------------|---------------------------------------------------------------------------------------|
   | `spearman_*`                  | rank correlation of predicted and measured steps, over the groups                     |
   | `regret_*`                    | how much longer the layout predicted fastest takes than the fastest, over the groups  |
   | `rule_*_regret_max`           | the same for rules of thumb                                                           |
   | `memory_error_*`              | predicted over measured memory, judged runs                                           |
   | `memory_under_share`          | runs predicted more than 10 % below what was measured                                 |
   | `memory_over_share`           | runs that ran, but are predicted above 92 GB                                          |

2. The ten rows of https://arxiv.org/abs/2104.04473, table 1. One constant, the efficiency of matrix products, is set by the
   first row; `sc21_mape` and `sc21_max` are errors of the throughput of all rows, `sc21_constant_*` those of the first
   row's throughput taken for all. Every published layout must fit in 80 GB; `sc21_behind_max` says how much faster at
   most the planner's own layout for these GPUs is, and the table why.

    python benchmarks/planner.py --configs RUNS.csv --stalled STALLED.csv --fit-nodes 1,2
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_runs import ROWS, Row
from nanotron_runs import Run, read_runs, read_stalled

from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.candidates import Space
from raytrain3d.plan.catalogue import NODES
from raytrain3d.plan.collectives import TENSOR_DATA_PIPELINE
from raytrain3d.plan.device_memory import Allocation, DeviceMemory, device_memory, usable_bytes
from raytrain3d.plan.fit import fit
from raytrain3d.plan.profile import Profile
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.search import Choice, Evaluator, Search
from raytrain3d.plan.splits import uniform
from raytrain3d.plan.step_time import Cluster, StepTimer, simulated_micro_batches

NANOTRON = {
    "matmul": 0.6, "matmul_half_flops": 1e10, "attention": 0.3, "memory": 0.6, "launch_s": 4e-3, "contention_s": 2e-3,
    "inside": 0.8, "network": 0.8, "inside_step_s": 1e-5, "network_step_s": 5e-5, "exposed_tensor": 0.8,
    "exposed_reduction": 0.5, "exposed_all_reduce": 1.0, "handover_s": 5e-4, "step_s": 2e-2,
}
"""Where the fit of time starts. Messages hold up their sender."""
ALLOCATION = {"state": 1.0, "gathered_weights": 1.0, "activations": 1.0, "run_ahead": 1.0, "logits": 2.0, "base_gb": 0.5}
"""Where the fit of memory starts."""
MEGATRON = Calibration(exposed_handover=1.0, exposed_all_reduce=1.0)
"""A runtime of 2021 that overlaps no communication; but for that the defaults."""
LEAST_GROUP = 5
TOO_MUCH_GB = 92
NARROW_PIPELINES = 4
"""Pipeline sizes that are searched for a row of the table: nearest to the published one."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Fitted constants."""

    calibration: Calibration
    allocation: Allocation

    def timer(self, run: Run) -> StepTimer:
        cluster = Cluster(node=NODES["h100"], calibration=self.calibration, order=TENSOR_DATA_PIPELINE)
        return StepTimer(config=run.job, spec=run.spec, cluster=cluster)

    def step_s(self, run: Run) -> float:
        return self.timer(run).time(run.stages).total

    def memory_gb(self, run: Run) -> float:
        """Of the first pipeline rank: rows with one micro-batch show that it is what the file has."""
        return first_rank(run, self).used(usable_bytes(NODES["h100"], self.allocation)) / 1e9


def first_rank(run: Run, model: Model) -> DeviceMemory:
    timer = model.timer(run)
    count = simulated_micro_batches(run.pipeline, run.micro_batches)
    held = [timer.layer_times[layer] for layer in range(*run.stages[0])]
    return device_memory(run.job, run.spec, run.stages, programs_for("1f1b", run.pipeline, count), 0,
                         allocation=model.allocation, launching_s=sum(time.launch.total for time in held),
                         computing_s=sum((time.compute + time.tensor).total for time in held))


def fitted(runs: Sequence[Run]) -> Model:
    """Constants of time, then those of memory."""
    start = Model(calibration=Calibration(exposed_handover=1.0), allocation=Allocation(usable=0.9))

    def steps(values: Sequence[float]) -> list[float]:
        model = replace(start, calibration=replace(start.calibration, **dict(zip(NANOTRON, values, strict=True))))
        return [model.step_s(run) for run in runs]

    constants = fit(list(NANOTRON.values()), steps, [run.step_s for run in runs])
    timed = replace(start, calibration=replace(start.calibration, **dict(zip(NANOTRON, constants, strict=True))))
    parts = [memory_parts(run, timed) for run in runs]
    limit = usable_bytes(NODES["h100"], start.allocation) / 1e9

    def memory(values: Sequence[float]) -> list[float]:
        return [used_gb(part, dict(zip(ALLOCATION, values, strict=True)), limit) for part in parts]

    found = fit(list(ALLOCATION.values()), memory, [run.memory_gb for run in runs])
    return replace(timed, allocation=replace(start.allocation, **dict(zip(ALLOCATION, found, strict=True))))


def memory_parts(run: Run, model: Model) -> dict[str, float]:
    """What each factor of `Allocation` multiplies, in 10^9 bytes."""
    def only(name: str) -> float:
        one = Allocation(**{key: float(key == name) for key in ALLOCATION})
        memory = first_rank(run, replace(model, allocation=one))
        return (memory.run_ahead if name == "run_ahead" else memory.needed) / 1e9

    return {name: only(name) for name in ALLOCATION}


def used_gb(parts: dict[str, float], factors: dict[str, float], limit: float) -> float:
    needed = sum(parts[name] * factors[name] for name in ALLOCATION if name != "run_ahead")
    return needed + min(parts["run_ahead"] * factors["run_ahead"], max(limit - needed, 0.0))


RULES: dict[str, Callable[[Run], Any]] = {
    "replicas_first": lambda run: (run.data, run.micro_batch),
    "tensor_fills_node": lambda run: (-abs(run.tensor - 8), -run.pipeline, run.micro_batch),
    "pipeline_before_tensor": lambda run: (-run.tensor, -run.pipeline, run.micro_batch),
    "largest_micro_batch": lambda run: (run.micro_batch, -run.tensor * run.pipeline),
}
"""What people go by: the run with the largest value is taken."""


def judge(runs: Sequence[Run], model: Model, fit_nodes: set[int]) -> dict[str, Any]:
    """Figures of part 1."""
    times = {id(run): model.step_s(run) for run in runs}
    judged = [run for run in runs if run.nodes not in fit_nodes]
    groups = sorted({run.group for run in judged})
    figures: dict[str, Any] = {}
    print(f"{'billions':>8s} {'nodes':>5s} {'runs':>5s} {'spearman':>9s} {'regret':>8s}  predicted fastest")
    for kind in ("clean", "all"):
        rows = []
        for group in groups:
            own = [run for run in judged if run.group == group and (kind == "all" or not run.stalled)]
            if len(own) >= LEAST_GROUP:
                predicted = [times[id(run)] for run in own]
                chosen = min(own, key=lambda run: times[id(run)])
                least = min(run.step_s for run in own)
                correlation = spearman(predicted, [run.step_s for run in own])
                rules = {name: max(own, key=rule).step_s / least - 1 for name, rule in RULES.items()}
                rows.append((correlation, chosen.step_s / least - 1, rules))
                if kind == "clean":
                    print(f"{group[0]:8g} {group[1]:5d} {len(own):5d} {correlation:9.3f} {rows[-1][1]:8.1%}  "
                          f"data {chosen.data} pipeline {chosen.pipeline} tensor {chosen.tensor} "
                          f"micro-batch {chosen.micro_batch}")
        if not rows:
            continue
        correlations, regrets, rules_by_group = zip(*rows, strict=True)
        figures |= {f"spearman_median_{kind}": statistics.median(correlations), f"spearman_min_{kind}": min(correlations),
                    f"regret_median_{kind}": statistics.median(regrets), f"regret_max_{kind}": max(regrets)}
        if kind == "clean":
            for name in RULES:
                values = [rules[name] for rules in rules_by_group]
                figures |= {f"rule_{name}_regret_median": statistics.median(values), f"rule_{name}_regret_max": max(values)}
    return figures | judge_memory(judged, model)


def judge_memory(judged: Sequence[Run], model: Model) -> dict[str, float]:
    predicted = [model.memory_gb(run) for run in judged]
    errors = [value / run.memory_gb - 1 for value, run in zip(predicted, judged, strict=True)]
    absolute = sorted(map(abs, errors))
    under = [run for run, error in zip(judged, errors, strict=True) if error < -0.1]
    wide = sum(run.tensor > 1 and run.pipeline > 1 for run in under)
    print(f"\nmemory: {len(under)} of {len(judged)} runs took over 10 % more than predicted, {wide} of them with tensor and "
          "pipeline parallelism: probably gathered inputs of micro-batches in flight that the allocator had not got back "
          "yet, though the host is slower than the device on average")
    return {"memory_error_median": statistics.median(absolute), "memory_error_p90": absolute[int(0.9 * len(absolute))],
            "memory_under_share": len(under) / len(judged),
            "memory_over_share": sum(value > TOO_MUCH_GB for value in predicted) / len(judged)}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""
    return statistics.correlation(ranks(first), ranks(second))


def ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    mean = {value: ordered.index(value) + (ordered.count(value) - 1) / 2 for value in set(values)}
    return [mean[value] for value in values]


def evaluator(calibration: Calibration) -> Evaluator:
    """For the rows of the table."""
    cluster = Cluster(node=NODES["a100"], calibration=calibration, order=TENSOR_DATA_PIPELINE, scattered_messages=True)
    return Evaluator(cluster=cluster, allocation=Allocation())


def published(row: Row, calibration: Calibration) -> Choice:
    """A row's own layout, blocks split evenly."""
    own = evaluator(calibration)
    return own.choice(own.timer(row.job), uniform(row.blocks + 2, row.pipeline * row.chunks))


def calibrated_on(row: Row) -> Calibration:
    """MEGATRON with the efficiency of matrix products that gives the row's throughput."""
    low, high = 0.1, 1.0
    for _ in range(30):
        matmul = (low + high) / 2
        slow = row.tflops_at(published(row, replace(MEGATRON, matmul=matmul)).step.total) < row.tflops
        low, high = (matmul, high) if slow else (low, matmul)
    return replace(MEGATRON, matmul=matmul)


def judge_table(*, search: bool) -> dict[str, Any]:
    """Figures of part 2. search: compare with the planner's own layouts."""
    calibration = calibrated_on(ROWS[0])
    print(f"\n{'billions':>8s} {'measured':>9s} {'predicted':>9s} {'error':>7s} {'GB':>6s}  planner's own")
    errors, behind, fit_all = [], [0.0], True
    for row in ROWS:
        choice = published(row, calibration)
        tflops = row.tflops_at(choice.step.total)
        errors.append(tflops / row.tflops - 1)
        fit_all &= choice.fits()
        own = ""
        if search and (best := best_for(row, calibration)) is not None:
            behind.append(choice.step.total / best.step.total - 1)
            own = f"{behind[-1]:+6.1%}  {difference(choice, best)}"
        print(f"{row.billions:8.1f} {row.tflops:9.0f} {tflops:9.1f} {errors[-1]:+7.1%} {choice.needed / 1e9:6.1f}  {own}")
    constant = [ROWS[0].tflops / row.tflops - 1 for row in ROWS]
    return {"sc21_mape": mean_of(errors), "sc21_max": max(map(abs, errors)), "sc21_constant_mape": mean_of(constant),
            "sc21_constant_max": max(map(abs, constant)), "sc21_all_fit": fit_all, "sc21_behind_max": max(behind)}


def best_for(row: Row, calibration: Calibration) -> Choice | None:
    """The planner's choice among what that runtime could do: its schedules, its optimizer, full recompute."""
    pipelines = sorted((p for p in range(1, row.blocks + 1) if row.gpus % (row.tensor * p) == 0),
                       key=lambda p: abs(p - row.pipeline))[:NARROW_PIPELINES]
    space = Space(shardings=("none",), recomputes=("full",), sequence_parallel=(False,), pipelines=tuple(sorted(pipelines)),
                  schedules=(("1f1b", 1), ("interleaved", 2), ("interleaved", 3)))
    return Search(row.job, row.gpus, evaluator(calibration), space).fastest()


def difference(published: Choice, best: Choice) -> str:
    """What the planner would do, and which part of the step that saves."""
    mesh, pipeline, train = best.config.mesh, best.config.pipeline, best.config.train
    parts = {name: getattr(published.step, name) - getattr(best.step, name)
             for name in ("idle", "tensor", "messages", "data", "launch")}
    saves = max(parts, key=lambda name: parts[name])
    return (f"data {mesh.data} pipeline {mesh.pipeline} tensor {mesh.tensor} {pipeline.schedule} x {pipeline.num_chunks} "
            f"micro-batch {train.micro_batch}: {parts[saves] / published.step.total:.1%} less {saves}")


def mean_of(errors: Sequence[float]) -> float:
    return statistics.mean(map(abs, errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", required=True, help="CSV of measured runs")
    parser.add_argument("--stalled", required=True, help="CSV of those that stalled")
    parser.add_argument("--fit-nodes", default="1,2", help="numbers of nodes whose runs constants are fitted on")
    parser.add_argument("--save", metavar="FILE", help="write the fitted constants as JSON")
    parser.add_argument("--quick", action="store_true", help="leave out the search for the rows of the table")
    arguments = parser.parse_args()
    fit_nodes = {int(text) for text in arguments.fit_nodes.split(",")}
    runs = list(read_runs(arguments.configs, read_stalled(arguments.stalled)))
    model = fitted([run for run in runs if run.nodes in fit_nodes])
    if arguments.save:
        Profile(calibration=model.calibration, allocation=model.allocation, about="nanotron runs").save(arguments.save)
    figures = judge(runs, model, fit_nodes) | judge_table(search=not arguments.quick)
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}))


if __name__ == "__main__":
    main()
