"""The commands that work on data: `data ...`; one small function each, as in cli.py."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from raytrain3d.cli_parser import FAILED, add_address, add_command, add_job_command, count_above_0

if TYPE_CHECKING:
    from raytrain3d.cli_parser import Commands
    from raytrain3d.data.manifest import DatasetManifest
    from raytrain3d.metrics.prepare_progress import PrepareDisplay


def add_data_commands(commands: "Commands") -> None:
    data = add_command(commands, "data", None, "token data").add_subparsers(metavar="COMMAND", required=True)
    prepare = add_job_command(data, "prepare", run_prepare, "make data.path from the files of data.text; goes on where an "
                              "earlier preparation was killed")
    prepare.add_argument("--workers", metavar="NUMBER", type=count_above_0,
                         help="processes on this machine (default: one for each core)")
    prepare.add_argument("--ray", action="store_true", help="do it as tasks of a Ray cluster instead")
    add_address(prepare, "Ray cluster for --ray (default: RAY_ADDRESS, else one running here, else one is started)")
    tokenizer = add_job_command(data, "train-tokenizer", run_train_tokenizer,
                                "train a byte-level BPE tokenizer on the files of data.text")
    tokenizer.add_argument("--vocabulary", metavar="NUMBER", type=count_above_0, required=True, help="most token ids")
    tokenizer.add_argument("--output", metavar="FILE", required=True, help="tokenizer.json to write")
    inspect = add_command(data, "inspect", run_inspect, "say what a data set holds")
    inspect.add_argument("--samples", metavar="NUMBER", type=int, default=3, help="documents to show (default: 3)")
    inspect.add_argument("--shards", action="store_true", help="list every file with its checksum")
    verify = add_command(data, "verify", run_verify, "read all of a data set and compare its checksums")
    for sub in (inspect, verify):
        sub.add_argument("path", metavar="PATH", help="directory of a prepared data set")


def run_prepare(arguments: argparse.Namespace) -> int:
    from raytrain3d.data.prepare import prepare_data
    from raytrain3d.data.workers import LocalProcesses
    from raytrain3d.errors import ConfigError
    from raytrain3d.load import load

    config = load(arguments.file, arguments.overrides)
    if config.data.path is None:
        raise ConfigError("data.path is not given: `data prepare` makes one data set, so name its directory")
    with ExitStack() as stack:
        workers = LocalProcesses(arguments.workers) if arguments.workers else None
        if arguments.ray:
            from raytrain3d.data.prepare import staging_of
            from raytrain3d.gang.ray_cluster import connected
            from raytrain3d.gang.ray_tasks import RayTasks
            stack.enter_context(connected(config, arguments.address, print))
            tasks = RayTasks(str(staging_of(config.data.path)))
        display = stack.enter_context(showing())
        manifest = prepare_data(config.data, workers=tasks if arguments.ray else workers, progress=display)
    print_dataset(config.data.path, manifest)
    return 0


def run_train_tokenizer(arguments: argparse.Namespace) -> int:
    from raytrain3d.data.train_tokenizer import train_tokenizer
    from raytrain3d.load import load

    data = load(arguments.file, arguments.overrides).data
    size = train_tokenizer(data.text, arguments.output, vocabulary=arguments.vocabulary, column=data.column,
                           longest=data.max_record_bytes)
    print(f"wrote {arguments.output}: {size:,} token ids")
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    from raytrain3d.data.inspect import dataset_table

    print(dataset_table(arguments.path, samples=arguments.samples, shards=arguments.shards))
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    from raytrain3d.data.inspect import damage

    found = list(damage(arguments.path))
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    if not found:
        print(f"{arguments.path} is whole")
    return FAILED if found else 0


@contextmanager
def showing() -> Iterator["PrepareDisplay"]:
    """The display of a preparation."""
    from raytrain3d.metrics.prepare_progress import PrepareDisplay

    display = PrepareDisplay(sys.stdout)
    try:
        yield display
    finally:
        display.close()


def print_dataset(path: str, manifest: "DatasetManifest") -> None:
    from raytrain3d.data.manifest import SPLITS
    from raytrain3d.data.prepare import BAD_RECORDS

    sizes = ", ".join(f"{split} {manifest.tokens(split):,} tokens in {manifest.documents(split):,} documents"
                      for split in SPLITS)
    duplicates = f"; {manifest.duplicates:,} duplicates were left out" if manifest.duplicates else ""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.bad.items())
    bad = f"; {manifest.skipped:,} bad records were left out ({reasons}), see {path}/{BAD_RECORDS}" if reasons else ""
    print(f"prepared {path}: {sizes}{duplicates}{bad}", flush=True)
