"""The model that the benchmarks with real compute train: Llama-style, 30M parameters, on tokens drawn at random."""

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from raytrain3d.model.init import initial_values
from raytrain3d.model.transformer import Layer, build_layers
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.plan.mesh import Coordinate, Mesh
from raytrain3d.plan.params import model_spec

MODEL = ModelConfig(vocabulary=4096, hidden=512, blocks=8, heads=8, feed_forward=1408)
SEQUENCE = 256
NUM_LAYERS = MODEL.blocks + 2


ONE_RANK = MeshConfig()


def job(dtype: str, *, micro_batch: int, num_micro_batches: int, mesh: MeshConfig = ONE_RANK,
        schedule: str = "1f1b") -> JobConfig:
    """A job of `num_micro_batches` for each replica."""
    return JobConfig(
        run=RunConfig(name="benchmark"), model=MODEL, mesh=mesh, data=DataConfig(path="unused"),
        pipeline=PipelineConfig(schedule=schedule),  # type: ignore[arg-type]
        train=TrainConfig(steps=1000, global_batch=mesh.data * num_micro_batches * micro_batch, micro_batch=micro_batch,
                          sequence=SEQUENCE, dtype=dtype))  # type: ignore[arg-type]


class Model:
    """Some layers of the model with initial weights and zero gradients, in flat buffers as in training."""

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


def random_batch(num_micro_batches: int, micro_batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (num_micro_batches * micro_batch, seq)."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_micro_batches * micro_batch
    drawn = torch.randint(MODEL.vocabulary, (rows, SEQUENCE + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def split_evenly(num_stages: int) -> tuple[range, ...]:
    """Layers of each stage, the longer ones first."""
    base, more = divmod(NUM_LAYERS, num_stages)
    ends = accumulate((base + (stage < more) for stage in range(num_stages)), initial=0)
    return tuple(range(*pair) for pair in pairwise(ends))
