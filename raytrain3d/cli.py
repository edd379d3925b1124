"""The command line: one small function per command.

Each imports what it needs itself, so that `plan` and `config` work without torch and Ray. An error that the system
foresees ends as one message on stderr: exit code 2 for what a person must change first (configuration, plan, data), 1
for a run that failed.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain3d.errors import ConfigError, DataError, PlanError, RayTrain3DError

if TYPE_CHECKING:
    from raytrain3d.config import JobConfig
    from raytrain3d.data.manifest import DatasetManifest
    from raytrain3d.data.prepare import PrepareProgress
    from raytrain3d.plan.plan import Plan

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
PROGRESS_INTERVAL_S = 2.0

Command = Callable[[argparse.Namespace], int]


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
    train = _job_command(commands, "train", run_train, "train a job; continues it from its newest checkpoint")
    check = _job_command(commands, "check", run_check, "start the job's gangs, try links, disk and data, and end")
    for sub in (train, check):
        sub.add_argument("--launcher", choices=("ray", "local", "inline"), default="ray",
                         help="what ranks run in: Ray actors (default), plain processes, or this process")
        _address(sub)
    plan = _job_command(commands, "plan", run_plan, "print the plan of a job; needs neither torch nor Ray")
    plan.add_argument("--json", action="store_true", help="as JSON")
    simulate = _job_command(commands, "simulate", run_simulate,
                            "simulate a step of a job's pipeline; needs neither torch nor Ray")
    simulate.add_argument("--format", choices=("table", "json", "perfetto"), default="table",
                          help="text grid and idle shares (default), JSON, or a trace for https://ui.perfetto.dev")
    simulate.add_argument("--output", metavar="PATH", help="file to write (default: standard output)")
    simulate.add_argument("--tflops", metavar="NUMBER", type=_number, default=1.0,
                          help="speed of a rank in TFLOP/s, which turns FLOPs into seconds (default: 1)")
    simulate.add_argument("--hop-ms", metavar="NUMBER", type=_number, default=0.0,
                          help="milliseconds from the end of an op to the arrival of its message (default: 0)")
    trace = _command(commands, "trace", run_trace, "merge a run's recorded timelines into one file and compare idle shares")
    trace.add_argument("run_directory", metavar="RUN_DIRECTORY", help="directory of the run, such as runs/quickstart")
    trace.add_argument("--output", metavar="PATH", help="trace for https://ui.perfetto.dev (default: trace.json in the "
                       "run directory)")
    data = _command(commands, "data", None, "token data").add_subparsers(metavar="COMMAND", required=True)
    _job_command(data, "prepare", run_prepare, "make data.path from the text files of data.text")
    _checkpoint_commands(commands)
    _model_commands(commands)
    for name, command, text in (("status", run_status, "say how a running job is"),
                                ("stop", run_stop, "end a running job after its step, with a checkpoint"),
                                ("rebalance", run_rebalance, "move layers between the stages of a running job")):
        sub = _command(commands, name, command, text)
        if command is run_rebalance:
            sub.add_argument("--layers", metavar="COUNTS", required=True,
                             help="layers of each stage, embedding and head counted, such as 5,5,4,2")
        sub.add_argument("run", metavar="RUN", help="name of the run, or path of its run directory")
        sub.add_argument("--directory", default="runs", help="directory that holds run directories (default: runs)")
        _address(sub)
    _command(commands, "config", run_config, "print the reference of all configuration keys")
    _command(commands, "version", run_version, "print the version")
    return parser


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def _command(commands: "Commands", name: str, command: Command | None, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    if command is not None:
        parser.set_defaults(command=command)
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _job_command(commands: "Commands", name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser = _command(commands, name, command, text)
    parser.add_argument("file", metavar="FILE", help="job file, such as jobs/quickstart.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[],
                        help="changes to the file, such as train.steps=50")
    return parser


def _run_command(commands: "Commands", name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser = _command(commands, name, command, text)
    parser.add_argument("run", metavar="RUN", help="name of the run, or path of its run directory")
    parser.add_argument("--directory", default="runs", help="directory that holds run directories (default: runs)")
    return parser


def _checkpoint_commands(commands: "Commands") -> None:
    group = _command(commands, "checkpoint", None, "look at, convert and delete checkpoints")
    parts = group.add_subparsers(metavar="COMMAND", required=True)
    _run_command(parts, "list", run_checkpoint_list, "list the checkpoints of a run")
    inspect = _read_command(parts, "inspect", run_checkpoint_inspect, "say what a checkpoint holds")
    inspect.add_argument("--parameters", action="store_true", help="a row for each parameter instead of each file")
    _read_command(parts, "verify", run_checkpoint_verify, "read all of a checkpoint and compare its checksums")
    prune = _run_command(parts, "prune", run_checkpoint_prune, "delete old checkpoints of a run")
    prune.add_argument("--keep", metavar="NUMBER", type=_count, required=True, help="newest checkpoints to keep")
    importing = _command(parts, "import", run_checkpoint_import, "make a checkpoint of a Hugging Face model")
    importing.add_argument("source", metavar="DIR", help="directory with config.json and safetensors files")
    importing.add_argument("--output", metavar="CHECKPOINT", required=True, help="directory or URI to write")
    importing.add_argument("--run", metavar="NAME", help="run that the checkpoint shall belong to (default: the name in "
                           ".../NAME/checkpoints/step-0, else the last part of --output)")
    exporting = _read_command(parts, "export", run_checkpoint_export, "make a Hugging Face model of a checkpoint")
    exporting.add_argument("--output", metavar="DIR", required=True, help="directory to write")


def _model_commands(commands: "Commands") -> None:
    generate = _read_command(commands, "generate", run_generate, "let the model of a checkpoint write on")
    generate.add_argument("--prompt", metavar="TEXT", required=True, help="text to begin with")
    generate.add_argument("--tokens", metavar="NUMBER", type=_count, default=200, help="most tokens to add (default: 200)")
    generate.add_argument("--temperature", metavar="NUMBER", type=_number, default=0.8,
                          help="0: always the likeliest token; 1: as the model says (default: 0.8)")
    generate.add_argument("--seed", metavar="NUMBER", type=int, default=0, help="same seed, same text (default: 0)")
    generate.add_argument("--tokenizer", metavar="TOKENIZER", help="`bytes` or the path of a tokenizer.json (default: the "
                          "one of the checkpoint's data)")
    evaluate = _read_command(commands, "evaluate", run_evaluate, "compute the validation loss of a checkpoint")
    evaluate.add_argument("overrides", metavar="key=value", nargs="*", default=[],
                          help="changes to its configuration, such as evaluate.samples=1000 or data.path=data/other")


def _read_command(commands: "Commands", name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser = _command(commands, name, command, text)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory or URI of a checkpoint, or of a run: its newest")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return number


def _address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", metavar="ADDRESS",
                        help="Ray cluster (default: RAY_ADDRESS, else one running here, else one is started)")


def run_train(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.run import run_job

    config = _ready_job(arguments)
    return run_job(config, launcher=arguments.launcher, address=arguments.address)


def run_check(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.run import check_job

    config = _ready_job(arguments)
    return check_job(config, launcher=arguments.launcher, address=arguments.address)


def run_plan(arguments: argparse.Namespace) -> int:
    plan = _plan(_job(arguments))
    print(plan.to_json().rstrip() if arguments.json else plan.table())
    return 0


def run_simulate(arguments: argparse.Namespace) -> int:
    from raytrain3d.metrics.trace import simulated_trace
    from raytrain3d.plan.simulation import simulate_job

    if arguments.tflops == 0:
        raise ConfigError("--tflops is 0: must be above 0")
    config = _job(arguments)
    simulation = simulate_job(config, _plan(config), tflops=arguments.tflops, hop_s=arguments.hop_ms / 1e3)
    match arguments.format:
        case "json":
            text = simulation.to_json()
        case "perfetto":
            text = simulated_trace(simulation.plan, simulation.timelines)
        case _:
            text = simulation.table() + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        _write(arguments.output, text)
    return 0


def run_trace(arguments: argparse.Namespace) -> int:
    from raytrain3d.metrics.trace import idle_table, merged_trace, read_plan, read_traces

    directory = Path(arguments.run_directory)
    plan = read_plan(directory)
    steps = read_traces(directory, plan)
    print(idle_table(plan, steps))
    _write(arguments.output or str(directory / "trace.json"), merged_trace(plan, steps))
    return 0


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path!r} cannot be written ({error.strerror}): name a file in a directory that is "
                          "there") from None
    print(f"wrote {path}")


def run_prepare(arguments: argparse.Namespace) -> int:
    from raytrain3d.data.prepare import prepare

    data = _job(arguments).data
    manifest = prepare(data.text, data.path, data.tokenizer, data.validation_fraction, progress=ProgressLines())
    _print_dataset(data.path, manifest)
    return 0


def run_checkpoint_list(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.tables import run_table

    print(run_table(_run_location(arguments)))
    return 0


def run_checkpoint_inspect(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.reader import find_checkpoint
    from raytrain3d.checkpoint.tables import checkpoint_table

    print(checkpoint_table(find_checkpoint(arguments.checkpoint), parameters=arguments.parameters))
    return 0


def run_checkpoint_verify(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.reader import find_checkpoint
    from raytrain3d.checkpoint.store import damage

    folder = find_checkpoint(arguments.checkpoint)
    found = damage(folder)
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    if not found:
        print(f"{folder.path} is whole")
    return FAILED if found else 0


def run_checkpoint_prune(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.store import prune, steps

    run = _run_location(arguments)
    deleted = prune(run, arguments.keep)
    print(f"deleted {_steps(deleted)}; {_steps(steps(run))} stay")
    return 0


def _steps(steps: Sequence[int]) -> str:
    return f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "no checkpoints"


def _run_location(arguments: argparse.Namespace) -> str:
    run: str = arguments.run
    return run if "/" in run else f"{arguments.directory}/{run}"


def run_checkpoint_import(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.convert_import import import_huggingface, run_of
    from raytrain3d.checkpoint.reader import find_checkpoint
    from raytrain3d.checkpoint.tables import checkpoint_table

    import_huggingface(arguments.source, arguments.output, run=arguments.run or run_of(arguments.output))
    print(checkpoint_table(find_checkpoint(arguments.output)))
    return 0


def run_checkpoint_export(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.convert_export import export_huggingface
    from raytrain3d.checkpoint.reader import find_checkpoint

    export_huggingface(find_checkpoint(arguments.checkpoint), arguments.output)
    print(f"wrote {arguments.output}: {', '.join(sorted(os.listdir(arguments.output)))}")
    return 0


def run_generate(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.reader import Reader, find_checkpoint
    from raytrain3d.train.generate import generate_text

    with Reader(find_checkpoint(arguments.checkpoint)) as reader:
        text = generate_text(reader, arguments.prompt, tokens=arguments.tokens, temperature=arguments.temperature,
                             seed=arguments.seed, tokenizer=arguments.tokenizer)
    print(arguments.prompt + text)
    return 0


def run_evaluate(arguments: argparse.Namespace) -> int:
    from raytrain3d.checkpoint.reader import Reader, find_checkpoint
    from raytrain3d.load import load_stored
    from raytrain3d.train.evaluate import evaluate_checkpoint, evaluation_job

    with Reader(find_checkpoint(arguments.checkpoint)) as reader:
        where = reader.folder.path
        config = load_stored(evaluation_job(reader.manifest.config), where, arguments.overrides)
        report = evaluate_checkpoint(reader, config)
    print(f"validation loss  {report.loss:.4f} nats a token ({report.tokens:,} tokens of {config.data.path}, "
          f"{report.seconds:.1f} s)")
    return 0


def run_status(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.mailbox import ask_run

    status = ask_run(arguments.run, "status", directory=arguments.directory, address=arguments.address)
    print(f"run       {status.run}\nstate     {status.state}\nstep      {status.step} of {status.num_steps}")
    if status.loss is not None:
        print(f"loss      {status.loss:.4f}")
    if status.tokens_per_s is not None:
        print(f"tokens/s  {status.tokens_per_s:,.0f}")
    return 0


def run_stop(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.mailbox import ask_run

    status = ask_run(arguments.run, "stop", directory=arguments.directory, address=arguments.address)
    print(f"asked {status.run} to stop: it was at step {status.step}, ends after the step under way and saves")
    return 0


def run_rebalance(arguments: argparse.Namespace) -> int:
    from raytrain3d.gang.mailbox import ask_run

    status = ask_run(arguments.run, f"rebalance {arguments.layers.replace(' ', '')}", directory=arguments.directory,
                     address=arguments.address)
    print(f"asked {status.run} for stages of {arguments.layers} layers: it was at step {status.step}, moves at the next "
          "boundary and says so in its events")
    return 0


def run_config(arguments: argparse.Namespace) -> int:
    from raytrain3d.reference import reference

    print(reference(), end="")
    return 0


def run_version(arguments: argparse.Namespace) -> int:
    try:
        print(f"raytrain3d {metadata.version('raytrain3d')}")
    except metadata.PackageNotFoundError:
        print("raytrain3d, run from its source without being installed")
    return 0


def _job(arguments: argparse.Namespace) -> "JobConfig":
    from raytrain3d.load import load

    return load(arguments.file, arguments.overrides)


def _plan(config: "JobConfig") -> "Plan":
    from raytrain3d.plan.plan import make_plan

    return make_plan(config, device="gpu" if config.placement.device == "gpu" else "cpu")


def _ready_job(arguments: argparse.Namespace) -> "JobConfig":
    """The job of the command line. It has a plan, and data if they can be prepared."""
    from raytrain3d.data.prepare import prepare_if_missing

    config = _job(arguments)
    _plan(config)  # what cannot be laid out should not cost a preparation
    manifest = prepare_if_missing(config, ProgressLines())
    if manifest is not None:
        _print_dataset(config.data.path, manifest)
    return config


class ProgressLines:
    """Says how far a preparation is, a line every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: "PrepareProgress") -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_INTERVAL_S:
            self._last = now
            print(f"prepared {progress.documents} of {progress.num_documents} documents, {progress.tokens:,} tokens",
                  flush=True)


def _print_dataset(path: str, manifest: "DatasetManifest") -> None:
    from raytrain3d.data.manifest import SPLITS

    sizes = ", ".join(f"{split} {manifest.tokens(split):,} tokens in {manifest.documents(split):,} documents"
                      for split in SPLITS)
    skipped = f"; {manifest.skipped} documents are not UTF-8 and were skipped" if manifest.skipped else ""
    print(f"prepared {path}: {sizes}{skipped}", flush=True)
