"""The layers that one rank holds: their states, their modules, and the stages they form. Layers may come and go between
steps; everything else of a rank stays as it is."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from raytrain3d.config import JobConfig, ModelConfig
from raytrain3d.model.compiled import compile_layer
from raytrain3d.model.transformer import Head, Layer, build_layers
from raytrain3d.parallel.gradients import EveryMicroBatch, GradientReduction, OnceAStep
from raytrain3d.parallel.groups import Group
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.parallel.pipeline import Stage
from raytrain3d.parallel.sums import Sums
from raytrain3d.parallel.tensor import apply_tensor_parallelism
from raytrain3d.plan.mesh import Coordinate
from raytrain3d.plan.params import LayerSpec, ModelSpec
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.recompute import recompute_kind
from raytrain3d.plan.schedule import Kind
from raytrain3d.plan.uses import makes_gradient

LayerBuilder = Callable[[ModelConfig, Iterable[int]], dict[int, Layer]]
"""Makes the modules of some layers, without parameters."""


class Holding:
    """What `plan` gives to the rank at `at`, without values."""

    def __init__(self, config: JobConfig, spec: ModelSpec, plan: Plan, at: Coordinate, device: torch.device,
                 build: LayerBuilder = build_layers) -> None:
        self._config, self._spec, self._at, self._device, self._build_layers = config, spec, at, device, build
        self._mesh = plan.mesh
        self._tensor_group: Group | None = None
        self._present: Sequence[int] = plan.replicas
        self.states: dict[int, LayerState] = {}
        self.layers: dict[int, Layer] = {}
        self.stages: dict[int, Stage] = {}
        layers = plan.layers_of_rank(at.pipeline)
        for state in spec.states_of(layers):
            self.states[state.index] = self._new_state(state)
        for layer in layers:
            self._build(layer)
        self.keep(plan)

    def connect(self, tensor: Group, present: Sequence[int]) -> None:
        """`tensor` is the group that this rank divides its layers with; `present`: replicas that have ranks."""
        self._tensor_group, self._present = tensor, present
        for state in self.states.values():
            state.deal(present)
        for layer in self.layers:
            self._divide(layer, tensor)

    def take(self, layer: int) -> LayerState:
        """Add a layer, without values, that belongs to no stage until `keep`."""
        self.states[layer] = state = self._new_state(self._spec.layers[layer])
        self._build(layer)
        if self._tensor_group is not None:
            self._divide(layer, self._tensor_group)
        return state

    def keep(self, plan: Plan) -> None:
        """Form the stages of `plan` and let go of what is not in it."""
        layers = plan.layers_of_rank(self._at.pipeline)
        kept = {state.index for state in self._spec.states_of(layers)}
        self.states = {index: state for index, state in sorted(self.states.items()) if index in kept}
        self.layers = {index: self.layers[index] for index in layers}
        self.stages = {stage: self._stage(plan, stage) for stage in plan.stages_of(self._at.pipeline)}

    def _stage(self, plan: Plan, stage: int) -> Stage:
        layers = {layer: self.layers[layer] for layer in plan.layers_of(stage)}
        kinds = {layer: recompute_kind(self._config, self._spec.layers[layer], stage) for layer in layers}
        for layer, module in layers.items():
            module.recompute_attention = kinds[layer] == "selective"
        return Stage(layers, is_first=stage == 0, is_last=stage == len(plan.stages) - 1,
                     is_compiled=self._config.train.compile != "none",
                     recompute=frozenset(layer for layer, kind in kinds.items() if kind == "full"))

    def trained(self) -> list[LayerState]:
        return [state for state in self.states.values() if not state.spec.frozen]

    def states_of(self, layer: int) -> tuple[LayerState, ...]:
        """States with parameters that `layer` computes with."""
        return tuple(self.states[state.index] for state in self._spec.states_of([layer]))

    def fed(self, kind: Kind, layer: int) -> tuple[LayerState, ...]:
        """States whose whole gradient must have memory in that part of an op."""
        if not makes_gradient(kind, self._spec.layers[layer], self._config.train):
            return ()
        return tuple(state for state in self.states_of(layer) if state.shards_gradient and state.spec.has_matrices)

    @property
    def tied(self) -> int | None:
        """Index of the state of a tied weight, whether it is held here or not."""
        return self._spec.tied.index if self._spec.tied is not None else None

    def speaks_for(self, state: LayerState) -> bool:
        """A tied state lives on both end stages; the first one saves it and counts its norm."""
        return state.spec.kind != "tied" or 0 in self.stages

    def reduction(self, sums: Sums) -> GradientReduction:
        """Of one step. All ranks of a data group reduce layers from last to first, as their backwards end, then the tied
        weight."""
        states = {state.spec.index: state for state in self.trained()}
        order = sorted(states, key=lambda index: (index == self.tied, -index))
        ordered = {index: states[index] for index in order}
        if any(state.shards_gradient for state in states.values()):
            return EveryMicroBatch(ordered, sums, self.tied, self.fed)
        return OnceAStep(ordered, sums, self.tied)

    def _new_state(self, state: LayerSpec) -> LayerState:
        made = LayerState(state, self._config, self._mesh, self._at, self._device)
        made.deal(self._present)
        return made

    def _divide(self, layer: int, tensor: Group) -> None:
        apply_tensor_parallelism(self.layers[layer], tensor, heads=self._config.model.heads,
                                 sequence_parallel=self._config.train.sequence_parallel)
        if self._config.train.compile != "none":
            compile_layer(self.layers[layer], self._config.train.compile)

    def _build(self, index: int) -> None:
        (layer,) = self._build_layers(self._config.model, [index]).values()
        layer.bind(self.states[index].parameters)
        if isinstance(layer, Head):
            layer.loss_chunk = self._config.train.loss_chunk
        tied: dict[str, Any] = {} if self.tied is None or self.tied not in self.states else self.states[self.tied].parameters
        if tied and index == 0:
            layer.bind({"tokens.weight": tied["tokens.weight"]})
        if tied and index == len(self._spec.layers) - 1:
            layer.bind({"output.weight": tied["tokens.weight"]})
        self.layers[index] = layer
