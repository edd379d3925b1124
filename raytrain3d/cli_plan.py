"""The commands that look ahead: `plan` and `simulate`, which need neither torch nor Ray, and `profile` and `tune`, which
measure."""

import argparse
from typing import TYPE_CHECKING

from raytrain3d.cli_parser import add_job_command, add_launcher, count_above_0, count_from_0, number_from_0
from raytrain3d.cli_report import write, write_plan_page
from raytrain3d.errors import ConfigError

if TYPE_CHECKING:
    from raytrain3d.cli_parser import Commands
    from raytrain3d.config import JobConfig
    from raytrain3d.plan.catalogue import Node
    from raytrain3d.plan.explain import Subject
    from raytrain3d.plan.plan import Plan
    from raytrain3d.plan.search import Evaluator


DEVICE_MTTF_H = 50_000.0
"""419 unexpected interruptions in 54 days on 16,384 H100 (https://arxiv.org/abs/2407.21783, section 3.3.4)."""
RECOVERY_S, DAYS = 120.0, 30.0


def add_plan_commands(commands: "Commands") -> None:
    plan = add_job_command(commands, "plan", run_plan, "print the plan of a job; needs neither torch nor Ray")
    plan.add_argument("--json", action="store_true", help="as JSON")
    plan.add_argument("--html", metavar="FILE", help="page of the plan to write, too")
    plan.add_argument("--search", action="store_true",
                      help="find the fastest layout for --ranks devices of --on, and show it instead of the job's own")
    plan.add_argument("--explain", action="store_true", help="answer what people ask about layouts, for this job on --on")
    plan.add_argument("--about", metavar="QUESTION", help="explain only this: fit, idle, gradients, tensor_against_fsdp, "
                      "pipelines, tensor_across_nodes, half_the_tensor, pipeline_only or partitioners")
    add_nodes(plan)
    plan.add_argument("--ranks", metavar="NUMBER", type=count_above_0, help="devices (default: those of the job's mesh)")
    plan.add_argument("--output", metavar="FILE", help="job file to write with the layout found")
    simulate = add_job_command(commands, "simulate", run_simulate,
                               "simulate a step of a job's pipeline; needs neither torch nor Ray")
    simulate.add_argument("--format", choices=("table", "json", "perfetto", "html"), default="table",
                          help="text grid and idle shares (default), JSON, a trace for https://ui.perfetto.dev, or a page")
    simulate.add_argument("--output", metavar="PATH", help="file to write (default: standard output)")
    simulate.add_argument("--tflops", metavar="NUMBER", type=number_from_0, default=1.0,
                          help="speed of a rank in TFLOP/s, which turns FLOPs into seconds (default: 1)")
    simulate.add_argument("--hop-ms", metavar="NUMBER", type=number_from_0, default=0.0,
                          help="milliseconds from the end of an op to the arrival of its message (default: 0)")
    _add_failures(simulate)
    add_nodes(simulate)
    profile = add_job_command(commands, "profile", run_profile,
                              "time a layer of each kind of a job on the devices that there are, for plan --calibration")
    profile.add_argument("--output", metavar="FILE", required=True, help="JSON file to write")
    tune = add_job_command(commands, "tune", run_tune,
                           "run the layouts that plan --search likes best for a few steps each, on made-up tokens")
    tune.add_argument("--top", metavar="NUMBER", type=count_above_0, default=3, help="layouts to run (default: 3)")
    tune.add_argument("--steps", metavar="NUMBER", type=count_above_0, default=5, help="steps that count (default: 5)")
    tune.add_argument("--ranks", metavar="NUMBER", type=count_above_0, help="devices (default: those of the job's mesh)")
    tune.add_argument("--output", metavar="FILE", help="job file to write with the fastest layout")
    for parser in (profile, tune):
        add_nodes(parser, calibration=parser is tune)
        add_launcher(parser)


