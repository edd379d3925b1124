"""Between the start of a step and its commit vector the host asks a device nothing: no `.item()`, `.cpu()`, `nonzero` and
their like, each of which would make it wait. Seen on a CPU, where the same calls are made."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import JobRunner, small_job
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain3d.config import JobConfig
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist

CALLS = {"item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "allclose", "unique", "masked_select",
         "__bool__", "__int__", "__float__", "__index__", "__contains__"}
"""Of Python, that need values on the host."""
OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select",
             "aten::_unique2", "aten::unique_dim"}
"""The same where torch itself calls them."""
STEP_PHASES = ("program", "reduction", "update")

Note = Callable[[str], None]


class Calls(TorchFunctionMode):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in CALLS:
            self._note(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func._schema.name in OPERATORS:
            self._note(func._schema.name)
        return func(*args, **(kwargs or {}))


def watch(trainer: Trainer) -> None:
    """Each step's waits are counted by phase, in `trainer.waits`."""
    step, trainer.waits = trainer.step, []  # type: ignore[attr-defined]

    def watched(n: int) -> StepReport:
        found: Counter[tuple[str | None, str]] = Counter()

        def note(name: str) -> None:
            found[trainer._phase, name] += 1

        with Calls(note), Operators(note):
            report = step(n)
        trainer.waits.append(found)  # type: ignore[attr-defined]
        return report

    trainer.step = watched  # type: ignore[method-assign]


def look(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
    """A hook that asks whether its layer's output is positive."""
    bool(output.sum() > 0)


def watch_an_asking_layer(trainer: Trainer) -> None:
    watch(trainer)
    trainer.layers[0].register_forward_hook(look)


def waits_of(trainer: Trainer) -> list[Counter[tuple[str | None, str]]]:
    return trainer.waits  # type: ignore[attr-defined, no-any-return]


def in_step(waits: Counter[tuple[str | None, str]]) -> dict[tuple[str | None, str], int]:
    return {key: count for key, count in waits.items() if key[0] in STEP_PHASES}


@pytest.mark.parametrize(("mesh", "schedule", "train"), [
    ({"pipeline": 2, "data": 2}, "zb_h1", {"sharding": "full", "dtype": "bf16", "recompute": "full"}),
    ({"pipeline": 2, "tensor": 2}, "interleaved", {"sequence_parallel": True, "recompute": "selective"}),
    ({"data": 2}, "1f1b", {"sharding": "optimizer", "loss_chunk": None}),
], ids=["sharded", "sequence_parallel", "replicas"])
def test_only_the_commit_reads_values(mesh: dict[str, int], schedule: str, train: dict[str, Any],
                                      run_job: JobRunner) -> None:
    config = small_job(mesh=mesh, pipeline={"schedule": schedule}, model={"dropout": 0.1, "tied_embeddings": True},
                       train=train)
    for _, waits in run_job(config, 3, before=watch, after=waits_of):
        assert [in_step(each) for each in waits] == [{}, {}, {}]
        assert all(waits), "the commit must be seen to read"


def test_a_layer_that_asks_is_found(run_job: JobRunner) -> None:
    (_, waits), = run_job(small_job(), 1, before=watch_an_asking_layer, after=waits_of)
    assert in_step(waits[0]) == {("program", "__bool__"): 4, ("program", "aten::_local_scalar_dense"): 4}


def test_the_commit_reads_the_device_once_for_all_layers(run_job: JobRunner) -> None:
    def waits(blocks: int) -> Counter[tuple[str | None, str]]:
        (_, found), = run_job(job_of(blocks), 1, before=watch, after=waits_of)
        return found[0]

    assert waits(2) == waits(6)


def job_of(blocks: int) -> JobConfig:
    config = small_job()
    return replace(config, model=replace(config.model, blocks=blocks))


def test_pinned_micro_batches_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU nothing can be pinned."""
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    parts = {name: torch.full((1, 4), value) for value, name in enumerate(("starts", "tokens", "targets"))}
    copy = MicroBatch(samples=(0,), **parts).pinned()
    for name, kept in zip(parts, pinned, strict=True):
        assert getattr(copy, name) is kept and torch.equal(kept, parts[name])
