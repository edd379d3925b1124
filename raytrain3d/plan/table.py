"""The plan as text: what a person reads before the job starts."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from raytrain3d.plan.sharding import volumes
from raytrain3d.plan.state_memory import Memory

if TYPE_CHECKING:
    from raytrain3d.plan.plan import Plan

SHOWN_STAGES = 16
"""Of more stages no row of counts is shown."""


def plan_table(plan: "Plan") -> str:
    """Summary lines, then one row for each pipeline rank."""
    lines = [f"{name:<10}{text}" for name, text in _summary(plan)]
    kinds = [field.name for field in fields(Memory) if any(getattr(e.memory, field.name) for e in plan.estimates)]
    slowest = max(e.forward_flops + e.backward_flops for e in plan.estimates)
    rows = [["rank", "layers", "params/rank", "work", "in flight", *kinds, "total"]]
    for rank, e in enumerate(plan.estimates):
        work = (e.forward_flops + e.backward_flops) / slowest
        layers = " | ".join(layer_names(plan.layers_of(stage), plan.num_layers) for stage in e.stages)
        rows.append([str(rank), layers, amount(e.parameters),
                     f"{work:.0%}", str(e.peak_in_flight), *(size(getattr(e.memory, kind)) for kind in kinds),
                     size(e.memory.total)])
    note = "A row is a pipeline rank. Sizes are its estimated memory; work is FLOPs against the slowest."
    return "\n".join([*lines, "", *aligned(rows), "", note])


def _summary(plan: "Plan") -> list[tuple[str, str]]:
    mesh, shares = plan.mesh, plan.shares
    per_replica = str(shares[0]) if min(shares) == max(shares) else f"{min(shares)} to {max(shares)}"
    axes = f"data {mesh.data} x pipeline {mesh.pipeline} x tensor {mesh.tensor}"
    samples = counted(sum(shares) * plan.micro_batch, "sample")
    divided = ", sequence parallel" if plan.sequence_parallel else ""
    micro_batches = f"{counted(sum(shares), 'micro-batch')} of {counted(plan.micro_batch, 'sample')}"
    return [
        ("mesh", f"{axes} = {counted(mesh.size, 'rank')} on {plan.device}"),
        ("placement", f"{counted(mesh.data, 'gang')}, {counted(mesh.pipeline, 'bundle')} of {plan.bundle} each"),
        ("model", f"{amount(plan.num_parameters)} parameters, {plan.num_layers} layers"),
        ("state", f"{plan.dtype}, sharding {plan.sharding}, recompute {plan.recompute}{divided}"),
        *(("", text) for text in _sharing(plan)),
        ("batch", f"{samples} of {counted(plan.sequence, 'token')} = {plan.tokens_per_step:,} tokens a step"),
        ("", f"{micro_batches}, {per_replica} a replica"),
        ("schedule", f"{'auto: ' if plan.candidates else ''}{_schedule(plan)}"),
        *(("", text) for text in _others(plan)),
        *(("" if i else "split", text) for i, text in enumerate(_split(plan))),
        ("idle", f"{plan.idle_share:.1%} of wall time ({plan.idle_of_ideal:.1%} of ideal time), predicted"),
    ]


def _sharing(plan: "Plan") -> Iterator[str]:
    """`sharded over 2 of 4 replicas, weights gathered for each op; 12 volumes a step (an all-reduce is 2)`."""
    if plan.shard_group > 1:
        whole = "" if plan.shard_group == plan.mesh.data else f" of {plan.mesh.data}"
        gathered = f", weights gathered for each {plan.keep_gathered}" if plan.sharding == "full" else ""
        sent = volumes(plan.sharding, plan.keep_gathered, max(plan.shares))
        yield f"sharded over {plan.shard_group}{whole} replicas{gathered}; {sent} volumes a step (an all-reduce is 2)"


def _schedule(plan: "Plan") -> str:
    """`1f1b`; chosen by `auto`: `zb_v (2 chunks), 3.1% less step time than 1f1b`."""
    usual = next((each for each in plan.candidates if each.schedule == "1f1b"), None)
    gain = 1 - 1 / usual.step_time if usual is not None else 0.0
    less = f", {gain:.1%} less step time than 1f1b" if gain > 0 else ""
    return schedule_name(plan.schedule, plan.chunks) + less


def _others(plan: "Plan") -> Iterator[str]:
    """Step times of the next best, and what does not fit."""
    others = [each for each in plan.candidates if (each.schedule, each.chunks) != (plan.schedule, plan.chunks)]
    if runners_up := [each for each in others if each.fits][:3]:
        yield "then " + ", ".join(f"{schedule_name(each.schedule, each.chunks)} {each.step_time - 1:+.1%}"
                                  for each in runners_up)
    if large := [each for each in others if not each.fits]:
        yield "too large: " + ", ".join(f"{schedule_name(each.schedule, each.chunks)} {size(each.memory)}" for each in large)


def _split(plan: "Plan") -> Iterator[str]:
    """What decided, and what the best split would gain over others."""
    yield f"by {plan.split_by}"
    *others, best = plan.splits
    if len(plan.stages) > 1:
        counts = f" {','.join(map(str, best.layers))}" if len(best.layers) <= SHOWN_STAGES else ""
        gains = [f"{best.gain / each.gain:.3f}x the speed of {each.name}" for each in others]
        yield f"best{counts}: {', '.join(gains)}"


def schedule_name(schedule: str, chunks: int) -> str:
    """`1f1b`, `interleaved (2 chunks)`."""
    return f"{schedule} ({chunks} chunks)" if chunks > 1 else schedule


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (1,)) -> list[str]:
    """Columns to the right, but for those of `left` (the second: mostly names)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if column in left else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def layer_names(layers: range, num_layers: int) -> str:
    """`embedding, blocks 0-2` for layers 0 to 3."""
    blocks = range(max(layers.start, 1) - 1, min(layers.stop, num_layers - 1) - 1)
    parts = ["embedding"] if layers.start == 0 else []
    if len(blocks) == 1:
        parts.append(f"block {blocks[0]}")
    elif blocks:
        parts.append(f"blocks {blocks[0]}-{blocks[-1]}")
    return ", ".join(parts + (["head"] if layers.stop == num_layers else []))


def counted(number: int, noun: str) -> str:
    """`1 rank`, `8 ranks`, `4 micro-batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def amount(number: int) -> str:
    """A count in thousands, millions or billions."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.2f}{name}"
    return str(number)


def size(num_bytes: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
