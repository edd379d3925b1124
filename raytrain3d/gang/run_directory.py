"""The directory of a run: where it is, whose it is, what is written into it by the driver.

A run directory at a URI holds checkpoints, configuration and plan; records and rank logs, which grow line by line, then
stay in a local directory beside.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from raytrain3d.checkpoint.identity import check_same_run, global_shapes, plain_config
from raytrain3d.checkpoint.manifest import Manifest
from raytrain3d.checkpoint.storage import is_absolute, join, open_folder, probe_directory
from raytrain3d.config import DataConfig, JobConfig
from raytrain3d.errors import CheckpointError, ConfigError, PlanError
from raytrain3d.load import dump, load
from raytrain3d.masking import job_environment, masked, masked_environment
from raytrain3d.plan.plan import Plan

CONFIG, PLAN, DRIVER_LOG = "config.yaml", "plan.json", "driver.log"
RAY_WORKING_DIRECTORIES = ("_ray_pkg_", "working_dir_files")
"""Parts of the path of a directory that Ray unpacks for a job and deletes after it."""


def in_ray_working_directory() -> bool:
    return any(part in os.getcwd() for part in RAY_WORKING_DIRECTORIES)


def with_absolute_paths(config: JobConfig) -> JobConfig:
    """`config` as ranks need it, whose working directory may be another. ConfigError for a relative run.directory when
    the working directory goes away after the job."""
    if not in_ray_working_directory():
        start = config.model.from_huggingface
        return replace(config, run=replace(config.run, directory=_absolute(config.run.directory)),
                       data=_absolute_data(config.data), evaluate=replace(config.evaluate, sets=tuple(
                           replace(chosen, path=_absolute(chosen.path)) for chosen in config.evaluate.sets)),
                       model=replace(config.model, from_huggingface=None if start is None else _absolute(start)))
    if not is_absolute(config.run.directory):
        raise ConfigError(f"run.directory is {config.run.directory!r}: the driver runs in a working directory of Ray, "
                          "which is deleted after the job. Give an absolute path or a URI that all nodes share")
    return config


def check_shared(given: str, nodes: set[str]) -> None:
    """ConfigError when ranks on several nodes would each have their own idea of a relative run.directory."""
    if len(nodes) > 1 and not is_absolute(given):
        shown = ", ".join(sorted(nodes)[:4]) + (", ..." if len(nodes) > 4 else "")
        raise ConfigError(f"run.directory is {given!r}: ranks are on {len(nodes)} nodes ({shown}). Give an absolute "
                          "path or a URI that all of them share")


def _absolute_data(data: DataConfig) -> DataConfig:
    return replace(data, path=None if data.path is None else _absolute(data.path),
                   sources=tuple(replace(source, path=_absolute(source.path)) for source in data.sources))


def _absolute(path: str) -> str:
    return path if is_absolute(path) else os.path.abspath(path)


class RunDirectory:
    """`run.directory`/`run.name` of a configuration with absolute paths."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self.location = join(config.run.directory, config.run.name)
        """Path or URI."""
        self._is_remote = "://" in self.location
        local = tempfile.mkdtemp(prefix=f"raytrain3d-{config.run.name}-") if self._is_remote else self.location
        self.local = Path(local)
        """Where records and logs lie."""

    @property
    def logs(self) -> str:
        return str(self.local / "logs")

    def probe(self) -> None:
        """CheckpointError when the driver cannot write here."""
        try:
            probe_directory(self.location)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (seen by the driver's node {socket.gethostname()})") from error

    def claim(self, plan: Plan) -> None:
        """Write config.yaml and plan.json. CheckpointError when the directory belongs to another run."""
        folder = open_folder(self.location)
        if CONFIG in folder.names():
            with folder.reading(CONFIG) as path:
                theirs = load(path, [])
            manifest = Manifest(step=0, run=theirs.run.name, data=None, config=plain_config(theirs), skipped_steps=(),
                                parameters=global_shapes(theirs), files=(), entries=())
            check_same_run(manifest, f"output directory {self.location}", self._config)
        with folder.writing(CONFIG) as path:
            Path(path).write_text(dump(masked_environment(self._config)))
        self.keep_plan(plan)

    def log_settings(self) -> None:
        """Append configuration and environment, secrets masked, to the driver's log as a line of JSON."""
        settings = {"time": time.time(), "host": socket.gethostname(), "python": sys.executable,
                    "config": masked(plain_config(self._config)), "environment": job_environment()}
        path = Path(self.logs, DRIVER_LOG)
        with suppress(OSError):  # a directory for logs that cannot be used is told by the ranks, which need it more
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(settings) + "\n")

    def kept_layers(self, plan: Plan) -> tuple[int, ...] | None:
        """Layers of each stage as an earlier run of this directory left them, if it had the same ranks and schedule."""
        folder = open_folder(self.location)
        if PLAN not in folder.names():
            return None
        with folder.reading(PLAN) as path:
            try:
                kept = Plan.from_json(Path(path).read_text())
            except PlanError:
                return None  # of another version
        same = (kept.mesh, kept.schedule, kept.chunks, kept.num_layers) == (plan.mesh, plan.schedule, plan.chunks,
                                                                            plan.num_layers)
        return tuple(end - first for first, end in kept.stages) if same else None

    def keep_plan(self, plan: Plan) -> None:
        """Write plan.json, whole or not at all."""
        with open_folder(self.location).writing(PLAN) as path:
            Path(path).write_text(plan.to_json())

    def upload_records(self) -> None:
        """Copy the records of this run to a remote run directory, under a name of its own."""
        for path in sorted(self.local.glob("*.jsonl")) if self._is_remote else ():
            with open_folder(self.location).writing(f"{path.stem}-{int(time.time())}{path.suffix}") as spool:
                shutil.copyfile(path, spool)
