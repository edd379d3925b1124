"""Seconds of one layer for one micro-batch on one rank: matrix products, attention, memory traffic, tensor collectives.

Matrix products are counted from the layer's own parameters, a constant for each on top (what a small product wastes).
Memory traffic is counted in elements that kernels read and write; weight gradients are added to what is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raytrain3d.config import JobConfig, Recompute
from raytrain3d.plan.activations import Activations, vocabulary_rows
from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.catalogue import Node
from raytrain3d.plan.collectives import Group, Links
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.params import LayerSpec, ModelSpec
from raytrain3d.plan.state_memory import ELEMENT_BYTES, EXACT_BYTES

RESIDUAL_ELEMENTS = 12
"""Elements of width hidden that a block reads and writes for a token: two norms, two additions, their copies."""
HEAD_ELEMENTS = 8
"""Elements of the width of all heads: rotation of query and key, copies for attention."""
MLP_ELEMENTS = {"llama": 4, "gpt2": 2}
"""By family, elements of the inner width: gate, activation, product."""
SCORE_ELEMENTS = 6.5
"""Unfused attention: elements a score that are written, scaled, normalized, dropped and read, mask included."""
LOGIT_BYTES = 10
"""A logit, written in 16 bit, converted, read for maximum and sum (fp32)."""
LOSS_BACKWARD = 1.5
"""Memory traffic of the loss's backward over its forward's."""
FUSED_BACKWARD = 2.5
"""Backward of fused attention over its forward: twice the products, and the scores once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Seconds of one layer. `backward` holds recompute."""

    compute: LayerCost
    """On the device."""
    tensor: LayerCost
    """Collectives over the tensor axis that computation does not hide."""
    launch: LayerCost
    """On the host, at the same time: a layer takes the longer of the two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimer:
    """Times layers of a job on one kind of node."""

    config: JobConfig
    node: Node
    calibration: Calibration
    tensor: Group
    """The tensor group of a rank."""
    slow_launches: bool = False
    """Stages are on different nodes, so `Calibration.contention_s` applies."""
    recompute: Recompute | None = None
    """Of the stage (pipeline.recompute); absent: train.recompute."""
    crowd: float = 1.0
    """How much longer a layer computes because of other ranks on its node."""

    def time_all(self, layers: Sequence[LayerSpec]) -> tuple[LayerTime, ...]:
        """By layer. Alike ones are timed once."""
        known: dict[object, LayerTime] = {}
        alike = [(layer.kind, layer.frozen) for layer in layers]  # blocks have the same parameters
        for key, layer in zip(alike, layers, strict=True):
            if key not in known:
                known[key] = self.time(layer)
        return tuple(known[key] for key in alike)

    def time(self, layer: LayerSpec) -> LayerTime:
        slower, slower_back = self._factors(layer)
        forward, backward_input, weight = self._compute(layer)
        forward, backward_input, weight = forward * slower, backward_input * slower_back, weight * slower_back
        shared_forward, shared_backward = self._collectives(layer)
        again, shared_again = self._again(layer, forward, shared_forward)
        launch, away = self._launch_s(layer), self._offload_s(layer)
        return LayerTime(
            compute=LayerCost(forward=forward + away, backward_input=backward_input + again + away,
                              backward_weight=0.0 if layer.frozen else weight),
            tensor=LayerCost(forward=shared_forward, backward_input=shared_backward + shared_again, backward_weight=0.0),
            launch=LayerCost(forward=launch / 3, backward_input=launch / 3 * (2 if again else 1),
                             backward_weight=launch / 3))

    def _again(self, layer: LayerSpec, forward: float, shared: float) -> tuple[float, float]:
        """Of forward and its collectives, what is computed again before the backward: in blocks only."""
        train, kind = self.config.train, self._kind
        if layer.kind != "block" or kind == "none":
            return 0.0, 0.0
        part = 1 / train.recompute_every
        if kind == "selective":
            return part * self._attention(layer)[0] * self._factors(layer)[0], 0.0
        return part * forward, part * shared

    def _factors(self, layer: LayerSpec) -> tuple[float, float]:
        """Of forward and backward, from a profile."""
        found = self.calibration
        forward, backward = {"embedding": (found.embedding_forward, found.embedding_backward),
                             "head": (found.head_forward, found.head_backward)}.get(
                                 layer.kind, (found.block_forward, found.block_backward))
        return forward * self.crowd, backward * self.crowd

    @property
    def _kind(self) -> Recompute:
        return self.recompute or self.config.train.recompute

    def _offload_s(self, layer: LayerSpec) -> float:
        """One way of what goes to the host after a forward (train.offload_activations), in order with the work."""
        if not self.config.train.offload_activations:
            return 0.0
        kept = Activations(config=self.config, spec=ModelSpec(layers=(layer,), tied=None), stages={})
        return self._tokens * kept.on_host(layer, self._kind) / (self.node.host_gb_s * 1e9 * self.calibration.inside)

    @property
    def _tokens(self) -> int:
        return self.config.train.micro_batch * self.config.train.sequence

    @property
    def _memory_s(self) -> float:
        """Seconds a byte."""
        return 1 / (self.node.memory_gb_s * 1e9 * self.calibration.memory)

    def _compute(self, layer: LayerSpec) -> tuple[float, float, float]:
        """Forward, input gradient, weight gradient."""
        products = sum(map(self._product_s, self._products(layer)))
        attention, attention_backward = self._attention(layer)
        traffic, traffic_backward = self._traffic(layer)
        adding = self._weight_bytes(layer) * self._memory_s
        return (products + attention + traffic, products + attention_backward + traffic_backward, products + adding)

    def _products(self, layer: LayerSpec) -> Iterator[float]:
        """FLOPs of each matrix product of the forward."""
        if layer.kind == "head":
            yield 2 * self._tokens * self._vocabulary * self.config.model.hidden
        elif layer.kind == "block":
            for param in layer.params:
                if len(param.shape) == 2:
                    rows, columns = param.local_shape(self.tensor.size)
                    yield 2 * self._tokens * rows * columns

    def _product_s(self, flops: float) -> float:
        peak = self.node.peak_flops(self.config.train.dtype) * self.calibration.matmul
        return (flops + self.calibration.matmul_half_flops) / peak

    @property
    def _vocabulary(self) -> int:
        return vocabulary_rows(self.config.model, self.tensor.size)

    def _attention(self, layer: LayerSpec) -> tuple[float, float]:
        """Forward and backward of the attention core."""
        train, peak = self.config.train, self.node.peak_flops(self.config.train.dtype)
        if not layer.attention_width:
            return 0.0, 0.0
        flops = 4 * self._tokens * train.sequence * layer.attention_width / self.tensor.size
        if not self.config.model.attention_dropout:
            half = 1 if self.config.data.mask_documents else 2  # the causal half; a mask is added to all scores
            forward = flops / half / (peak * self.calibration.attention)
            return forward, FUSED_BACKWARD * forward
        scores = self._tokens * train.sequence * self.config.model.heads / self.tensor.size
        traffic = SCORE_ELEMENTS * scores * ELEMENT_BYTES[train.dtype] * self._memory_s
        return flops / (peak * self.calibration.matmul) + traffic, 2 * (flops / (peak * self.calibration.matmul) + traffic)

    def _traffic(self, layer: LayerSpec) -> tuple[float, float]:
        """Memory traffic of forward and backward beside products and attention."""
        model, element = self.config.model, ELEMENT_BYTES[self.config.train.dtype]
        residual = model.hidden / (self.tensor.size if sequence_parallel(self.config) else 1)
        match layer.kind:
            case "head":
                forward = self._tokens * self._vocabulary * LOGIT_BYTES * self._memory_s
                return forward, LOSS_BACKWARD * forward
            case "block":
                split = HEAD_ELEMENTS * layer.attention_width + MLP_ELEMENTS[model.family] * model.feed_forward
                elements = RESIDUAL_ELEMENTS * residual + split / self.tensor.size
            case _:
                elements = 2 * residual
        forward = self._tokens * elements * element * self._memory_s
        return forward, 2 * forward

    def _weight_bytes(self, layer: LayerSpec) -> float:
        """Read and written when weight gradients are added up."""
        matrices = sum(1 for param in layer.params if len(param.shape) == 2 and layer.kind != "embedding")
        if not matrices and layer.kind != "head":
            return 0.0
        elements = (layer.matmul_parameters if layer.kind == "head" else layer.num_parameters) / self.tensor.size
        return 2 * elements * EXACT_BYTES[self.config.train.dtype]

    def _collectives(self, layer: LayerSpec) -> tuple[float, float]:
        """Forward and backward: all-reduces, or with sequence parallelism gathers and scatters, of which the backward has
        half again as many (what was gathered is not kept)."""
        links = Links(node=self.node, calibration=self.calibration)
        size = self._tokens * self.config.model.hidden * ELEMENT_BYTES[self.config.train.dtype]
        shown = links.transfer_s(size, self.tensor) * self.calibration.exposed_tensor
        one = shown + links.latency_s(self.tensor)
        sections = {"block": 2.0, "embedding": 0.5, "head": 0.5}.get(layer.kind, 0.0)
        forward = 2 * sections * one
        return forward, 1.5 * forward if sequence_parallel(self.config) else forward

    def _launch_s(self, layer: LayerSpec) -> float:
        if layer.kind == "embedding":
            return 0.0
        slow = self.calibration.contention_s * self.tensor.size if self.slow_launches else 0.0
        if slow:  # launches no longer run ahead of the device, so they wait for its collectives too
            slow += 10 * Links(node=self.node, calibration=self.calibration).latency_s(self.tensor)
        return self.calibration.launch_s + slow


def sequence_parallel(config: JobConfig) -> bool:
    """Whether the residual stream is divided over the tensor axis."""
    return config.train.sequence_parallel and config.mesh.tensor > 1
