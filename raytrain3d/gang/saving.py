"""Saves of a job as its driver sees them: ranks write behind the training, and what they have written becomes a checkpoint
when the driver commits its manifest.

At most one save is under way. A save that fails is told, counted and tried again while the training goes on; only the last
save of a run may end it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raytrain3d.checkpoint.manifest import Receipt
from raytrain3d.checkpoint.progress import SaveProgress, SaveStart
from raytrain3d.checkpoint.store import commit, prune, record_loss, remove, step_directory
from raytrain3d.config import JobConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.gang.fleet import Fleet
from raytrain3d.metrics.journal import Journal

LAST_TRIES = 5
"""Of the save at the end of a run, before its failure is the run's."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Before a manifest is tried again; each wait is twice as long as the one before."""
LONGEST_POLL_S = 0.5


@dataclass(kw_only=True, slots=True)
class _Save:
    """One that is under way."""

    step: int
    directory: str
    starts: Sequence[SaveStart]
    began: float = field(default_factory=time.monotonic)
    failures: dict[int, int] = field(default_factory=dict)
    """Rank -> tries of its shard that failed."""
    commit_failures: int = 0
    next_commit: float = 0.0

    @property
    def tries(self) -> int:
        """That failed, of whoever failed most often."""
        return max([self.commit_failures, *self.failures.values()])

    @property
    def pause_s(self) -> float:
        return max(start.pause_s for start in self.starts)

    @property
    def age_s(self) -> float:
        """Since its state was copied."""
        return time.monotonic() - self.began


