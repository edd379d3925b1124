"""The command line: one small function per command.

Each imports what it needs itself, so that `plan` and `config` work without torch and Ray. An error that the system
foresees ends as one message on stderr: exit code 2 for what a person must change first (configuration, plan, data), 1
for a run that failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain3d.cli_checkpoint import add_checkpoint_commands, add_model_commands
from raytrain3d.cli_data import add_data_commands, print_dataset, showing
from raytrain3d.cli_parser import FAILED, Command, add_command, add_job_command, add_launcher
from raytrain3d.cli_plan import add_plan_commands, job_of, plan_of
from raytrain3d.cli_report import add_report_command, write
from raytrain3d.cli_run import add_run_commands
from raytrain3d.errors import ConfigError, DataError, PlanError, RayTrain3DError

if TYPE_CHECKING:
    from raytrain3d.config import JobConfig

BAD_INPUT, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parsed = parse(arguments)
    command: Command = parsed.command
    try:
        return command(parsed)
    except RayTrain3DError as error:
        if parsed.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, ConfigError | PlanError | DataError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if parsed.debug or (error.name or "").partition(".")[0] == __package__:
            raise
        print(f"error: this Python ({sys.executable}) lacks the package {error.name}: run the one that raytrain3d is "
              "installed for, by its path (/opt/venv/bin/python -m raytrain3d ..., or `raytrain3d submit --python`)",
              file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line -> namespace with `command` and `debug`. Overrides may stand anywhere after the file."""
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if any(text.startswith("-") or "overrides" not in parsed for text in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides += rest
    return parsed


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raytrain3d", description="3D-parallel pre-training of transformer language "
                                     "models on Ray.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = add_job_command(commands, "train", run_train, "train a job; continues it from its newest checkpoint")
    check = add_job_command(commands, "check", run_check, "start the job's gangs, try links, disk and data, and end")
    for sub in (train, check):
        add_launcher(sub)
    add_plan_commands(commands)
    trace = add_command(commands, "trace", run_trace,
                        "merge a run's recorded timelines into one file and compare idle shares")
    trace.add_argument("run_directory", metavar="RUN_DIRECTORY", help="directory of the run, such as runs/quickstart")
    trace.add_argument("--output", metavar="PATH", help="trace for https://ui.perfetto.dev (default: trace.json in the "
                       "run directory)")
    add_report_command(commands)
    compare = add_command(commands, "compare", run_compare, "say whether two runs are the same to the bit")
    for name in ("first", "second"):
        compare.add_argument(name, metavar="RUN_DIRECTORY", help="directory of a run, such as runs/quickstart")
    add_data_commands(commands)
    add_checkpoint_commands(commands)
    add_model_commands(commands)
    add_run_commands(commands)
    add_command(commands, "config", run_config, "print the reference of all configuration keys")
    add_command(commands, "commands", run_commands, "print the reference of all commands")
    add_command(commands, "metrics", run_metrics, "print the reference of all metrics")
    add_command(commands, "version", run_version, "print the version")
    return parser


def run_train(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.run import run_job

    config = _ready_job(arguments)
    return run_job(config, launcher=arguments.launcher, address=arguments.address)


def run_check(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.run import check_job

    config = _ready_job(arguments)
    return check_job(config, launcher=arguments.launcher, address=arguments.address)


def run_trace(arguments: argparse.Namespace) -> int:
    from raytrain3d.metrics.trace import idle_table, merged_trace, read_plan, read_traces

    directory = Path(arguments.run_directory)
    plan = read_plan(directory)
    steps = read_traces(directory, plan)
    print(idle_table(plan, steps))
    write(arguments.output or str(directory / "trace.json"), merged_trace(plan, steps))
    return 0


def run_compare(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.compare import compare_runs

    same, text = compare_runs(arguments.first, arguments.second)
    print(text)
    return 0 if same else FAILED


def run_config(arguments: argparse.Namespace) -> int:
    from raytrain3d.reference import reference

    print(reference(), end="")
    return 0


def run_commands(arguments: argparse.Namespace) -> int:
    from raytrain3d.cli_reference import command_reference

    print(command_reference(make_parser()), end="")
    return 0


def run_metrics(arguments: argparse.Namespace) -> int:
    from raytrain3d.metrics.catalogue import reference

    print(reference(), end="")
    return 0


def run_version(arguments: argparse.Namespace) -> int:
    try:
        print(f"raytrain3d {metadata.version('raytrain3d')}")
    except metadata.PackageNotFoundError:
        print("raytrain3d, run from its source without being installed")
    return 0


def _ready_job(arguments: argparse.Namespace) -> "JobConfig":
    """The job of the command line. It has a plan, and data if they can be prepared."""
    from raytrain3d.data.prepare import prepare_if_missing

    config = job_of(arguments)
    plan_of(config)  # what cannot be laid out should not cost a preparation
    _check_start(config)
    with showing() as display:
        manifest = prepare_if_missing(config, display)
    if manifest is not None:
        print_dataset(str(config.data.path), manifest)
    return config


def _check_start(config: "JobConfig") -> None:
    """CheckpointError when the model to start from cannot be read. A run that has started needs it no more: it may be gone.
    """
    directory = config.model.from_huggingface
    if directory is not None and os.path.exists(directory):
        from raytrain3d.checkpoint.huggingface import HuggingFaceWeights

        HuggingFaceWeights(directory)
