"""Parts that the command line is built from: kinds of commands, and numbers as arguments."""

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

Command = Callable[[argparse.Namespace], int]
"""Runs one command; returns the exit code."""
FAILED = 1
"""Exit code of a command that could not do what it was asked."""

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: "Commands", name: str, command: Command | None, text: str) -> argparse.ArgumentParser:
    """A command, or with None a group of them. `text` says what it does, without a capital and a full stop."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    if command is not None:
        parser.set_defaults(command=command)
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_job_command(commands: "Commands", name: str, command: Command, text: str) -> argparse.ArgumentParser:
    """A command that works on a job file with overrides."""
    parser = add_command(commands, name, command, text)
    parser.add_argument("file", metavar="FILE", help="job file, such as jobs/quickstart.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[],
                        help="changes to the file, such as train.steps=50")
    return parser


def add_run_command(commands: "Commands", name: str, command: Command, text: str) -> argparse.ArgumentParser:
    """A command that works on a run, by its name or its directory."""
    parser = add_command(commands, name, command, text)
    parser.add_argument("run", metavar="RUN", help="name of the run, or path of its run directory")
    parser.add_argument("--directory", default="runs", help="directory that holds run directories (default: runs)")
    return parser


def count_above_0(text: str) -> int:
    """Type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def count_from_0(text: str) -> int:
    """Type of an argument."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def number_from_0(text: str) -> float:
    """Type of an argument."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return number


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """The options that say what ranks run in."""
    parser.add_argument("--launcher", choices=("ray", "local", "inline"), default="ray",
                        help="what ranks run in: Ray actors (default), plain processes, or this process")
    add_address(parser, "Ray cluster (default: RAY_ADDRESS, else one running here, else one is started)")


def add_address(parser: argparse.ArgumentParser, text: str) -> None:
    """The option that names a Ray cluster."""
    parser.add_argument("--address", metavar="ADDRESS", help=text)
