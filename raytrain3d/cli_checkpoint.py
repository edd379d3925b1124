"""The commands that work on checkpoints: `checkpoint ...`, `generate`, `evaluate`; one small function each, as in cli.py."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytrain3d.cli_parser import FAILED, Command, add_command, add_run_command, count_above_0, number_from_0

if TYPE_CHECKING:
    from raytrain3d.cli_parser import Commands


def add_checkpoint_commands(commands: "Commands") -> None:
    group = add_command(commands, "checkpoint", None, "look at, convert and delete checkpoints")
    parts = group.add_subparsers(metavar="COMMAND", required=True)
    add_run_command(parts, "list", run_checkpoint_list, "list the checkpoints of a run")
    inspect = _read_command(parts, "inspect", run_checkpoint_inspect, "say what a checkpoint holds")
    inspect.add_argument("--parameters", action="store_true", help="a row for each parameter instead of each file")
    _read_command(parts, "verify", run_checkpoint_verify, "read all of a checkpoint and compare its checksums")
    prune = add_run_command(parts, "prune", run_checkpoint_prune, "delete old checkpoints of a run")
    prune.add_argument("--keep", metavar="NUMBER", type=count_above_0, required=True, help="newest checkpoints to keep")
    prune.add_argument("--keep-every", metavar="STEPS", type=count_above_0, help="keep those of every so many steps, too")
    prune.add_argument("--keep-best", metavar="NUMBER", type=count_above_0,
                       help="keep so many of lowest validation loss, too, among those that have one")
    importing = add_command(parts, "import", run_checkpoint_import, "make a checkpoint of a Hugging Face model")
    importing.add_argument("source", metavar="DIR", help="directory with config.json and safetensors files")
    importing.add_argument("--output", metavar="CHECKPOINT", required=True, help="directory or URI to write")
    importing.add_argument("--run", metavar="NAME", help="run that the checkpoint shall belong to (default: the name in "
                           ".../NAME/checkpoints/step-0, else the last part of --output)")
    exporting = _read_command(parts, "export", run_checkpoint_export, "make a Hugging Face model of a checkpoint")
    exporting.add_argument("--output", metavar="DIR", required=True, help="directory to write")


def add_model_commands(commands: "Commands") -> None:
    generate = _read_command(commands, "generate", run_generate, "let the model of a checkpoint write on")
    generate.add_argument("--prompt", metavar="TEXT", required=True, help="text to begin with")
    generate.add_argument("--tokens", metavar="NUMBER", type=count_above_0, default=200,
                          help="most tokens to add (default: 200)")
    generate.add_argument("--temperature", metavar="NUMBER", type=number_from_0, default=0.8,
                          help="0: always the likeliest token; 1: as the model says (default: 0.8)")
    generate.add_argument("--seed", metavar="NUMBER", type=int, default=0, help="same seed, same text (default: 0)")
    generate.add_argument("--tokenizer", metavar="TOKENIZER", help="`bytes` or the path of a tokenizer.json (default: the "
                          "one of the checkpoint's data)")
    evaluate = _read_command(commands, "evaluate", run_evaluate, "compute the validation loss of a checkpoint")
    evaluate.add_argument("overrides", metavar="key=value", nargs="*", default=[],
                          help="changes to its configuration, such as evaluate.samples=1000 or data.path=data/other")


def _read_command(commands: "Commands", name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser = add_command(commands, name, command, text)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory or URI of a checkpoint, or of a run: its newest")
    return parser


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
    deleted = prune(run, arguments.keep, keep_every=arguments.keep_every, keep_best=arguments.keep_best)
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
    paths = ", ".join(dict.fromkeys(chosen.path for chosen in config.evaluation_sets))
    print(f"validation loss  {report.loss:.4f} nats a token ({report.tokens:,} tokens of {paths}, {report.seconds:.1f} s)")
    for each in report.sets:
        print(f"  {each}")
    return 0
