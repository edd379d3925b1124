"""The page of a layout that a search has found: `raytrain3d plan --search --html`."""

from collections.abc import Iterator

from raytrain3d.metrics.page import page, preformatted, section, table
from raytrain3d.metrics.plan_report import simulated_rows, split_text
from raytrain3d.metrics.svg import Bar, bar_chart, timeline_chart
from raytrain3d.plan.found_table import found_table, limit_of, parts_of, rest_text
from raytrain3d.plan.partition import counts_of
from raytrain3d.plan.search import Choice, Found, mesh_text
from raytrain3d.plan.table import counted


def found_report(name: str, found: Found, usual: Choice | None) -> str:
    """The best layout of job `name`, with its pipeline and memory as the model sees them. usual: as `found_table`."""
    best = found.best
    node = best.timer.cluster.node
    figures = [("step", f"{best.step.total:.3f} s"), ("tokens/s", f"{best.tokens_per_s:,.0f}"),
               ("of peak", f"{best.flops_per_s / node.peak_flops(best.config.train.dtype):.0%}"),
               ("fullest rank", f"{best.needed / 1e9:.1f} GB"), ("of a device", f"{best.limit / 1e9:.1f} GB"),
               ("limited by", limit_of(best))]
    subtitle = f"{mesh_text(best)} = {counted(best.num_ranks, 'rank')} on {node.name}, {rest_text(best)}"
    return page(f"Layout found for {name}", subtitle, figures, [*_sections(best), section(
        "As text", "As `raytrain3d plan --search` prints it.", preformatted(found_table(found, usual)), wide=True)])


def _sections(best: Choice) -> Iterator[str]:
    timeline = best.timeline()
    shown = best.timer.num_micro_batches
    text = f"{counted(shown, 'micro-batch')} a replica, {split_text(counts_of(best.stages))} layers by stage. Blank is idle."
    if len(timeline.spans[0]) < 2 * shown * best.timer.config.pipeline.num_chunks:
        text += " The first ones are shown; the others go on as these do."
    yield section("Pipeline", text, timeline_chart(simulated_rows(timeline), seconds=timeline.makespan), wide=True)
    memory = [Bar(str(rank), _memory(best, rank), 2) for rank in range(best.timer.mesh.pipeline)]
    yield section("Memory by pipeline rank", "GB, from below: weights; gradients and optimizer state; activations and "
                  f"logits; what the runtime adds. {best.limit / 1e9:.1f} GB can be had.", bar_chart(memory, unit="GB"))
    parts = [(part, share) for share, part in parts_of(best) if share > 0]
    rows = [("computing", f"{1 - sum(share for _, share in parts):.1%}"), *((part, f"{share:.1%}") for part, share in parts)]
    yield section("Where the step goes", "On the busiest rank.", table(("part", "of the step"), rows))


def _memory(choice: Choice, rank: int) -> list[tuple[str, float]]:
    memory = choice.memory[rank]
    tensors = memory.tensors
    state = tensors.gradients + tensors.master + tensors.moments + tensors.transient
    kinds = [("weights", tensors.weights), ("gradients and optimizer", state),
             ("activations and logits", tensors.activations + tensors.logits), ("runtime", memory.needed - tensors.total)]
    return [(kind, value / 1e9) for kind, value in kinds]
