"""What people ask about meshes, answered for the job at hand: the same job on other meshes, timed and checked for memory."""

from collections.abc import Iterator
from dataclasses import replace

from raytrain3d.config import JobConfig, MeshConfig, PipelineConfig
from raytrain3d.errors import ConfigError
from raytrain3d.plan.answer import Answer, Column, Value
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.search import Choice, Evaluator, mesh_text
from raytrain3d.plan.splits import uniform
from raytrain3d.plan.state_memory import ELEMENT_BYTES, state_memory
from raytrain3d.plan.table import SHOWN_STAGES, counted

PIPELINES = (1, 2, 4, 8, 12, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4, 8)
"""By pipeline ranks."""
OFTEN_TOLD = 0.15
"""What half the tensor ranks and twice the stages are said to change."""
SPEED = (Column("step_s", "step, s", ".3f"), Column("tflops", "TFLOP/s a rank", ".1f"))
MEMORY = (Column("memory_gb", "GB", ",.1f"), Column("fits", "fits"))


def on_mesh(config: JobConfig, *, pipeline: int, tensor: int, data: int, simple: bool = False,
            micro_batches: int | None = None) -> JobConfig | None:
    """The job on another mesh, split anew; None if its own rules refuse that. simple: under 1F1B, one stage a rank.
    micro_batches: of each replica, by another global batch."""
    own, train = config.pipeline, config.train
    stages = PipelineConfig() if simple else PipelineConfig(schedule=own.schedule, chunks=own.chunks)
    batch = train.global_batch if micro_batches is None else micro_batches * data * train.micro_batch
    try:
        return replace(config, mesh=MeshConfig(data=data, pipeline=pipeline, tensor=tensor), pipeline=stages,
                       train=replace(train, global_batch=batch, sequence_parallel=train.sequence_parallel and tensor > 1))
    except ConfigError:
        return None


