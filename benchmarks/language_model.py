"""What the benchmarks with real compute train: a Llama-style model on tokens drawn at random."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from raytrain3d.model.init import initial_values
from raytrain3d.model.transformer import Layer, build_layers
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.plan.mesh import Coordinate, Mesh
from raytrain3d.plan.params import model_spec

ONE_RANK = MeshConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and the shape of its micro-batches."""

    model: ModelConfig
    sequence: int
    micro_batch: int
    """Samples."""

    @property
    def message(self) -> tuple[int, int, int]:
        """(batch, seq, hidden) of what passes between stages."""
        return self.micro_batch, self.sequence, self.model.hidden

    def job(self, dtype: str = "fp32", *, num_micro_batches: int = 1, mesh: MeshConfig = ONE_RANK,
            schedule: str = "1f1b") -> JobConfig:
        """A job with `num_micro_batches` for each replica."""
        return JobConfig(
            run=RunConfig(name="benchmark"), model=self.model, mesh=mesh, data=DataConfig(path="unused"),
            pipeline=PipelineConfig(schedule=schedule),  # type: ignore[arg-type]
            train=TrainConfig(steps=1000, global_batch=mesh.data * num_micro_batches * self.micro_batch, dtype=dtype,  # type: ignore[arg-type]
                              micro_batch=self.micro_batch, sequence=self.sequence))

    def batch(self, num_micro_batches: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (num_micro_batches * micro_batch, seq), always the same."""
        rows = num_micro_batches * self.micro_batch
        drawn = torch.randint(self.model.vocabulary, (rows, self.sequence + 1), generator=torch.Generator().manual_seed(0))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def split_evenly(self, num_stages: int) -> tuple[range, ...]:
        """Layers of each stage, the longer ones first."""
        base, more = divmod(self.model.blocks + 2, num_stages)
        ends = accumulate((base + (stage < more) for stage in range(num_stages)), initial=0)
        return tuple(range(*pair) for pair in pairwise(ends))


FULL = Workload(model=ModelConfig(vocabulary=1024, hidden=512, blocks=8, heads=8, feed_forward=1536), sequence=256,
                micro_batch=2)
"""28M parameters; a step of 8 micro-batches takes 3 to 5 s on 2 cores in FP32. The head costs a seventh of a block, so two
stages are nearly even, as a pipeline is meant to be: what a schedule can gain shrinks when one stage sets the pace."""
QUICK = Workload(model=replace(FULL.model, hidden=128, heads=4, feed_forward=352), sequence=64,
                 micro_batch=1)
"""Runs everything in seconds; its figures say nothing."""


class Model:
    """Some layers with initial weights and zero gradients, in flat buffers as in training."""

    def __init__(self, config: JobConfig, layers: Iterable[int]) -> None:
        spec, at = model_spec(config.model, config.train, 1), Coordinate(data=0, pipeline=0, tensor=0)
        self.layers: dict[int, Layer] = build_layers(config.model, tuple(layers))
        self.states = {index: LayerState(spec.layers[index], config, Mesh(), at, torch.device("cpu"))
                       for index in self.layers}
        for index, state in self.states.items():
            state.fill(lambda name, param, part: initial_values(config.model, config.train.seed, name, param, part))
            self.layers[index].bind(state.parameters)

    def zero_gradients(self) -> None:
        for state in self.states.values():
            state.gradient.zero_()

    def gradients(self) -> dict[int, Tensor]:
        """Copies, by layer."""
        return {index: state.gradient.clone() for index, state in self.states.items()}
