"""What a search found, as text and as JSON: the layout, where its step goes, and layouts that need less memory."""

import json
from collections.abc import Sequence
from typing import Any

from raytrain3d.plan.search import Choice, Found, mesh_text
from raytrain3d.plan.table import aligned, counted, schedule_name

PARTS = {"idle": "idle in the pipeline", "tensor": "tensor collectives", "messages": "messages between stages",
         "launch": "waiting for launches", "data": "gradients and weights over replicas", "update": "update"}
"""Parts of a step on its busiest rank that are not computing."""
NOTICED = 5e-3
"""Share of a step that is worth a word."""


def found_table(found: Found, usual: Choice | None) -> str:
    """For people. usual: the layout that rules of thumb give."""
    best = found.best
    node, step = best.timer.cluster.node, best.step
    lines = [
        f"fastest   {mesh_text(best)} = {counted(best.num_ranks, 'rank')} on {node.name}",
        f"          {rest_text(best)}",
        f"layers    {','.join(map(str, best.config.pipeline.layers or ()))}",
        (f"step      {step.total:.3f} s, {best.tokens_per_s:,.0f} tokens/s, {best.flops_per_s / 1e12:.0f} TFLOP/s a rank "
         f"({best.flops_per_s / node.peak_flops(best.config.train.dtype):.0%} of peak)"),
        f"memory    {best.needed / 1e9:.1f} GB of {best.limit / 1e9:.1f} GB on the fullest rank{_limit_of_memory(found)}",
        f"limited   by {limit_of(best)}",
        *(f"          {share:6.1%} {text}" for share, text in parts_of(best)),
        (f"searched  {counted(found.num_candidates, 'layout')}, {found.num_simulated} simulated; bounds on time and "
         "memory rule out the rest")]
    others = [("with less memory", choice) for choice in found.smaller]
    others += [("if it fitted", found.roomy)] if memory_costs(found) > NOTICED else []
    others += [] if usual is None else [("by rules of thumb", usual)]
    rows: list[Sequence[str]] = [["step", "layout", "memory", ""]]
    rows += [[f"{choice.step.total / step.total - 1:+.1%}", f"{mesh_text(choice)}, {rest_text(choice)}",
              f"{choice.needed / 1e9:.1f} GB", why] for why, choice in others]
    return "\n".join([*lines, "", *aligned(rows, (1, 3))] if others else lines)


def found_json(found: Found, usual: Choice | None) -> str:
    """For programs."""
    return json.dumps({"best": _entry(found.best), "smaller": list(map(_entry, found.smaller)), "roomy": _entry(found.roomy),
                       "rules_of_thumb": None if usual is None else _entry(usual), "candidates": found.num_candidates,
                       "simulated": found.num_simulated}, indent=2)


def memory_costs(found: Found) -> float:
    """How much longer a step is than with any amount of memory."""
    return found.best.step.total / found.roomy.step.total - 1


def _limit_of_memory(found: Found) -> str:
    costs = memory_costs(found)
    return f"; with more of it a step would be {costs / (1 + costs):.1%} shorter" if costs > NOTICED else ""


def limit_of(choice: Choice) -> str:
    """What takes most of the step beside computing."""
    share, text = parts_of(choice)[0]
    return text if share > 0 else "computing"


def parts_of(choice: Choice) -> list[tuple[float, str]]:
    """Shares of the step, largest first."""
    shares = [(getattr(choice.step, name) / choice.step.total, text) for name, text in PARTS.items()]
    return sorted(((share, text) for share, text in shares), reverse=True)


def rest_text(choice: Choice) -> str:
    """What there is of a layout beside its mesh."""
    train, pipeline = choice.config.train, choice.config.pipeline
    divided = ", sequence parallel" if train.sequence_parallel else ""
    return (f"{schedule_name(pipeline.schedule, pipeline.num_chunks)}, micro-batch {train.micro_batch}, sharding "
            f"{train.sharding}, recompute {train.recompute}{divided}")


def _entry(choice: Choice) -> dict[str, Any]:
    mesh, pipeline, train = choice.config.mesh, choice.config.pipeline, choice.config.train
    return {"data": mesh.replicas, "pipeline": mesh.pipeline, "tensor": mesh.tensor, "schedule": pipeline.schedule,
            "chunks": pipeline.num_chunks, "layers": pipeline.layers, "micro_batch": train.micro_batch,
            "sharding": train.sharding, "recompute": train.recompute, "sequence_parallel": train.sequence_parallel,
            "step_s": choice.step.total, "tokens_per_s": choice.tokens_per_s, "flops_per_s": choice.flops_per_s,
            "memory_bytes": choice.needed, "memory_limit_bytes": choice.limit,
            "parts_s": {name: getattr(choice.step, name) for name in PARTS}}
