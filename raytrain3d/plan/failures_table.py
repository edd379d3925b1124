"""A run with failures, as text and as JSON."""

import json
from dataclasses import asdict

from raytrain3d.plan.failures import Failures, Outcome, shown_intervals, simulate_run
from raytrain3d.plan.search import Choice, mesh_text
from raytrain3d.plan.table import aligned, counted

DAY_S = 86_400.0


def outcomes(failures: Failures, own: int | None, *, days: float, seed: int) -> tuple[Outcome, ...]:
    """Simulated runs, by interval; own: the job's."""
    return tuple(simulate_run(failures, interval, seconds=days * DAY_S, seed=seed)
                 for interval in shown_intervals(failures, own))


def failures_table(choice: Choice, failures: Failures, found: tuple[Outcome, ...], *, days: float) -> str:
    """For people."""
    best, own = failures.best_interval(), choice.config.checkpoint.interval
    node = choice.timer.cluster.node

    def every(interval: int) -> str:
        return (f"every {counted(interval, 'step')} ({duration(interval * failures.step_s)}): "
                f"{failures.expected_goodput(interval):.2%} of time counts")

    ranks = f"{mesh_text(choice)} = {counted(choice.num_ranks, 'rank')} on {node.name}"
    lines = [
        f"job       {ranks}, {failures.step_s:.3f} s a step",
        f"failures  one every {duration(failures.mttf_s)}, {failures.recovery_s:g} s until the next step",
        f"save      holds training up for {failures.save_s:.3f} s",
        f"best      {every(best)}; Young says {duration(failures.young_s)}, Daly {duration(failures.daly_s)}"]
    if own:
        lines.append(f"this job  {every(own)}")
    rows = [["steps", "time", "goodput", "expected", "saving", "done again", "recovering", "failures"]]
    rows += [[f"{each.interval:,}", duration(each.interval * failures.step_s), f"{each.useful:.2%}",
              f"{failures.expected_goodput(each.interval):.2%}", f"{each.saving:.2%}", f"{each.repeated:.2%}",
              f"{each.recovering:.2%}", f"{each.num_failures:,}"] for each in found]
    return "\n".join([*lines, "", f"simulated, {days:g} days each:", *aligned(rows, ())])


def failures_json(choice: Choice, failures: Failures, found: tuple[Outcome, ...], *, days: float) -> str:
    """For programs; times in seconds."""
    best = failures.best_interval()
    return json.dumps({
        "ranks": choice.num_ranks, **asdict(failures), "days": days, "best_interval": best,
        "best_goodput": failures.expected_goodput(best), "young_s": failures.young_s, "daly_s": failures.daly_s,
        "own_interval": choice.config.checkpoint.interval,
        "runs": [{**asdict(each), "expected": failures.expected_goodput(each.interval)} for each in found]}, indent=2)


def duration(seconds: float) -> str:
    """`12.0 s`, `3.2 min`, `1.5 h`, `2.1 days`."""
    for unit, name in ((DAY_S, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"
