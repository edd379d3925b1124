"""A job from its configuration to its exit code: `run_job` trains, `check_job` only tries everything out."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TextIO

from raytrain3d.config import JobConfig
from raytrain3d.data.check import check_data
from raytrain3d.data.manifest import SPLITS, read_manifest
from raytrain3d.gang.check import check_fleet
from raytrain3d.gang.controller import Controller, Ending, Job
from raytrain3d.gang.failure import diagnose
from raytrain3d.gang.fleet import Fleet, FleetFailed, Limits
from raytrain3d.gang.launchers import Launcher, open_launcher
from raytrain3d.gang.mailbox import Mailbox, SocketMailbox
from raytrain3d.gang.run_directory import RunDirectory, check_shared, with_absolute_paths
from raytrain3d.gang.stop import StopFlag, StopRequested
from raytrain3d.gang.telemetry import published
from raytrain3d.gang.worker import RankSettings, TrainerFactory, make_trainer
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.progress import Progress, make_progress
from raytrain3d.metrics.records import Records, measured_costs
from raytrain3d.parallel.groups import serve_store
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.table import counted

RANK_LIMIT_MARGIN_S = 60.0
"""How much longer than the ranks' own limit of one communication the driver waits for them."""
INTERRUPTED = 130


def run_job(config: JobConfig, *, launcher: str, address: str | None = None, output: TextIO | None = None,
            trainer: TrainerFactory = make_trainer) -> int:
    """Train. Returns the exit code: 0 for a run that ended or was stopped through its mailbox, 143 after SIGTERM, 130
    after Ctrl-C. Raises a RayTrain3DError for whatever went wrong; nothing is left running either way.

    launcher: ray, local or inline. address: of the Ray cluster; default RAY_ADDRESS, the running one, or one of our
    own. trainer: what a rank makes its trainer with.
    """
    absolute = with_absolute_paths(config)
    check_data(absolute)
    progress = make_progress(output or sys.stdout, config.train.steps)
    try:
        with open_launcher(launcher, config, address, progress.say) as opened:
            return _train(_Run(absolute, config.run.directory, opened, progress, trainer))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        progress.close()


def check_job(config: JobConfig, *, launcher: str, address: str | None = None, output: TextIO | None = None,
              trainer: TrainerFactory = make_trainer) -> int:
    """Start the gangs, try directories, data, links and disk, and end. Returns the exit code: 0 when all is well, 1 with
    warnings, 143 after SIGTERM, 130 after Ctrl-C. Raises a RayTrain3DError for whatever would end a job."""
    absolute = with_absolute_paths(config)
    check_data(absolute)
    progress = make_progress(output or sys.stdout, config.train.steps)
    try:
        with open_launcher(launcher, config, address, progress.say) as opened:
            return _check(_Run(absolute, config.run.directory, opened, progress, trainer))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        progress.close()


@dataclass(frozen=True, slots=True)
class _Run:
    config: JobConfig
    """With absolute paths."""
    given_directory: str
    """`run.directory` as the user wrote it."""
    launcher: Launcher
    progress: Progress
    trainer: TrainerFactory

    def make_plan(self) -> Plan:
        return make_plan(self.config, device=device_of(self.config, self.launcher), measured=measured_costs(self.config))

    def resumed_plan(self, directory: RunDirectory) -> Plan:
        """The plan, with the stages that an earlier run of the directory has come to, where layers may move at all."""
        plan, pipeline = self.make_plan(), self.config.pipeline
        kept = directory.kept_layers(plan) if self.config.rebalance.mode == "on" and pipeline.layers is None else None
        if kept is None:
            return plan
        as_kept = replace(pipeline, chunks=plan.chunks, layers=kept)
        return replace(make_plan(replace(self.config, pipeline=as_kept), device=plan.device), split_by="an earlier run")

    def check_nodes(self, nodes: set[str]) -> None:
        check_shared(self.given_directory, nodes)

    @contextmanager
    def fleet(self, plan: Plan, logs: str | None, stop: StopFlag) -> Iterator[Fleet]:
        settings = rank_settings(self.config, plan, self.launcher, logs=logs, trainer=self.trainer)
        limits = replace(Limits(), work_s=self.config.network.timeout_s + RANK_LIMIT_MARGIN_S,
                         hang_s=self.config.recovery.hang_limit_s)
        with self.launcher.gangs(settings, stop, self.progress.say) as gangs:
            fleet = Fleet(gangs, stop, limits)
            try:
                yield fleet
            except FleetFailed as failed:
                raise diagnose(failed.signs, plan, fleet.nodes) from None
            fleet.leave()


