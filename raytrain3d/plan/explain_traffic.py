"""What people ask about idle time, gradients and traffic, answered for the job at hand.

| question   | formula                                                                                             |
|------------|-----------------------------------------------------------------------------------------------------|
| idle share | (p - 1) / (m + p - 1) of wall time, (p - 1) / m of ideal time (https://arxiv.org/abs/2104.04473)     |
| gradients  | parameters x bytes; a ring all-reduce sends 2 (d - 1) / d times what a rank holds                    |
| tensor     | 8 T h (t - 1) / t elements a block and rank for T tokens (https://arxiv.org/abs/2205.05198)          |
| FSDP       | a block's weights x (t - 1) / t for each gather, its gradients x (t - 1) / t for each reduction      |
"""

from raytrain3d.plan.answer import Answer, Column
from raytrain3d.plan.collectives import Group, group_along
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.makespan import compiled, stage_seconds
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.search import Choice
from raytrain3d.plan.state_memory import ELEMENT_BYTES, REDUCE_BYTES
from raytrain3d.plan.table import counted, schedule_name

PIPELINES = (2, 4, 8, 16)
FEW = 4
"""Micro-batches of the often asked case."""
SMALL_SHARE = 0.05
"""Idle share that people aim at."""
EQUAL = LayerCost(forward=1.0, backward_input=1.0, backward_weight=1.0)
"""Of every stage."""


def idle_of_wall(pipeline: int, micro_batches: int) -> float:
    """Of GPipe and 1F1B with equal stages."""
    return (pipeline - 1) / (micro_batches + pipeline - 1)


def idle_of_ideal(pipeline: int, micro_batches: int) -> float:
    """The same idle time over computing time."""
    return (pipeline - 1) / micro_batches


def simulated_idle(schedule: str, chunks: int, pipeline: int, micro_batches: int) -> float:
    """Of wall time, stages equal, messages free."""
    stages = [EQUAL * (1 / chunks)] * (pipeline * chunks)
    seconds = [*(value for cost in stages for value in stage_seconds(cost, 1.0)), 0.0]
    return 1 - micro_batches * EQUAL.total / compiled(schedule, pipeline, micro_batches, chunks).makespan(seconds)