def _add_failures(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument("--failures", action="store_true",
                          help="instead of a step, days on --on with failures: goodput by interval of checkpoints")
    for name, default, text in (("--mttf-hours", DEVICE_MTTF_H, "mean hours until one device fails the job"),
                                ("--recovery-s", RECOVERY_S, "seconds from a failure to the next step"),
                                ("--days", DAYS, "days to simulate")):
        simulate.add_argument(name, metavar="NUMBER", type=number_from_0, default=default,
                              help=f"{text} (default: {default:g})")
    simulate.add_argument("--save-s", metavar="NUMBER", type=number_from_0,
                          help="seconds for which a checkpoint holds up the training (default: a copy to host memory)")
    simulate.add_argument("--seed", metavar="NUMBER", type=count_from_0, default=0,
                          help="same seed, same failures (default: 0)")


def add_nodes(parser: argparse.ArgumentParser, *, calibration: bool = True) -> None:
    """The options of the cost model."""
    parser.add_argument("--on", metavar="NODE", default="h100",
                        help="node type: a100, h100, h200, b200, l40s, cpu or one of --nodes (default: h100)")
    parser.add_argument("--nodes", metavar="FILE", help="JSON file with more node types")
    if calibration:
        parser.add_argument("--calibration", metavar="FILE",
                            help="JSON file with constants of the model, as profile writes it")


def run_plan(arguments: argparse.Namespace) -> int:
    config = job_of(arguments)
    if arguments.search:
        return _search(config, arguments)
    if arguments.explain or arguments.about is not None:
        return _explain(config, arguments)
    plan = plan_of(config)
    print(plan.to_json().rstrip() if arguments.json else plan.table())
    if arguments.html:
        write_plan_page(arguments.html, config, plan)
    return 0


def _search(config: "JobConfig", arguments: argparse.Namespace) -> int:
    """`plan --search`."""
    from raytrain3d.load import dump
    from raytrain3d.plan.folklore import folklore
    from raytrain3d.plan.found_table import found_json, found_table
    from raytrain3d.plan.search import search_layouts

    evaluator, num_ranks = _evaluator(arguments), _num_ranks(config, arguments)
    found = search_layouts(config, num_ranks, evaluator)
    usual = folklore(config, num_ranks, evaluator)
    print(found_json(found, usual) if arguments.json else found_table(found, usual))
    if arguments.output:
        write(arguments.output, dump(found.best.config))
    if arguments.html:
        from raytrain3d.metrics.found_report import found_report
        write(arguments.html, found_report(config.run.name, found, usual))
    return 0


def _num_ranks(config: "JobConfig", arguments: argparse.Namespace) -> int:
    mesh, ranks = config.mesh, arguments.ranks
    return ranks if ranks is not None else mesh.replicas * mesh.pipeline * mesh.tensor


def _explain(config: "JobConfig", arguments: argparse.Namespace) -> int:
    """`plan --explain`."""
    from raytrain3d.plan.answer import answers_json, answers_text
    from raytrain3d.plan.explain import explain

    answers = explain(_subject(config, arguments), arguments.about)
    print(answers_json(answers) if arguments.json else answers_text(answers))
    return 0


def _subject(config: "JobConfig", arguments: argparse.Namespace) -> "Subject":
    from raytrain3d.plan.explain import Subject

    return Subject(config=config, make_plan=lambda: plan_of(config), evaluator=_evaluator(arguments))


def _node(arguments: argparse.Namespace) -> "Node":
    """Of `--on` and `--nodes`."""
    from raytrain3d.plan.catalogue import NODES, node_named, read_nodes

    return node_named(arguments.on, read_nodes(arguments.nodes) if arguments.nodes else NODES)


def _evaluator(arguments: argparse.Namespace) -> "Evaluator":
    """Of `--on`, `--nodes` and `--calibration`."""
    from raytrain3d.plan.profile import Profile
    from raytrain3d.plan.search import Evaluator
    from raytrain3d.plan.step_time import Cluster

    profile = Profile.read(arguments.calibration) if arguments.calibration else Profile()
    return Evaluator(cluster=Cluster(node=_node(arguments), calibration=profile.calibration), allocation=profile.allocation)


def run_simulate(arguments: argparse.Namespace) -> int:
    from raytrain3d.metrics.trace import simulated_trace
    from raytrain3d.plan.simulation import simulate_job

    if arguments.tflops == 0:
        raise ConfigError("--tflops is 0: must be above 0")
    config = job_of(arguments)
    if arguments.failures:
        return _failures(config, arguments)
    simulation = simulate_job(config, plan_of(config), tflops=arguments.tflops, hop_s=arguments.hop_ms / 1e3)
    match arguments.format:
        case "json":
            text = simulation.to_json()
        case "perfetto":
            text = simulated_trace(simulation.plan, simulation.timelines)
        case "html":
            from raytrain3d.metrics.plan_report import simulation_report
            text = simulation_report(config.run.name, simulation)
        case _:
            text = simulation.table() + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        write(arguments.output, text)
    return 0


def _failures(config: "JobConfig", arguments: argparse.Namespace) -> int:
    """`simulate --failures`."""
    from raytrain3d.plan.failures import failures_of
    from raytrain3d.plan.failures_table import failures_json, failures_table, outcomes

    if arguments.format not in ("table", "json"):
        raise ConfigError(f"--format is {arguments.format!r}: with --failures valid are table and json")
    for option in ("mttf_hours", "days"):
        if getattr(arguments, option) == 0:
            raise ConfigError(f"--{option.replace('_', '-')} is 0: must be above 0")
    choice = _subject(config, arguments).choice
    failures = failures_of(choice, device_mttf_h=arguments.mttf_hours, recovery_s=arguments.recovery_s,
                           save_s=arguments.save_s)
    found = outcomes(failures, config.checkpoint.interval, days=arguments.days, seed=arguments.seed)
    text = (failures_json if arguments.format == "json" else failures_table)(choice, failures, found, days=arguments.days)
    if arguments.output is None:
        print(text)
    else:
        write(arguments.output, text + "\n")
    return 0


def run_profile(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.profiling import profile_job

    profile = profile_job(job_of(arguments), _node(arguments), launcher=arguments.launcher, address=arguments.address,
                          say=print)
    print(profile.text())
    profile.save(arguments.output)
    print(f"wrote {arguments.output}")
    return 0


def run_tune(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.tuning import tune_job
    from raytrain3d.load import dump

    config = job_of(arguments)
    tuned = tune_job(config, _num_ranks(config, arguments), _evaluator(arguments), top=arguments.top,
                     num_steps=arguments.steps, launcher=arguments.launcher, address=arguments.address, say=print)
    print(tuned.table())
    if arguments.output:
        write(arguments.output, dump(tuned.winner))
    return 0


def job_of(arguments: argparse.Namespace) -> "JobConfig":
    from raytrain3d.load import load

    return load(arguments.file, arguments.overrides)


def plan_of(config: "JobConfig") -> "Plan":
    from raytrain3d.metrics.records import measured_costs
    from raytrain3d.plan.plan import make_plan

    return make_plan(config, device="gpu" if config.placement.device == "gpu" else "cpu", measured=measured_costs(config))
