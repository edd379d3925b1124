"""Where a job goes on: from the newest whole checkpoint of its run directory, or from fresh weights."""

from dataclasses import dataclass

from raytrain3d.checkpoint.identity import check_same_run
from raytrain3d.checkpoint.store import clean, read_manifest, step_directory, steps
from raytrain3d.config import JobConfig
from raytrain3d.errors import CheckpointError, ConfigError
from raytrain3d.gang.fleet import Fleet
from raytrain3d.metrics.journal import Journal


def check_resume(directory: str, config: JobConfig) -> None:
    """Delete leftovers of unfinished saves. ConfigError when the job must not go on from what is there."""
    clean(directory)
    newest = max(steps(directory), default=None)
    if newest is not None and not config.checkpoint.resume:
        raise ConfigError(f"checkpoint.resume is False, but {directory} holds a checkpoint of step {newest}: "
                          "remove it, or give another run.name")
    if newest is not None and newest > config.train.steps:
        raise ConfigError(f"train.steps is {config.train.steps}, but {directory} holds a checkpoint of step "
                          f"{newest}: set train.steps to at least {newest}, or give another run.name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Where all ranks are now."""

    step: int | None
    """None for fresh weights."""
    skipped_steps: tuple[int, ...] = ()
    """That the checkpoint lists."""
    damaged: set[int]
    """Steps of newer checkpoints that cannot be loaded."""


def resume(fleet: Fleet, journal: Journal, directory: str, config: JobConfig, data: str | None) -> Resumed:
    """Every rank holds the state of the newest checkpoint that is whole.

    CheckpointError when a checkpoint belongs to another run, or when there are some and all are damaged.
    """
    damaged: set[int] = set()
    for step in reversed(steps(directory)):
        place = step_directory(directory, step)
        error = _load(fleet, place, step, config, data)
        if error is None:
            return Resumed(step=step, skipped_steps=read_manifest(place).skipped_steps, damaged=damaged)
        journal.event("damaged checkpoint", step, f"cannot resume from {place}: {error}. Trying the one before it",
                      error=error)
        damaged.add(step)
    if damaged:
        raise CheckpointError(f"none of the checkpoints in {directory} can be loaded (see above): repair the files, or "
                              "remove the checkpoints to begin anew")
    fleet.restore(None, 0)
    return Resumed(step=None, damaged=damaged)


def _load(fleet: Fleet, place: str, step: int, config: JobConfig, data: str | None) -> str | None:
    """Why it cannot be loaded, if so."""
    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        return str(error)
    check_same_run(manifest, place, config, data)
    return fleet.restore(place, step)