def micro_batches_for(pipeline: int, share: float) -> int:
    """Fewest with which 1F1B idles at most `share` of wall time."""
    return max(1, -int(-(pipeline - 1) * (1 - share) / share // 1))


def idle(plan: Plan) -> Answer:
    """Both idle shares, of this job and of pipelines that people ask about."""
    p, m = plan.mesh.pipeline, max(plan.shares)
    name = schedule_name(plan.schedule, plan.chunks)
    own = (f"This job: {counted(p, 'pipeline rank')}, {counted(m, 'micro-batch')}: by the formulas "
           f"{idle_of_wall(p, m):.1%} of wall time and {idle_of_ideal(p, m):.1%} of ideal time under 1F1B with equal "
           f"stages; simulated under {name} with its own split {plan.idle_share:.1%} and {plan.idle_of_ideal:.1%}.")
    rows = tuple((ranks, idle_of_wall(ranks, FEW), idle_of_ideal(ranks, FEW), simulated_idle("1f1b", 1, ranks, FEW),
                  idle_of_wall(ranks, 4 * ranks), simulated_idle("interleaved", 2, ranks, 4 * ranks),
                  simulated_idle("zb_h1", 1, ranks, 4 * ranks), micro_batches_for(ranks, SMALL_SHARE))
                 for ranks in PIPELINES)
    return Answer(
        key="idle", question="How much of the time does the pipeline idle?",
        text="The same idle time has two names: (p - 1) / (m + p - 1) is its share of wall time, (p - 1) / m what it is of "
             f"computing time. {own}",
        columns=(Column("pipeline", "p"), Column("wall_m4", f"m = {FEW}: of wall", ".1%"),
                 Column("ideal_m4", "of ideal", ".1%"), Column("simulated_m4", "simulated", ".1%"),
                 Column("wall_m4p", "m = 4p: of wall", ".1%"), Column("interleaved_m4p", "interleaved x 2", ".1%"),
                 Column("zb_h1_m4p", "zb_h1", ".1%"),
                 Column("micro_batches_for_5_percent", f"m for {SMALL_SHARE:.0%}", ",d")),
        rows=rows)


def gradients(choice: Choice) -> Answer:
    """How large gradients are, and what their reduction sends."""
    timer, spec = choice.timer, choice.timer.spec
    d, own = timer.mesh.data, sum(timer.elements) / timer.mesh.pipeline
    group = group_along("data", timer.mesh, timer.cluster.node, timer.cluster.order)
    factor = 2 * (d - 1) / d
    rows = tuple((name, spec.num_parameters * size / 1e9, own * size / 1e9, factor * own * size / 1e9,
                  factor * own * size / timer.links.bandwidth(group))
                 for name, size in REDUCE_BYTES.items() if name != "fp64")
    return Answer(
        key="gradients", question="How many bytes are the gradients?",
        text=f"{spec.num_parameters / 1e9:,.2f} billion of them. An average rank holds {own / 1e9:,.3f} billion; a ring "
             f"all-reduce over {counted(d, 'replica')} sends 2 (d - 1) / d = {factor:.3f} times that. This job sums in "
             f"{timer.config.reduce_dtype}.",
        columns=(Column("type", "type"), Column("model_gb", "whole model, GB", ",.2f"),
                 Column("rank_gb", "a rank, GB", ",.3f"), Column("sent_gb", "it sends, GB", ",.3f"),
                 Column("seconds", "seconds, alone", ".4f")),
        rows=rows)


def tensor_against_fsdp(choice: Choice) -> Answer:
    """What ranks of a group send in a step that share one replica's work on a block as tensor ranks or as FSDP ones."""
    timer, config = choice.timer, choice.config
    train, node = config.train, timer.cluster.node
    ranks = timer.mesh.tensor if timer.mesh.tensor > 1 else node.devices
    block = next(layer for layer in timer.spec.layers if layer.kind == "block")
    blocks, part = config.model.blocks / timer.mesh.pipeline, (ranks - 1) / ranks
    tokens = timer.num_micro_batches * train.micro_batch * train.sequence
    element, reduced = ELEMENT_BYTES[train.dtype], REDUCE_BYTES[config.reduce_dtype]
    rounds = -(-timer.num_micro_batches // ranks)
    group = Group(size=ranks, per_node=min(ranks, node.devices))

    def row(name: str, volume: float) -> tuple[str, float, float]:
        sent = blocks * part * volume
        return name, sent / 1e9, sent / timer.links.bandwidth(group)

    weights, sums = block.num_parameters * element, block.num_parameters * reduced
    rows = (row("tensor parallel", 8 * tokens * config.model.hidden * element),
            row("FSDP, weights kept for the step", weights + sums),
            row("FSDP, weights freed after use", 2 * rounds * weights + sums),
            row("FSDP, gradients reduced each time, too", rounds * (2 * weights + sums)))
    even = block.num_parameters * (2 * element + reduced) / (8 * config.model.hidden * element)
    less = "tensor parallelism" if rows[0][1] < rows[3][1] else "FSDP"
    return Answer(
        key="tensor_against_fsdp", question="Which sends more, tensor parallelism or FSDP?",
        text=f"It depends on tokens. {counted(ranks, 'rank')} that share a stage and {tokens:,} tokens a step: as tensor "
             "ranks each sends activations of every micro-batch, 8 T h (t - 1) / t elements a block; as FSDP ranks each "
             f"takes {counted(rounds, 'micro-batch')} and sends weights and gradients. With both freed after each use the "
             f"two are even at {even:,.0f} tokens in a round of micro-batches; here a round has "
             f"{ranks * train.micro_batch * train.sequence:,}, so {less} sends less.",
        columns=(Column("how", "how"), Column("sent_gb", "a rank sends a step, GB", ",.1f"),
                 Column("seconds", "seconds, alone", ".3f")),
        rows=rows)
