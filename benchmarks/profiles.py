"""Where a rank's time goes in our runtime, from what a recorded run left."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common import Span

from raytrain3d.parallel.pipeline import PipelineRun
from raytrain3d.plan.program import RECEIVES


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Means over steps on one rank, in seconds; `ops` counts compute ops of a step."""

    wall: float
    compute: float
    """Inside the layers."""
    around: float
    """Of compute ops, outside the layers: keeping, passing on, letting go."""
    receive: float
    """Waiting for messages."""
    ops: int

    @property
    def rest(self) -> float:
        """Sends, between ops, before the first and after the last."""
        return self.wall - self.compute - self.around - self.receive


def profile(steps: Sequence[Span], runs: Sequence[PipelineRun]) -> Profile:
    """steps, runs: of the same steps, in order."""
    found = [_profile(end - start, run) for (start, end), run in zip(steps, runs, strict=True)]
    means = {name: statistics.mean(getattr(one, name) for one in found)
             for name in ("wall", "compute", "around", "receive")}
    return Profile(**means, ops=found[0].ops)


def _profile(wall: float, run: PipelineRun) -> Profile:
    times = run.times()
    ops = [end - start for op, start, end in run.spans() if op.kind not in RECEIVES]
    return Profile(wall=wall, compute=times.compute, around=sum(ops) - times.compute, receive=times.receive_wait,
                   ops=len(ops))


def table(profiles: dict[str, Sequence[Profile]]) -> str:
    """Name -> profile of each rank, as shares of the step and microseconds a compute op."""
    columns = "".join(f" {name:>8s}" for name in ("layers", "waiting", "around", "rest"))
    lines = [f"{'where the time goes':22s} {'rank':>4s} {'step':>9s}{columns} {'runtime per op':>15s}"]
    for name, ranks in profiles.items():
        for rank, one in enumerate(ranks):
            parts = (one.compute, one.receive, one.around, one.rest)
            shares = "".join(f" {part / one.wall:8.2%}" for part in parts)
            per_op = (one.around + one.rest) / one.ops
            lines.append(f"{name:22s} {rank:4d} {one.wall * 1e3:6.0f} ms{shares} {per_op * 1e6:12.0f} us")
    return "\n".join(lines)