def pipelines(choice: Choice, evaluator: Evaluator) -> Answer:
    """Other pipeline sizes: which divide the blocks, and how fast each rank is then."""
    mesh, blocks = choice.timer.mesh, choice.config.model.blocks
    rows: list[tuple[Value, ...]] = []
    speeds: dict[int, float] = {}
    uneven: list[int] = []
    for p in sorted({*PIPELINES, mesh.pipeline}):
        job = on_mesh(choice.config, pipeline=p, tensor=mesh.tensor, data=mesh.data, simple=True)
        if job is None:
            continue
        best = evaluator.evaluate(job)
        even = evaluator.choice(best.timer, uniform(blocks + 2, p))
        rows.append((p, best.num_ranks, blocks_a_stage(blocks, p), best.timer.num_micro_batches, idle_share(best),
                     even.step.total / best.step.total - 1, best.step.total, best.flops_per_s / 1e12, best.needed / 1e9,
                     best.fits()))
        uneven += [p] if blocks % p else []
        speeds |= {p: best.flops_per_s} if best.fits() else {}
    text = f"{blocks} blocks divide over all of these."
    if uneven:
        p = uneven[-1]
        most = -(-blocks // p) * p / blocks - 1
        text = (f"{blocks} blocks do not divide over {', '.join(map(str, uneven))} stages: over {p} an even split has "
                f"stages of {blocks_a_stage(blocks, p)} blocks, and the largest ones work {most:.0%} more than the mean.")
    if speeds:
        text += f" Of the sizes that fit, {max(speeds, key=lambda p: speeds[p])} is the fastest for each rank."
    return Answer(
        key="pipelines", question=f"What do other pipeline sizes give? (tensor {mesh.tensor}, data {mesh.data}, 1F1B)",
        text=text + " Split: by the slowest stage, embedding and head counted; `even` is how much longer a step is with "
                    "blocks split evenly.",
        columns=(Column("pipeline", "p"), Column("ranks", "ranks", ",d"), Column("blocks", "blocks a stage"),
                 Column("micro_batches", "m", ",d"), Column("idle_of_wall", "idle of wall", ".1%"),
                 Column("even_split_slower", "even", "+.1%"), *SPEED, *MEMORY),
        rows=tuple(rows))


def blocks_a_stage(blocks: int, stages: int) -> str:
    """`12`, `1 or 2`: of an even split."""
    return f"{blocks // stages}" if blocks % stages == 0 else f"{blocks // stages} or {blocks // stages + 1}"


def idle_share(choice: Choice) -> float:
    """Of wall time in the pipeline part, over all ranks."""
    busy = choice.timer.num_micro_batches * sum(choice.timer.layer_seconds) / choice.timer.mesh.pipeline
    return max(0.0, 1 - busy / choice.step.pipeline)


def tensor_across_nodes(choice: Choice, evaluator: Evaluator) -> Answer | None:
    """A tensor group inside a node, the same one over two nodes, and one of twice the ranks. None: no such group."""
    mesh, node = choice.timer.mesh, evaluator.cluster.node
    size = mesh.tensor if mesh.tensor > 1 else node.devices
    job = choice.config if mesh.tensor > 1 else on_mesh(choice.config, pipeline=mesh.pipeline, tensor=size, data=mesh.data)
    if job is None or size > node.devices:
        return None
    halves = replace(node, devices=max(1, size // 2))
    apart = Evaluator(cluster=replace(evaluator.cluster, node=halves), allocation=evaluator.allocation)
    cases = [(f"{size} ranks inside a node", evaluator.evaluate(job)), (f"{size} ranks over two nodes", apart.evaluate(job))]
    if (wide := _wider(job, 2 * node.devices)) is not None:
        cases.append((f"{2 * node.devices} ranks over two nodes, half the {wide[0]}", evaluator.evaluate(wide[1])))
    inside, across = cases[0][1], cases[1][1]
    rows = tuple((name, each.timer.links.bandwidth(each.timer.tensor_group) / 1e9, each.step.tensor / each.step.total,
                  each.step.total / inside.step.total - 1, each.step.total, each.flops_per_s / 1e12) for name, each in cases)
    return Answer(
        key="tensor_across_nodes", question="May a tensor group span two nodes?",
        text=f"The same {size} ranks over two nodes take {across.step.total / inside.step.total:.2f} times as long for a "
             "step: each block waits for its collectives, and a ring is as fast as its slowest link.",
        columns=(Column("how", "tensor group"), Column("ring_gb_s", "ring, GB/s", ".0f"),
                 Column("tensor_share", "collectives", ".1%"), Column("slower", "step", "+.1%"), *SPEED),
        rows=rows)


def _wider(job: JobConfig, tensor: int) -> tuple[str, JobConfig] | None:
    """With so many tensor ranks, and less of another axis to keep the number of ranks."""
    replicas, stages, factor = job.mesh.replicas, job.mesh.pipeline, tensor // job.mesh.tensor
    for name, data, pipeline in (("replicas", replicas // factor, stages), ("stages", replicas, stages // factor)):
        if data * pipeline * factor == replicas * stages:
            found = on_mesh(job, data=data, pipeline=pipeline, tensor=tensor)
            if found is not None:
                return name, found
    return None


def half_the_tensor(choice: Choice, evaluator: Evaluator) -> Answer | None:
    """Half the tensor ranks and twice the stages on as many ranks. None: not for this job."""
    mesh, own = choice.timer.mesh, choice.timer.num_micro_batches
    if mesh.tensor % 2:
        return None
    rows: list[tuple[Value, ...]] = []
    changes: dict[int, float] = {}
    for m in sorted({own, *(factor * mesh.pipeline for factor in MICRO_BATCHES)}):
        pair = [on_mesh(choice.config, pipeline=p, tensor=t, data=mesh.data, micro_batches=m)
                for p, t in ((mesh.pipeline, mesh.tensor), (2 * mesh.pipeline, mesh.tensor // 2))]
        if pair[0] is None or pair[1] is None:
            return None
        first, second = evaluator.evaluate(pair[0]), evaluator.evaluate(pair[1])
        changes[m] = first.step.total / second.step.total - 1
        rows.append((m, first.step.tensor / first.step.total, second.step.tensor / second.step.total, idle_share(first),
                     idle_share(second), first.flops_per_s / 1e12, second.flops_per_s / 1e12, changes[m]))
    verdict = "confirmed" if abs(abs(changes[own]) - OFTEN_TOLD) < 0.03 else "refuted"
    wide, deep = f"TP{mesh.tensor} PP{mesh.pipeline}", f"TP{mesh.tensor // 2} PP{2 * mesh.pipeline}"
    return Answer(
        key="half_the_tensor", question="Half the tensor ranks and twice the stages: is that faster?",
        text=f"{deep} against {wide}, data {mesh.data} and micro-batch {choice.config.train.micro_batch} both times: "
             f"{changes[own]:+.1%} in speed at this job's m = {own}, {min(changes.values()):+.1%} to "
             f"{max(changes.values()):+.1%} over those below. The often told {OFTEN_TOLD:.0%} is {verdict}: half the tensor "
             "ranks save collectives, twice the stages cost idle time, and which is more depends on m.",
        columns=(Column("micro_batches", "m", ",d"), Column("tensor_share", f"collectives {wide}", ".1%"),
                 Column("tensor_share_half", deep, ".1%"), Column("idle", f"idle {wide}", ".1%"),
                 Column("idle_half", deep, ".1%"), Column("tflops", f"TFLOP/s a rank {wide}", ".1f"),
                 Column("tflops_half", deep, ".1f"), Column("faster", "speed", "+.1%")),
        rows=tuple(rows))


def pipeline_only(choice: Choice, evaluator: Evaluator) -> Answer:
    """One replica on a pipeline of whole devices, without tensor parallelism; with the job's recompute and with full."""
    config, devices = choice.config, evaluator.cluster.node.devices
    rows = [_memory_row(f"pipeline {job.mesh.pipeline}", evaluator.evaluate(job), evaluator)
            for job in _pipelines_alone(config, devices)]
    first, fits = rows[0], [row[0] for row in rows if row[6]]
    enough = f"{fits[0]} is the first of these that fits, with full recompute" if fits else "none of these fits"
    return Answer(
        key="pipeline_only", question="Is a pipeline alone enough?",
        text=f"Weights alone are {first[1]:,.1f} GB on each rank of {first[0]}, but with gradients, master weights and "
             f"moments an even part is {first[2]:,.1f} GB, and the fullest rank needs {first[3]:,.1f} GB: {enough} "
             f"({choice.limit / 1e9:.1f} GB). The last row is this job's layout.",
        columns=(Column("layout", "layout"), Column("weights_gb", "weights, GB", ",.1f"),
                 Column("state_gb", "with state, GB", ",.1f"), *MEMORY,
                 Column("recomputed_gb", "recompute: GB", ",.1f"), Column("recomputed_fits", "fits"),
                 Column("idle_of_wall", "idle of wall", ".1%"), SPEED[1]),
        rows=(*rows, _memory_row(mesh_text(choice), choice, evaluator)))


def _memory_row(name: str, choice: Choice, evaluator: Evaluator) -> tuple[str, float, float, float, bool, float, bool, float,
                                                                          float]:
    config = choice.config
    again = evaluator.evaluate(replace(config, train=replace(config.train, recompute="full", recompute_every=1)))
    part = choice.timer.spec.num_parameters // (config.mesh.pipeline * config.mesh.tensor)
    state = state_memory(part, dtype=config.train.dtype, sharding=config.train.sharding, data=config.shard_group)
    return (name, part * ELEMENT_BYTES[config.train.dtype] / 1e9, state.total / 1e9, choice.needed / 1e9, choice.fits(),
            again.needed / 1e9, again.fits(), idle_share(choice), choice.flops_per_s / 1e12)


def _pipelines_alone(config: JobConfig, devices: int) -> Iterator[JobConfig]:
    """A node's devices, then twice as many as long as there are layers; one stage a layer at most."""
    p = min(devices, config.model.blocks + 2)
    while (job := on_mesh(replace(config, train=replace(config.train, sharding="none", shard_group=None)), pipeline=p,
                          tensor=1, data=1, simple=True)) is not None:
        yield job
        p *= 2


def partitioners(plan: Plan) -> Answer:
    """What splits by name give."""
    by_name = {split.name: split for split in plan.splits}
    best, pipedream = by_name["best"], by_name["pipedream"]
    rows = tuple((split.name, split.gain, best.gain / split.gain - 1, counts_text(split.layers)) for split in plan.splits)
    return Answer(
        key="partitioners", question="What is another split of the layers worth?",
        text=f"By FLOPs, under {plan.schedule}: the best split has {best.gain:.3f} times the speed of equal numbers of "
             f"blocks. PipeDream's partitioner (https://arxiv.org/abs/1806.03377), which looks at the slowest stage only, "
             f"comes to {pipedream.gain:.3f}.",
        columns=(Column("split", "split"), Column("speed", "speed", ".3f"), Column("behind_best", "behind the best", ".1%"),
                 Column("layers", "layers of each stage")),
        rows=rows)


def counts_text(counts: tuple[int, ...]) -> str:
    """`5,5,4,2`; of many stages the first and the last ones."""
    if len(counts) <= SHOWN_STAGES:
        return ",".join(map(str, counts))
    first, last = (",".join(map(str, some)) for some in (counts[:SHOWN_STAGES // 2], counts[-2:]))
    return f"{first},...,{last} ({counted(len(counts), 'stage')})"
