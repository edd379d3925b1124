"""`raytrain3d plan --explain`: what people ask about layouts, answered for the job at hand by the planner's own model.

Every number is computed when it is asked for. `docs/planning.md` shows the answers for known models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.answer import Answer, Column
from raytrain3d.plan.explain_layout import half_the_tensor, partitioners, pipeline_only, pipelines, tensor_across_nodes
from raytrain3d.plan.explain_traffic import gradients, idle, tensor_against_fsdp
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.remedy import fit_of, remedies, remedy_text
from raytrain3d.plan.search import Choice, Evaluator, mesh_text


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is asked about."""

    config: JobConfig
    make_plan: Callable[[], Plan]
    evaluator: Evaluator

    @cached_property
    def plan(self) -> Plan:
        return self.make_plan()

    @cached_property
    def choice(self) -> Choice:
        """The job's own layout, timed. Of what is `auto` it has what the plan has come to."""
        config = self.config
        if "auto" not in (config.pipeline.schedule, config.train.sharding):
            return self.evaluator.evaluate(config)
        schedule: Any = {"schedule": self.plan.schedule, "chunks": self.plan.chunks}
        decided = self.plan.decided(config)
        return self.evaluator.evaluate(replace(decided, pipeline=replace(config.pipeline, **schedule)))


QUESTIONS: dict[str, Callable[[Subject], Answer | None]] = {
    "fit": lambda asked: fit(asked.choice, asked.evaluator),
    "idle": lambda asked: idle(asked.plan),
    "gradients": lambda asked: gradients(asked.choice),
    "tensor_against_fsdp": lambda asked: tensor_against_fsdp(asked.choice),
    "pipelines": lambda asked: pipelines(asked.choice, asked.evaluator),
    "tensor_across_nodes": lambda asked: tensor_across_nodes(asked.choice, asked.evaluator),
    "half_the_tensor": lambda asked: half_the_tensor(asked.choice, asked.evaluator),
    "pipeline_only": lambda asked: pipeline_only(asked.choice, asked.evaluator),
    "partitioners": lambda asked: partitioners(asked.plan),
}
"""By the key of their answer. None: the job has no answer to it (half of one tensor rank)."""


def explain(asked: Subject, about: str | None = None) -> tuple[Answer, ...]:
    """Answers about a job. about: a key of QUESTIONS; absent: to all of them that have an answer. PlanError if there is no
    such question, or no answer to it."""
    if about is not None and about not in QUESTIONS:
        raise PlanError(f"--about {about}: there is no such question; there are {', '.join(QUESTIONS)}")
    found = [QUESTIONS[key](asked) for key in (QUESTIONS if about is None else (about,))]
    answers = tuple(answer for answer in found if answer is not None)
    if not answers:
        raise PlanError(f"--about {about}: this job has no answer to it on {asked.evaluator.cluster.node.name}")
    return answers


def fit(choice: Choice, evaluator: Evaluator) -> Answer:
    """Whether the job fits its devices, and what would."""
    def step_of(job: JobConfig) -> float | None:
        tried = evaluator.evaluate(job)
        return tried.step.total if tried.fits() else None

    found = remedies(choice.timer.config, fit_of(step_of))
    node, step = evaluator.cluster.node, choice.step.total
    over = f"{choice.needed / 1e9:.1f} GB on the fullest rank, a {node.name} gives {choice.limit / 1e9:.1f} GB"
    text = f"Yes: {over}." if choice.fits() else f"No: {over}; {remedy_text(found) or 'nothing tried here would'}."
    rows = ((mesh_text(choice), 0.0, choice.fits()), *((str(remedy), remedy.step / step - 1, True) for remedy in found))
    return Answer(key="fit", question="Does it fit?", text=text, rows=rows, columns=(
        Column("layout", "layout, or change"), Column("step_change", "step", "+.1%"), Column("fits", "fits")))