def rank_settings(config: JobConfig, plan: Plan, launcher: Launcher, *, logs: str | None,
                  trainer: TrainerFactory) -> list[RankSettings]:
    """What each rank is made from."""
    return [RankSettings(config=config, plan=plan, rank=rank, address=launcher.address, log_directory=logs,
                         make_trainer=trainer, device_index=rank if plan.device == "gpu" else None)
            for rank in range(plan.mesh.size)]


def device_of(config: JobConfig, launcher: Launcher) -> str:
    """`cpu` or `gpu`."""
    if config.placement.device == "auto":
        return "gpu" if launcher.num_gpus else "cpu"
    return config.placement.device


def _train(run: _Run) -> int:
    config, progress = run.config, run.progress
    stop, directory = StopFlag(), RunDirectory(config)
    directory.probe()
    plan = run.resumed_plan(directory)
    progress.say(plan.table())
    with stop.on_signals(), _mailboxes(run.launcher, directory, config.run.name) as mailboxes:
        directory.claim(plan)
        records = Records(directory.local)
        try:
            directory.log_settings()
            with (run.fleet(plan, directory.logs, stop) as fleet,
                  published(config, plan, run.launcher, directory.local, progress.say) as listeners):
                job = Job(config=config, plan=plan.with_replicas(fleet.replicas), directory=directory.location,
                          data=data_fingerprint(config),
                          store_host=run.launcher.address, serve_store=serve_store, check_nodes=run.check_nodes,
                          keep_plan=directory.keep_plan)
                ending = Controller(job, fleet, stop=stop, mailboxes=mailboxes,
                                    journal=Journal(progress, records, config.debug.slowdown, listeners)).run()
        except StopRequested as stopped:  # while waiting for capacity
            progress.say(f"{stopped}: stopped before any rank started")
            return stop.exit_code
        finally:
            records.close()
            directory.upload_records()
    progress.say(closing_text(ending, config, directory))
    return ending.exit_code


def _check(run: _Run) -> int:
    plan, stop, progress, host = run.make_plan(), StopFlag(), run.progress, run.launcher.address
    progress.say(plan.table())
    try:
        with stop.on_signals(), run.fleet(plan, None, stop) as fleet:
            store = serve_store(host, run.config.network.store_port)
            report = check_fleet(fleet, RunDirectory(run.config).location, host, store.port, run.check_nodes)
    except StopRequested as stopped:
        progress.say(f"{stopped}: stopped before all was checked")
        return stop.exit_code
    progress.say(report.table())
    return 1 if report.warnings else 0


@contextmanager
def _mailboxes(launcher: Launcher, directory: RunDirectory, name: str) -> Iterator[list[Mailbox]]:
    """Both kinds. ConfigError when the name or the directory is in use."""
    with launcher.mailbox(name) as remote:
        local = SocketMailbox(directory.local, name)
        try:
            yield [local, *remote]
        finally:
            local.close()


def data_fingerprint(config: JobConfig) -> str:
    """Equal exactly for sources with equal tokens in equal shards."""
    manifests = [read_manifest(source.path) for source in config.data.all_sources]
    checksums = [shard.checksum for manifest in manifests for split in SPLITS for shard in manifest.shards(split)]
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()


def closing_text(ending: Ending, config: JobConfig, directory: RunDirectory) -> str:
    """How it went and where everything lies."""
    lines = [f"stopped after step {ending.step} of {config.train.steps} ({ending.stopped}); the same command resumes it"
             if ending.stopped is not None else f"finished: {ending.step} steps"]
    if ending.validation_loss is not None:
        lines.append(f"validation loss  {ending.validation_loss:.4f} nats a token")
        entropy = read_manifest(config.data.path).bigram_entropy if config.data.path and not config.evaluate.sets else None
        if entropy is not None:
            difference = entropy - ending.validation_loss
            lines.append(f"bigram entropy   {entropy:.4f} nats: a token given only the one before; the model is "
                         f"{abs(difference):.4f} {'below' if difference >= 0 else 'above'}")
    if (moved := ending.rebalance).moves:
        lines.append(f"rebalancing      {counted(moved.moves, 'move')}: {counted(moved.layers, 'layer')}, "
                     f"{moved.bytes / 2**20:.1f} MiB in {moved.seconds:.2f} s")
    lines.append(f"checkpoint       {ending.checkpoint or 'none'}")
    lines.append(f"run directory    {directory.location}: config.yaml, plan.json, checkpoints/")
    lines.append(f"records          {directory.local}: metrics.jsonl, events.jsonl, logs/")
    return "\n".join(lines)


