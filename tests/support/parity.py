"""Compares a job under any layout with the same job on one rank: losses, gradient norms, every gradient, every weight."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jobs import JobRunner, small_job, unsharded
from torch import Tensor

from raytrain3d.config import JobConfig
from raytrain3d.plan.params import Rectangle
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
"""Relative, over 20 steps."""

Boxes = list[tuple[str, Rectangle, Tensor]]


def keep_last_gradients(trainer: Trainer) -> None:
    """Make the trainer keep the mean gradients of its latest step, as (name, rectangle, values) boxes."""
    update = trainer._update

    def keeping(n: int, rate: float, agreed: Any) -> None:
        trainer.kept = [(piece.name, piece.rectangle, piece.tensor / agreed.tokens)  # type: ignore[attr-defined]
                        for state in trainer._holding.trained()
                        for piece in state._cut("gradient", state.own_gradient, state.own[0], state.own, state.layout.slots)]
        update(n, rate, agreed)

    trainer._update = keeping  # type: ignore[method-assign]


def gradients_and_weights(trainer: Trainer) -> tuple[Boxes, Boxes]:
    weights = [(piece.name, piece.rectangle, piece.tensor.clone()) for state in trainer.states.values()
               for piece in state.pieces() if piece.kind == "weight"]
    return trainer.kept, weights  # type: ignore[attr-defined]


def assemble(boxes: Boxes) -> dict[str, Tensor]:
    """Whole parameters from boxes of all ranks. Boxes held by several ranks are equal or the comparison shows it."""
    whole: dict[str, Tensor] = {}
    for name in {box[0] for box in boxes}:
        own = [box for box in boxes if box[0] == name]
        ends = [max(o + n for o, n in zip(column_o, column_n, strict=True)) for column_o, column_n in
                zip(zip(*(b[1].offset for b in own), strict=True), zip(*(b[1].shape for b in own), strict=True),
                    strict=True)]
        whole[name] = torch.full(ends, torch.nan, dtype=own[0][2].dtype)
        for _, rectangle, values in own:
            whole[name][tuple(slice(o, o + n) for o, n in zip(rectangle.offset, rectangle.shape, strict=True))] = values
    return whole


def check_close(kind: str, found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float,
                zero_below: float = 0.0, rounding: Callable[[str], float] = lambda name: 0.0) -> None:
    """Norm of each difference over the reference's norm, or the difference itself where the reference is zero. rounding:
    how far the reference itself is off, asked only when `limit` is passed: twice that is as near as two runs can be."""
    assert found.keys() == wanted.keys()
    for name, reference in wanted.items():
        assert found[name].shape == reference.shape
        size, off = reference.norm().item(), (found[name] - reference).norm().item()
        ratio = off / size if size > zero_below else off
        assert ratio <= limit or ratio <= 2 * rounding(name), f"{kind} of {name} is off by {ratio}"


class Reference:
    """One-rank runs, each made once."""

    def __init__(self, run: JobRunner) -> None:
        self._run = run
        self._done: dict[str, tuple[list[StepReport], dict[str, Tensor], dict[str, Tensor]]] = {}

    def __call__(self, config: JobConfig) -> tuple[list[StepReport], dict[str, Tensor], dict[str, Tensor]]:
        alone = unsharded(config)
        key = repr((alone.model, alone.train, alone.data))
        if key not in self._done:
            self._done[key] = results(self._run, alone)
        return self._done[key]

    def rounding(self, config: JobConfig, name: str) -> float:
        """How far the one-rank gradient of a parameter in FP32 is from the one in FP64, relative: a sum whose parts cancel
        may be off by more than 1e-5."""
        if config.train.dtype != "fp32":
            return 0.0
        exact = self(replace(config, train=replace(config.train, dtype="fp64")))[1][name]
        return ((self(config)[1][name].double() - exact).norm() / exact.norm()).item()


def results(run: JobRunner, config: JobConfig, before: Callable[[Trainer], None] = keep_last_gradients,
            ) -> tuple[list[StepReport], dict[str, Tensor], dict[str, Tensor]]:
    """(reports of rank 0, whole gradients of the last step, whole weights). `before` calls keep_last_gradients."""
    ranks = run(config, config.train.steps, before=before, after=gradients_and_weights)
    for reports, _ in ranks[1:]:
        for own, first in zip(reports, ranks[0][0], strict=True):
            assert (own.loss, own.gradient_norm) == (first.loss, first.gradient_norm), "ranks disagree on a step"
    gradients = assemble([box for _, (boxes, _) in ranks for box in boxes])
    weights = assemble([box for _, (_, boxes) in ranks for box in boxes])
    return ranks[0][0], gradients, weights


def check_parity(run: JobRunner, reference: Reference, config: JobConfig,
                 before: Callable[[Trainer], None] = keep_last_gradients) -> None:
    limit = TOLERANCE[config.train.dtype]
    reports, gradients, weights = results(run, config, before)
    expected_reports, expected_gradients, expected_weights = reference(config)
    for report, expected in zip(reports, expected_reports, strict=True):
        assert report.tokens == expected.tokens
        for value, wanted, what in ((report.loss, expected.loss, "loss"),
                                    (report.gradient_norm, expected.gradient_norm, "gradient norm")):
            assert abs(value - wanted) <= limit * abs(wanted), f"{what} of step {report.step}: {value} for {wanted}"
    # A key's bias shifts all scores of a query alike: its gradient is zero but for rounding, and Adam turns rounding
    # into steps. So such gradients are compared absolutely and the parameters not at all; in FP32 the same holds for
    # single elements of small gradients, so weights are compared in FP64 only.
    zero = 1e-6 * max(report.gradient_norm for report in expected_reports)
    check_close("gradient", gradients, expected_gradients, limit, zero, lambda name: reference.rounding(config, name))
    if config.train.dtype == "fp64":
        moved = {name: values for name, values in expected_weights.items()
                 if name not in expected_gradients or expected_gradients[name].norm() > zero}
        check_close("weight", {name: weights[name] for name in moved}, moved, limit)


# The space of layouts. A case is one value of each factor.
MESHES = [(data, pipeline, tensor) for tensor in (1, 2, 4, 8) for pipeline in (1, 2, 3, 4) for data in (1, 2, 3, 4)
          if 1 < data * pipeline * tensor <= 8]
SHARDINGS: dict[str, dict[str, Any]] = {
    "none": {}, "optimizer": {"sharding": "optimizer"}, "gradients": {"sharding": "gradients"}, "full": {"sharding": "full"},
    "full_step": {"sharding": "full", "keep_gathered": "step"}, "hybrid": {"sharding": "full", "shard_group": 2},
}
"""Keys of `train`. `hybrid` shards over two of four replicas."""
FACTORS: dict[str, Sequence[Any]] = {
    "mesh": MESHES, "family": ("llama", "gpt2"), "tied": (False, True), "schedule": ("1f1b", "gpipe"),
    "uneven": (False, True), "sharding": tuple(SHARDINGS), "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True), "dropout": (0.0, 0.1), "micro_batch": (1, 2), "loss_chunk": (7, None),
    "dtype": ("fp64", "fp32"),
}
Case = dict[str, Any]


def applies(case: Case) -> bool:
    """Leaves out cases that are another case under a different name, and dropout beyond two tensor ranks."""
    data, pipeline, tensor = case["mesh"]
    return not ((pipeline == 1 and (case["schedule"] != "1f1b" or case["uneven"]))
                or (data == 1 and case["sharding"] != "none") or (data < 4 and case["sharding"] == "hybrid")
                or (tensor == 1 and case["sequence_parallel"])
                or (case["dropout"] and tensor > 2) or (case["micro_batch"] == 2 and not case["dropout"]))


def all_cases() -> list[Case]:
    cases = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [case for case in cases if applies(case)]


SWEPT = ("mesh", "sharding", "recompute", "sequence_parallel", "dtype")


def sharding_cases() -> list[Case]:
    """Every level of sharding x pipeline 1, 2 x tensor 1, 2 x what else lowers memory, other factors at their first value;
    over two replicas, or over two of four."""
    usual = {name: values[0] for name, values in FACTORS.items() if name not in SWEPT}
    return [case for case in all_cases() if usual.items() <= case.items() and max(case["mesh"][1:]) <= 2
            and case["mesh"][0] == (4 if case["sharding"] == "hybrid" else 2)]


def pairwise_cases() -> list[Case]:
    """A small set of cases in which every possible pair of values of two factors occurs (greedy, deterministic).

    A mesh is taken as its three sizes here, so that (data 2, tensor 4) counts as a pair.
    """
    def pairs(case: Case) -> set[tuple[Any, ...]]:
        data, pipeline, tensor = case["mesh"]
        flat = {**case, "data": data, "pipeline": pipeline, "tensor": tensor}
        del flat["mesh"]
        return set(itertools.combinations(sorted(flat.items()), 2))

    candidates = [(case, pairs(case)) for case in all_cases()]
    missing = set().union(*(own for _, own in candidates))
    chosen: list[Case] = []
    while missing:
        best, own = max(candidates, key=lambda entry: len(entry[1] & missing))
        chosen.append(best)
        missing -= own
    return chosen


def case_name(case: Case) -> str:
    data, pipeline, tensor = case["mesh"]
    flags = [name for name in ("tied", "uneven", "sequence_parallel") if case[name]]
    return "-".join([f"{data}x{pipeline}x{tensor}", case["family"], case["schedule"], case["dtype"],
                     f"sharding_{case['sharding']}", f"recompute_{case['recompute']}",
                     f"dropout_{case['dropout']}x{case['micro_batch']}", f"loss_chunk_{case['loss_chunk']}", *flags])


def case_job(case: Case) -> JobConfig:
    data, pipeline, tensor = case["mesh"]
    layers = None
    if case["uneven"]:
        layers = {2: (4, 1), 3: (1, 3, 1), 4: (1, 1, 2, 1)}[pipeline]
    gpt2 = case["family"] == "gpt2"
    model = {"family": case["family"], "kv_heads": 8 if gpt2 else 4, "tied_embeddings": case["tied"],
             "dropout": case["dropout"], "attention_dropout": case["dropout"]}
    config = small_job(model=model, mesh={"data": data, "pipeline": pipeline, "tensor": tensor},
                       pipeline={"schedule": case["schedule"], "layers": layers},
                       train={**{key: case[key] for key in ("recompute", "sequence_parallel", "micro_batch", "loss_chunk",
                                                            "dtype")}, **SHARDINGS[case["sharding"]]})
    return replace(config, evaluate=replace(config.evaluate, samples=4))
