"""The commands about runs that are under way, on a cluster or here: `submit`, `status`, `stop`, `logs`, `rebalance`."""

import argparse
import sys
from typing import TYPE_CHECKING

from raytrain3d.cli_parser import add_address, add_job_command, add_run_command, count_above_0, count_from_0
from raytrain3d.errors import ConfigError

if TYPE_CHECKING:
    from raytrain3d.cli_parser import Commands
    from raytrain3d.gang.jobs import ClusterJob
    from raytrain3d.gang.mailbox import Status

INTERRUPTED = 130
CLUSTER_HELP = ("Ray cluster, or URL of its dashboard such as http://head:8265, which reaches jobs from anywhere (default: "
                "RAY_ADDRESS, else one running here)")


def add_run_commands(commands: "Commands") -> None:
    submit = add_job_command(commands, "submit", run_submit, "train a job on a Ray cluster")
    submit.add_argument("--wait", action="store_true", help="show its output until it ends, exit with its exit code")
    submit.add_argument("--grace", metavar="SECONDS", type=count_above_0, default=300,
                        help="time to save a checkpoint after a stop (default: 300)")
    submit.add_argument("--python", metavar="PATH", default="python",
                        help="interpreter of the cluster's images (default: python)")
    submit.add_argument("--package", choices=("ship", "image"), default="ship",
                        help="send this raytrain3d along (default), or use the one of the cluster's images")
    status = add_run_command(commands, "status", run_status, "say how a running job is")
    stop = add_run_command(commands, "stop", run_stop, "end a running job after its step, with a checkpoint")
    logs = add_run_command(commands, "logs", run_logs, "show what a submitted job has printed, or the log of a rank")
    logs.add_argument("--follow", action="store_true", help="go on until the job ends, exit with its exit code")
    logs.add_argument("--rank", metavar="NUMBER", type=count_from_0, help="the log of this rank, from the run directory")
    rebalance = add_run_command(commands, "rebalance", run_rebalance, "move layers between the stages of a running job")
    rebalance.add_argument("--layers", metavar="COUNTS", required=True,
                           help="layers of each stage, embedding and head counted, such as 5,5,4,2")
    for parser in (submit, status, stop, logs, rebalance):
        add_address(parser, CLUSTER_HELP)


def run_submit(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.jobs import ClusterJobs, Submission
    from raytrain3d.load import load
    from raytrain3d.plan.plan import make_plan

    config = load(arguments.file, arguments.overrides)
    make_plan(config, device="gpu" if config.placement.device == "gpu" else "cpu")  # what has no plan need not travel
    jobs = ClusterJobs(arguments.address)
    how = Submission(grace_s=arguments.grace, python=arguments.python, ship=arguments.package == "ship")
    job = jobs.submit(config, how)
    name = config.run.name
    print(f"submitted {name} as job {job.id} to {jobs.url}")
    if arguments.wait:
        return _follow(job, name, jobs.url)
    for command, rest in (("logs", " --follow"), ("status", ""), ("stop", "")):
        print(f"{command:9} raytrain3d {command} {name} --address {jobs.url}{rest}")
    return 0


def run_status(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.mailbox import ask_run, is_job_server

    try:
        status = ask_run(arguments.run, "status", directory=arguments.directory, address=arguments.address)
    except ConfigError:
        if not is_job_server(arguments.address):
            raise
        return _job_status(arguments)
    _print_status(status)
    return 0


def _print_status(status: "Status") -> None:
    print(f"run       {status.run}\nstate     {status.state}\nstep      {status.step} of {status.num_steps}")
    if status.loss is not None:
        print(f"loss      {status.loss:.4f}")
    if status.tokens_per_s is not None:
        print(f"tokens/s  {status.tokens_per_s:,.0f}")
    if status.goodput is not None:
        print(f"goodput   {status.goodput:.0%} of the time went into steps that counted")
    if status.checkpoint is not None:
        print(f"saved     step {status.checkpoint}")
    for event in status.events:
        print(f"event     {event}")


def _job_status(arguments: argparse.Namespace) -> int:
    """Of a run whose driver does not answer: not yet, or not any more."""
    from raytrain3d.gang.jobs import ClusterJobs

    job = ClusterJobs(arguments.address).job_of(arguments.run)
    state = job.state()
    code = "" if state.exit_code is None else f", exit code {state.exit_code}"
    print(f"run       {arguments.run}\njob       {job.id}: {state.status.lower()}{code}")
    if state.message:
        print(f"message   {state.message.splitlines()[0]}")
    return 0


def run_stop(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.mailbox import ask_run, is_job_server

    if is_job_server(arguments.address):
        from raytrain3d.gang.jobs import ClusterJobs

        job = ClusterJobs(arguments.address).job_of(arguments.run)
        if job.grace_s is not None:  # else Ray would end the driver before it has saved: its mailbox is gentler
            print(f"asked job {job.id} to stop: it ends after the step under way and saves")
            print(f"job {job.id}: {job.stop().status.lower()}")
            return 0
    status = ask_run(arguments.run, "stop", directory=arguments.directory, address=arguments.address)
    print(f"asked {status.run} to stop: it was at step {status.step}, ends after the step under way and saves")
    return 0


def run_logs(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.jobs import ClusterJobs

    if arguments.rank is not None:
        return _rank_log(arguments)
    jobs = ClusterJobs(arguments.address)
    job = jobs.job_of(arguments.run)
    if arguments.follow:
        return _follow(job, arguments.run, jobs.url)
    print(job.printed(), end="")
    return 0


def _rank_log(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    run = arguments.run
    path = Path(run if "/" in run else f"{arguments.directory}/{run}", "logs", f"rank-{arguments.rank:04d}.log")
    if not path.is_file():
        raise ConfigError(f"--rank {arguments.rank}: there is no {path}. Give --directory, or the path of the run directory")
    print(path.read_text(encoding="utf-8"), end="")
    return 0


def _follow(job: "ClusterJob", run: str, url: str) -> int:
    from raytrain3d.gang.follow import follow
    from raytrain3d.gang.jobs import failure_hint

    try:
        state = follow(job, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        print(f"\nthe job goes on; `raytrain3d stop {run} --address {url}` ends it", file=sys.stderr)
        return INTERRUPTED
    if state.status != "SUCCEEDED":
        print(f"job {job.id}: {state.status.lower()}. {state.message}".rstrip(), file=sys.stderr)
    hint = failure_hint(state, job.printed()) if state.status == "FAILED" else None
    if hint is not None:
        print(f"error: {hint}", file=sys.stderr)
    return state.code


def run_rebalance(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.mailbox import ask_run

    status = ask_run(arguments.run, f"rebalance {arguments.layers.replace(' ', '')}", directory=arguments.directory,
                     address=arguments.address)
    print(f"asked {status.run} for stages of {arguments.layers} layers: it was at step {status.step}, moves at the next "
          "boundary and says so in its events")
    return 0
