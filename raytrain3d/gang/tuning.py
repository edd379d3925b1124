"""`raytrain3d tune`: the layouts that the planner likes best, each for a few steps on the devices that there are."""

from dataclasses import dataclass

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError, RayTrain3DError
from raytrain3d.gang.launchers import Launcher, Say, open_launcher
from raytrain3d.gang.trial import Trial, make_trial_trainer, run_trial
from raytrain3d.gang.worker import TrainerFactory
from raytrain3d.plan.candidates import whole_space
from raytrain3d.plan.found_table import rest_text
from raytrain3d.plan.search import Choice, Evaluator, Search, mesh_text
from raytrain3d.plan.table import aligned, counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A layout that ran, or failed to."""

    choice: Choice
    """With what was predicted."""
    trial: Trial | None
    error: str = ""

    def row(self) -> list[str]:
        """For the table: predicted, measured, error of time and memory."""
        choice, predicted = self.choice, self.choice.step.total
        cells = [f"{mesh_text(choice)}, {rest_text(choice)}", f"{predicted:.3f} s"]
        if self.trial is None:
            return [*cells, "-", "-", f"{choice.needed / 1e9:.2f} GB", "-", self.error.partition("\n")[0]]
        measured, memory = self.trial.step_s, max(self.trial.memory_bytes)
        return [*cells, f"{measured:.3f} s", f"{predicted / measured - 1:+.1%}", f"{choice.needed / 1e9:.2f} GB",
                f"{memory / 1e9:.2f} GB" if memory else "-", ""]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """All that were tried, predicted fastest first."""

    tried: tuple[Tried, ...]

    @property
    def winner(self) -> JobConfig:
        """The job with the layout that was measured fastest."""
        return self._fastest.choice.config

    @property
    def _fastest(self) -> Tried:
        return min((each for each in self.tried if each.trial is not None),
                   key=lambda each: 0.0 if each.trial is None else each.trial.step_s)

    def table(self) -> str:
        """For people."""
        rows = [["layout", "predicted", "measured", "error", "memory", "measured", ""]]
        rows += [[*each.row()[:6], "fastest" if each is self._fastest else each.row()[6]] for each in self.tried]
        return "\n".join(aligned(rows, (0, 6)))


def tune_job(config: JobConfig, num_ranks: int, evaluator: Evaluator, *, top: int, num_steps: int, launcher: str,
             address: str | None, say: Say, trainer: TrainerFactory = make_trial_trainer) -> Tuned:
    """Run the `top` layouts of a search on `num_ranks` ranks. PlanError if none fits, or if none of them runs."""
    choices = Search(config, num_ranks, evaluator, whole_space()).ranked(top)
    if not choices:
        raise PlanError(f"no layout of this job fits {counted(num_ranks, 'device')} of {evaluator.cluster.node.name}: "
                        "`raytrain3d plan --search` says what would")
    with open_launcher(launcher, config, address, say) as opened:
        tried = tuple(_try(choice, opened, num_steps, say, trainer) for choice in choices)
    if all(each.trial is None for each in tried):
        raise PlanError(f"none of {counted(len(tried), 'layout')} ran; the first: {tried[0].error}")
    return Tuned(tried=tried)


def _try(choice: Choice, launcher: Launcher, num_steps: int, say: Say, trainer: TrainerFactory) -> Tried:
    """A layout that fails (too little memory, say) is no reason not to try the others."""
    say(f"running {mesh_text(choice)}, {rest_text(choice)}")
    try:
        return Tried(choice=choice, trial=run_trial(choice.config, launcher, num_steps=num_steps, say=say, trainer=trainer))
    except RayTrain3DError as error:
        return Tried(choice=choice, trial=None, error=str(error))
