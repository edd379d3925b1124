"""A small job whose whole state is known, and ranks of any layout that hold parts of it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from raytrain3d.checkpoint.layout import Piece, interval_rectangles
from raytrain3d.checkpoint.store import commit, step_directory, write_shard
from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.plan.params import flat_layout, model_spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class FakeRank:
    """Flat buffers of every state and kind, filled with garbage, and the pieces that look into them."""

    pieces: list[Piece]
    buffers: list[torch.Tensor]


class Checkpoints:
    """What the tests of a whole save and load share."""

    def config(self, name: str = "one", *, dtype: str = "fp32", tied: bool = False, vocabulary: int = 37,
               hidden: int = 24, seed: int = 1) -> JobConfig:
        model = ModelConfig(vocabulary=vocabulary, hidden=hidden, blocks=2, heads=4, kv_heads=2, head_size=6,
                            feed_forward=20, tied_embeddings=tied, vocabulary_multiple=8)
        return JobConfig(run=RunConfig(name=name), model=model, data=DataConfig(path="unused"),
                         train=TrainConfig(steps=9, global_batch=4, sequence=8, seed=seed, dtype=dtype),
                         mesh=MeshConfig())

    def truth(self, config: JobConfig, seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
        """Random bits for every (parameter, kind), global and unpadded."""
        generator = torch.Generator().manual_seed(seed)
        weight = DTYPES[config.train.dtype]
        exact = torch.float32 if weight == torch.bfloat16 else weight
        kinds = {"weight": weight, "exp_avg": exact, "exp_avg_sq": exact}
        kinds |= {"master": exact} if weight == torch.bfloat16 else {}
        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        return {(f"{state.name}.{p.name}", kind): draw(p.shape).to(dtype)
                for state in model_spec(config.model, config.train, 1).states for p in state.params
                for kind, dtype in kinds.items()}

    def ranks(self, config: JobConfig, truth: dict[tuple[str, str], torch.Tensor], *, tensor: int, data: int,
              stages: list[range], sharded: bool) -> list[FakeRank]:
        """Ranks (data, pipeline, tensor) of a layout; a weight is held by all data coordinates."""
        spec = model_spec(config.model, config.train, tensor)
        kinds = {kind: value.dtype for (_, kind), value in truth.items()}
        ranks = []
        for d in range(data):
            for stage in stages:
                for t in range(tensor):
                    rank = FakeRank(pieces=[], buffers=[])
                    for state in spec.states_of(stage):
                        layout = flat_layout(state, tensor=tensor, data=data)
                        part = layout.size // data
                        for kind, dtype in kinds.items():
                            cut = sharded and kind != "weight"
                            low, high = (d * part, (d + 1) * part) if cut else (0, layout.size)
                            buffer = torch.full((high - low,), -77.0, dtype=dtype)
                            rank.buffers.append(buffer)
                            for slot in layout.slots:
                                offset = [0] * len(slot.shape)
                                if slot.param.split is not None:
                                    offset[slot.param.split] = t * slot.shape[slot.param.split]
                                held = (max(low, slot.start) - slot.start, min(high, slot.stop) - slot.start)
                                here = buffer[max(low, slot.start) - low : max(min(high, slot.stop) - low, 0)]
                                for box in interval_rectangles(slot.shape, offset, held, slot.param.shape):
                                    rank.pieces.append(Piece(name=f"{state.name}.{slot.param.name}", kind=kind,
                                                             rectangle=box.rectangle, tensor=box.view(here, held[0])))
                    ranks.append(rank)
        return ranks

    def fill(self, rank: FakeRank, truth: dict[tuple[str, str], torch.Tensor]) -> None:
        for piece in rank.pieces:
            box = piece.rectangle
            index = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            piece.tensor.copy_(truth[piece.name, piece.kind][index])

    def check(self, rank: FakeRank, truth: dict[tuple[str, str], torch.Tensor]) -> None:
        """Every piece equals the truth to the bit and nothing outside the pieces was touched."""
        for piece in rank.pieces:
            box = piece.rectangle
            index = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            expected = truth[piece.name, piece.kind][index].contiguous()
            assert torch.equal(piece.tensor.contiguous().view(torch.uint8), expected.view(torch.uint8)), piece.name
            piece.tensor.fill_(-77.0)
        assert all(bool((buffer == -77.0).all()) for buffer in rank.buffers)

    def one_rank(self, config: JobConfig, truth: dict[tuple[str, str], torch.Tensor]) -> FakeRank:
        (rank,) = self.ranks(config, truth, tensor=1, data=1, stages=[range(config.model.blocks + 2)], sharded=False)
        return rank

    def save(self, run: str, step: int, config: JobConfig | None = None, seed: int = 0) -> str:
        """A checkpoint written by two tensor ranks; its directory."""
        config = config or self.config()
        truth, directory = self.truth(config, seed), step_directory(run, step)
        ranks = self.ranks(config, truth, tensor=2, data=1, stages=[range(config.model.blocks + 2)], sharded=False)
        for rank in ranks:
            self.fill(rank, truth)
        receipts = [write_shard(directory, i, rank.pieces, step=step) for i, rank in enumerate(ranks)]
        commit(directory, step, receipts, config=config, data="data-1")
        return directory


@pytest.fixture
def checkpoints() -> Checkpoints:
    return Checkpoints()


@pytest.fixture
def refusal() -> Callable[[Callable[[], object]], str]:
    """Runs what must raise CheckpointError and gives its message."""
    from raytrain3d.errors import CheckpointError

    def run(action: Callable[[], object]) -> str:
        with pytest.raises(CheckpointError) as caught:
            action()
        return str(caught.value)
    return run
