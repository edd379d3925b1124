"""A trainer whose numbers go bad as a file in run.directory says."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from raytrain3d.config import JobConfig
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Poison:
    """`rank` spoils `layer` in `step`. output: its forward is infinite, also when it is computed again; once: only the first
    time; gradient: that of its input is; weights: they are from then on; spike: they are 40 times as large, which costs."""

    rank: int
    layer: int
    step: int
    kind: Literal["output", "once", "gradient", "weights", "spike"]


def plan_poisons(config: JobConfig, poisons: list[Poison]) -> None:
    directory = Path(config.run.directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "poisons.json").write_text(json.dumps([asdict(poison) for poison in poisons]))


class PoisonedTrainer(Trainer):
    """Follows the plan of run.directory."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank)
        text = (Path(config.run.directory) / "poisons.json").read_text()
        self._poisons = [poison for poison in (Poison(**record) for record in json.loads(text)) if poison.rank == rank]

    def step(self, n: int) -> StepReport:
        due = [poison for poison in self._poisons if poison.step == n]
        for poison in due:
            self._spoil(poison)
        report = super().step(n)
        for poison in due:
            vars(self.layers[poison.layer]).pop("forward", None)
        return report

    def _spoil(self, poison: Poison) -> None:
        module: Any = self.layers[poison.layer]
        forward, calls = module.forward, iter(range(1_000_000))

        def spoiled(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
            if poison.kind == "gradient" and x.requires_grad:
                x.register_hook(lambda gradient: gradient * float("inf"))
            out: torch.Tensor = forward(x, *arguments)
            bad = poison.kind == "output" or (poison.kind == "once" and next(calls) == 0)
            return out * float("inf") if bad else out

        if poison.kind in ("weights", "spike"):
            with torch.no_grad():
                weights = self.states[poison.layer].weights
                weights.mul_(40) if poison.kind == "spike" else weights[:1].fill_(float("nan"))
        else:
            module.forward = spoiled
