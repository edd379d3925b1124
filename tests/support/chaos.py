"""A trainer that dies or hangs at planned points of a step, of a save, of a move or of a recovery. The package has no hooks
for this: its functions are wrapped where they are looked up, in the rank's process alone.

Every fault is a file in run.directory, gone once it has happened, and then there is one that tells when; every step that a
rank begins is a line of `begun-RANK.txt` there.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from raytrain3d.checkpoint.progress import SaveStart
from raytrain3d.config import JobConfig
from raytrain3d.parallel import migrate
from raytrain3d.parallel.gradients import OnceAStep
from raytrain3d.parallel.groups import Group
from raytrain3d.parallel.pipeline import PipelineRun
from raytrain3d.parallel.snapshots import Snapshots
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.train import trainer as trainer_module
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

STEP_POINTS = ("forward", "backward", "reduction", "commit", "vector", "agreed", "done", "save", "saving")
"""`vector`: the n-th time that it would be passed on to another rank. `agreed`: between commit and update. `save` before the
state is copied, `saving` right after, while it is being written."""
OPS = {"F": "forward", "B": "backward", "I": "backward", "SF": "send", "SB": "send"}
"""Point of an op, by its kind."""
MOVE_POINTS = ("copy", "copied", "adopt", "adopted")
RECOVERY_POINTS = ("join", "joined", "fill", "recovered")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """`rank` dies when it comes to `point` for the `count`-th time (from 0) in `step`; absent: in any step. `how`: or it is
    stopped, falls asleep, raises an error, or skips what it was about to do (a send, say)."""

    rank: int
    point: str
    step: int | None = None
    count: int = 0
    how: str = "kill"


def plan_kills(config: JobConfig, kills: Sequence[Kill]) -> None:
    directory = Path(config.run.directory)
    directory.mkdir(parents=True, exist_ok=True)
    for number, kill in enumerate(kills):
        (directory / f"kill-{number}.json").write_text(json.dumps(asdict(kill)))


def kills_left(config: JobConfig) -> list[Kill]:
    """Those that have not happened."""
    return [Kill(**json.loads(path.read_text())) for path in sorted(Path(config.run.directory).glob("kill-*.json"))]


def steps_begun(config: JobConfig) -> dict[int, list[int]]:
    """Rank -> every step that it has begun, in order."""
    return {int(path.stem.removeprefix("begun-")): [int(line) for line in path.read_text().splitlines()]
            for path in Path(config.run.directory).glob("begun-*.txt")}


class ChaosTrainer(Trainer):
    """Follows the plan of run.directory."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank)
        self._files = {path: Kill(**json.loads(path.read_text()))
                       for path in sorted(Path(config.run.directory).glob("kill-*.json"))}
        self._begun = Path(config.run.directory) / f"begun-{rank}.txt"
        self._now: int | None = None
        self._counts: Counter[str] = Counter()
        self._generation = 0
        _wrap(PipelineRun, "_execute", lambda run, op: self.meet(OPS.get(op.kind.value, "other")))
        _wrap(OnceAStep, "_start", lambda *_: self.meet("reduction"))
        _wrap(trainer_module, "sum_over_all", lambda *_, **__: self.meet("commit"))
        _wrap(Snapshots, "take", lambda *_: self.meet("snapshot"))
        _wrap(migrate, "send_layer", lambda *_: self.meet("fill"))
        _wrap(migrate, "receive_layer", lambda *_: self.meet("fill"))
        Group.send_back = _send_back_with(self.meet)  # type: ignore[method-assign]

    def meet(self, point: str) -> bool:
        """Here the rank is at `point`. Whether to skip what comes now."""
        count = self._counts[point]
        self._counts[point] += 1
        for path, kill in self._files.items():
            is_meant = (kill.rank, kill.point, kill.count) == (self.rank, point, count)
            if is_meant and kill.step in (None, self._now) and path.exists():
                path.with_suffix(".done").touch()
                path.unlink()
                return _happen(kill.how)
        return False

    def connect(self, host: str, port: int, generation: int, replicas: Sequence[int] | None = None) -> None:
        self._now, self._generation = None, generation
        self._counts.clear()
        if generation:
            self.meet("join")
        super().connect(host, port, generation, replicas)
        if generation:
            self.meet("joined")

    def recover(self, step: int, values: Sequence[float] | None, fills: Sequence[tuple[int, int]]) -> StepReport | None:
        report = super().recover(step, values, fills)
        self.meet("recovered")
        return report

    def step(self, n: int) -> StepReport:
        with self._begun.open("a") as file:
            file.write(f"{n}\n")
        self._now = n
        self._counts.clear()
        report = super().step(n)
        self.meet("done")
        return report

    def _carry_out(self, n: int, agreed: Any) -> None:
        self.meet("agreed")
        super()._carry_out(n, agreed)
        self.meet("updated")

    def save(self, directory: str, step: int, *, behind: bool) -> SaveStart:
        self.meet("save")
        start = super().save(directory, step, behind=behind)
        self.meet("saving")
        return start

    def copy_layer(self, layer: int, source: int, target: int) -> int:
        self.meet("copy")
        sent = super().copy_layer(layer, source, target)
        self.meet("copied")
        return sent

    def adopt(self, stages: Stages, shares: tuple[int, ...]) -> None:
        moved = stages != self._plan.stages
        if moved:
            self.meet("adopt")
        super().adopt(stages, shares)
        if moved:
            self.meet("adopted")


def _happen(how: str) -> bool:
    match how:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1000)
        case "raise":
            raise MemoryError("no room for activations")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return how == "skip"


def _wrap(owner: Any, name: str, before: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return None if before(*arguments, **keywords) else original(*arguments, **keywords)

    setattr(owner, name, wrapped)


def _send_back_with(meet: Callable[[str], bool]) -> Callable[..., None]:
    """Group.send_back that passes a tensor on to one member after the other."""
    original = Group.send_back

    def send_back(group: Group, tensor: Tensor, *, got: Callable[[], None] = lambda: None) -> None:
        if group.index > 0:
            original(group, tensor, got=got)
            return
        got()
        for index in range(1, group.size):
            meet("vector")
            group.send(tensor, index).wait()

    return send_back