class Saver:
    """Saves of the job whose ranks are `fleet`."""

    def __init__(self, fleet: Fleet, journal: Journal, config: JobConfig, directory: str, data: str | None,
                 skipped_steps: Callable[[int], tuple[int, ...]] = lambda step: ()) -> None:
        """skipped_steps: that a state after a step has left out."""
        self._fleet, self._journal, self._config = fleet, journal, config
        self._directory, self._data, self._skipped_steps = directory, data, skipped_steps
        self._save: _Save | None = None
        self._losses: dict[int, float] = {}
        self._saved_at: float | None = None
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self.damaged: set[int] = set()
        """Steps of checkpoints that cannot be loaded, and that a new one may replace."""

    def begin(self, step: int) -> None:
        """Save `step` behind the training. While another save is under way, wait for it or leave this one out
        (`checkpoint.when_busy`); a save that keeps failing is not waited for."""
        self.poll()
        if self._config.checkpoint.when_busy == "wait":
            self._wait_until(lambda save: save.tries > 0)
        if self._save is None:
            self._start(step, behind=True)
            return
        busy = self._save
        state = f"has failed {busy.tries} times" if busy.tries else f"is still being written after {busy.age_s:.0f} s"
        self._journal.event("checkpoint skipped", step,
                            f"checkpoint of step {step} skipped: the one of step {busy.step} {state}")

    def finish(self, step: int) -> None:
        """Save `step` and return when that is a checkpoint. CheckpointError when it cannot be saved."""
        self._wait_until(lambda save: save.tries > 0)
        if self._save is not None and self._save.step != step:
            self._call_off(self._save)
        if self._save is None and self.saved != step:
            self._start(step, behind=False)
        self._wait_until(lambda save: save.tries >= LAST_TRIES)
        if self._save is not None:
            raise CheckpointError(f"the state of step {step} could not be saved in {LAST_TRIES} tries (see above). "
                                  f"The newest checkpoint is {self._newest()}; make room or repair the storage, and the "
                                  "same command goes on from there")

    def settle(self) -> None:
        """Return when no save is under way; one that fails is left."""
        self._wait_until(lambda save: save.tries > 0)
        self.give_up()

    def poll(self, *, training: bool = False) -> None:
        """Commit the save under way if all ranks have written their shards; tell what has failed. training: a lease is
        under way, whose own wait finds ranks that fail."""
        save = self._save
        progress = self._fleet.save_progress(training=training) if save is not None else None
        if save is None or progress is None:
            return
        self._tell_failures(save, progress)
        receipts = [each.receipt for each in progress if each.receipt is not None]
        if len(receipts) == len(progress) and time.monotonic() >= save.next_commit:
            self._commit(save, receipts, max(each.seconds for each in progress))

    def give_up(self) -> int | None:
        """Leave the save under way: a rank that was to write a part of it is lost. Returns its step."""
        save = self._save
        if save is None:
            return None
        self._journal.event("checkpoint given up", save.step, f"checkpoint of step {save.step} given up: not all of it had "
                            "been written")
        self._call_off(save)
        return save.step

    def evaluated(self, step: int, loss: float) -> None:
        """The checkpoint of `step`, there already or under way, has this validation loss."""
        self._losses[step] = loss
        if self.saved == step:
            self._tidy(lambda: record_loss(step_directory(self._directory, step), loss))

    @property
    def age_s(self) -> float | None:
        """Seconds since the state of the newest checkpoint was copied; None before the first one of this process."""
        return None if self._saved_at is None else time.monotonic() - self._saved_at

    def _start(self, step: int, *, behind: bool) -> None:
        directory = step_directory(self._directory, step)
        if step in self.damaged:
            self._tidy(lambda: remove(self._directory, step))
            self.damaged.discard(step)
        began = time.monotonic()
        starts = self._fleet.save(directory, step, behind=behind)
        self._save = _Save(step=step, directory=directory, starts=starts, began=began)

    def _wait_until(self, enough: Callable[[_Save], bool]) -> None:
        """Until no save is under way, or `enough` of the one that is."""
        wait_s = 0.01
        if self._save is not None:
            self._fleet.hurry_save()
        while self._save is not None and not enough(self._save):
            self.poll()
            if self._save is not None:
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_POLL_S)

    def _call_off(self, save: _Save) -> None:
        self._fleet.call_off_save()
        self._tidy(lambda: remove(self._directory, save.step))
        self._save = None

    def _tell_failures(self, save: _Save, progress: Sequence[SaveProgress]) -> None:
        news = [rank for rank, each in enumerate(progress) if each.failures > save.failures.get(rank, 0)]
        for rank in news:
            save.failures[rank] = progress[rank].failures
        if news:
            more = f" and {len(news) - 1} more" if len(news) > 1 else ""
            self._failed(save, f"rank {news[0]}{more}", str(progress[news[0]].error))

    def _failed(self, save: _Save, who: str, error: str) -> None:
        self._journal.event("checkpoint failed", save.step, f"saving step {save.step} failed on {who} (try {save.tries}): "
                            f"{error}. It is tried again, earlier checkpoints stay", failures=save.tries, error=error)

    def _commit(self, save: _Save, receipts: Sequence[Receipt], write_s: float) -> None:
        try:
            commit(save.directory, save.step, receipts, config=self._config, data=self._data,
                   validation_loss=self._losses.get(save.step), skipped_steps=self._skipped_steps(save.step))
        except CheckpointError as error:
            wait_s = min(FIRST_WAIT_S * 2**save.commit_failures, LONGEST_WAIT_S)
            save.commit_failures, save.next_commit = save.commit_failures + 1, time.monotonic() + wait_s
            self._failed(save, "the driver", str(error))
            return
        self._save, self.saved, self._saved_at = None, save.step, save.began
        self._journal.event(
            "checkpoint", save.step, f"checkpoint {save.directory}", directory=save.directory, pause_s=save.pause_s,
            write_s=write_s, age_s=save.age_s, state_time=time.time() - save.age_s, failures=save.tries,
            num_bytes=sum(receipt.file.size for receipt in receipts if receipt.file is not None))
        keep = self._config.checkpoint
        self._tidy(lambda: prune(self._directory, keep.keep, keep_every=keep.keep_every, keep_best=keep.keep_best,
                                 ignore=self.damaged))

    def _tidy(self, act: Callable[[], object]) -> None:
        """What can be done later or never: a failure is only told."""
        try:
            act()
        except CheckpointError as error:
            self._journal.event("checkpoint not tidied", self.saved or 0, str(error))

    def _newest(self) -> str:
        return "none" if self.saved is None else step_directory(self._directory, self.saved)
