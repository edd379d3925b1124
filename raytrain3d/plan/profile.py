"""What `raytrain3d profile` found: constants of time and memory, kept as JSON for `plan --calibration`.

One layer of each kind is timed at the job's own shapes, so the model's seconds of a layer are scaled to what was measured,
forward and backward by themselves. What shapes change (ranks, micro-batches, stages) stays with the model.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil, log2
from pathlib import Path
from typing import Any

from raytrain3d.config import CheckpointConfig, DebugConfig, JobConfig, MeshConfig, PipelineConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.calibration import Calibration, calibration_of
from raytrain3d.plan.catalogue import Node
from raytrain3d.plan.device_memory import Allocation
from raytrain3d.plan.search import Evaluator
from raytrain3d.plan.state_memory import ELEMENT_BYTES
from raytrain3d.plan.step_time import Cluster, StepTimer

BLOCKS = 2
"""Of a job that is profiled: one, and another whose neighbours are as in the middle of a model."""
MICRO_BATCHES = 4
LARGE_BYTES, SMALL_BYTES = 4 << 20, 1 << 10
"""Messages that `check` and `profile` measure links with."""
KINDS = ("embedding", "block", "head")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Constants of one kind of node, and of one shape of layers where they were measured."""

    calibration: Calibration = field(default_factory=Calibration)
    allocation: Allocation = field(default_factory=Allocation)
    about: str = ""
    """What was measured, for people."""

    def text(self) -> str:
        """What differs from the defaults, for people."""
        lines = [self.about]
        pairs: tuple[tuple[Any, Any], ...] = (self.calibration, Calibration()), (self.allocation, Allocation())
        for given, usual in pairs:
            lines += [f"  {each.name:20} {getattr(given, each.name):.4g}" for each in fields(given)
                      if getattr(given, each.name) != getattr(usual, each.name)]
        return "\n".join(lines)

    def save(self, path: str) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"calibration file {path!r} cannot be written ({error.strerror})") from None

    @staticmethod
    def read(path: str) -> "Profile":
        """What `save` wrote; keys left out keep their default. PlanError if it is something else."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"calibration file {path!r} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise PlanError(f"calibration file {path!r} is no JSON: {error}") from None
        given = _section(path, "", found, Profile)
        allocation = _section(path, "allocation", given.get("allocation", {}), Allocation)
        calibration = _section(path, "calibration", given.get("calibration", {}), Calibration)
        try:
            return Profile(calibration=calibration_of(calibration), about=str(given.get("about", "")),
                           allocation=Allocation(**{name: float(value) for name, value in allocation.items()}))
        except (TypeError, ValueError) as error:
            raise PlanError(f"calibration file {path!r}, allocation: {error}") from None


def _section(path: str, name: str, found: Any, kind: Any) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    if isinstance(found, dict) and found.keys() <= names:
        return found
    wrong = f"has unknown keys {', '.join(sorted(found.keys() - names))}" if isinstance(found, dict) else "is no JSON object"
    where = f", {name}," if name else ""
    raise PlanError(f"calibration file {path!r}{where} {wrong}: valid are {', '.join(sorted(names))}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSeconds:
    """Of one micro-batch in one layer."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Medians over the steps of a profiled job, in seconds."""

    layers: Mapping[str, LayerSeconds]
    """By kind."""
    optimizer_s: float
    rest_s: float
    """Of a step beside computing, waiting, reducing and updating."""
    memory_bytes: int
    """Most on a rank; 0: not measured."""

    @property
    def busy_s(self) -> float:
        return sum(layer.forward + layer.backward for layer in self.layers.values())


def profiled_job(config: JobConfig, *, data: int = 1, pipeline: int = 1) -> JobConfig:
    """A short model at the job's shapes (tensor ranks, micro-batch, types), with few micro-batches."""
    train = config.train
    return replace(
        config, model=replace(config.model, blocks=BLOCKS, freeze=(), from_huggingface=None),
        mesh=MeshConfig(data=data, pipeline=pipeline, tensor=config.mesh.tensor), pipeline=PipelineConfig(),
        checkpoint=CheckpointConfig(), recovery=replace(config.recovery, snapshot_interval=None), debug=DebugConfig(),
        train=replace(train, global_batch=MICRO_BATCHES * data * train.micro_batch, sharding="none", shard_group=None,
                      recompute="none", recompute_every=1, offload_activations=False, offload_optimizer=False))


