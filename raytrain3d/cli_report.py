"""Commands whose result is a page of HTML to open in a browser: `report`, and the pages of `plan` and `simulate`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain3d.cli_parser import add_run_command
from raytrain3d.errors import ConfigError

if TYPE_CHECKING:
    from raytrain3d.cli_parser import Commands
    from raytrain3d.config import JobConfig
    from raytrain3d.plan.plan import Plan


def add_report_command(commands: "Commands") -> None:
    report = add_run_command(commands, "report", run_report, "make a page of a run's curves, pipeline, moves and failures")
    report.add_argument("--output", metavar="FILE", help="page to write (default: report.html in the run directory)")


def run_report(arguments: argparse.Namespace) -> int:
    from raytrain3d.metrics.run_report import run_report as made

    path = Path(arguments.run) if "/" in arguments.run else Path(arguments.directory) / arguments.run
    write(arguments.output or str(path / "report.html"), made(path))
    return 0


def write_plan_page(path: str, config: "JobConfig", plan: "Plan") -> None:
    """`plan --html`. A rank's speed is taken as 1 TFLOP/s: shares of time do not depend on it."""
    from raytrain3d.metrics.plan_report import plan_report
    from raytrain3d.plan.simulation import simulate_job

    write(path, plan_report(config.run.name, simulate_job(config, plan, tflops=1.0, hop_s=0.0)))


def write(path: str, text: str) -> None:
    """For options that name a file. ConfigError when it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path!r} cannot be written ({error.strerror}): name a file in a directory that is "
                          "there") from None
    print(f"wrote {path}")