def calibrated(config: JobConfig, node: Node, alone: Measured, beside: Measured | None, links: Mapping[str, float],
               *, on_cpu: bool) -> Profile:
    """Constants for jobs like `config`. alone: of `profiled_job`; beside: of so many replicas of it that all devices of a
    node compute; links: as `parallel.links.measure_links` names them. What communicates on a CPU takes it from computing, so
    that there nothing hides."""
    job, base = profiled_job(config), Calibration()
    if on_cpu:
        base = replace(base, launch_s=0.0, exposed_tensor=1.0, exposed_reduction=1.0, exposed_all_reduce=1.0,
                       exposed_handover=1.0)
    base = replace(base, launch_s=0.0, step_s=(beside or alone).rest_s)
    base = _with_links(base, config, node, links)
    base = _with_update(base, job, node, alone)
    timer = Evaluator(cluster=Cluster(node=node, calibration=base), allocation=Allocation()).timer(job)
    base = replace(base, **_layer_factors(timer, alone))
    if beside is not None:
        base = replace(base, crowd=max(1.0, beside.busy_s / alone.busy_s))
    return Profile(calibration=base, allocation=_allocation(job, node, base, alone) if on_cpu else Allocation(),
                   about=f"{node.name}: {config.run.name}, hidden {config.model.hidden}, tensor {config.mesh.tensor}, "
                         f"micro-batch {config.train.micro_batch} x {config.train.sequence} tokens, {config.train.dtype}")


def _layer_factors(timer: StepTimer, alone: Measured) -> dict[str, float]:
    """Measured over modelled seconds of each kind, collectives left out."""
    found: dict[str, float] = {}
    for kind in KINDS:
        layer = next(i for i, spec in enumerate(timer.spec.layers) if spec.kind == kind)
        time, measured = timer.layer_times[layer], alone.layers[kind]
        found[f"{kind}_forward"] = max(0.0, measured.forward - time.tensor.forward) / time.compute.forward
        found[f"{kind}_backward"] = max(0.0, measured.backward - time.tensor.backward) / time.compute.backward
    return found


def _with_links(base: Calibration, config: JobConfig, node: Node, links: Mapping[str, float]) -> Calibration:
    """Bandwidth and latency inside a node, from an all-reduce; latency of messages, from a channel."""
    ring = next((name for name in ("tensor all-reduce", "data all-reduce") if f"{name} MB/s" in links), None)
    if ring is not None:
        ranks = config.mesh.tensor if ring.startswith("tensor") else max(2, node.devices // config.mesh.tensor)
        steps = min(ranks - 1, ceil(log2(ranks)))
        step_s = links[f"{ring} latency_ms"] / 1e3 / (2 * steps)
        seconds = max(LARGE_BYTES / (links[f"{ring} MB/s"] * 1e6) - 2 * (ranks - 1) * step_s, 1e-9)
        bandwidth = 2 * (ranks - 1) / ranks * LARGE_BYTES / seconds
        base = replace(base, inside=bandwidth / (node.inside_gb_s * 1e9), inside_step_s=step_s)
    channel = next((name.removesuffix(" latency_ms") for name in links if name.startswith("channel ")
                    and name.endswith(" latency_ms")), None)
    if channel is not None:
        size = config.train.micro_batch * config.residual_sequence * config.model.hidden * ELEMENT_BYTES[config.train.dtype]
        seconds = links[f"{channel} latency_ms"] / 1e3 + size / (links[f"{channel} MB/s"] * 1e6)
        base = replace(base, handover_s=max(0.0, seconds - size / (node.inside_gb_s * 1e9 * base.inside)))
    return base


def _with_update(base: Calibration, job: JobConfig, node: Node, alone: Measured) -> Calibration:
    """Bandwidth of memory, from the update of weights and moments."""
    whole = Evaluator(cluster=Cluster(node=node, calibration=replace(base, memory=1.0, step_s=0.0)), allocation=Allocation())
    timer = whole.timer(job)
    return replace(base, memory=timer.data_timer.update_s(sum(timer.elements)) / max(alone.optimizer_s, 1e-9))


def _allocation(job: JobConfig, node: Node, calibration: Calibration, alone: Measured) -> Allocation:
    """Of a process on a CPU: tensors, and what it holds without any. (A GPU's allocator does not count its context.)"""
    bare = Allocation(state=1.0, activations=1.0, logits=1.0, gathered_weights=0.0, run_ahead=0.0, base_gb=0.0, usable=1.0)
    if not alone.memory_bytes:
        return bare
    choice = Evaluator(cluster=Cluster(node=node, calibration=calibration), allocation=bare).evaluate(job)
    return replace(bare, base_gb=max(0.0, alone.memory_bytes - choice.needed) / 1e9)
