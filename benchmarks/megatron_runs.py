"""The ten runs of https://arxiv.org/abs/2104.04473, table 1, as jobs that a planner can time.

A100 80 GB, sequence length 2048, vocabulary 51200, full recompute, unfused attention with dropout, whole optimizer state on
every replica. The paper prints layout and throughput; micro-batch sizes and chunks are those of the scripts that its
authors published for the table (Megatron-LM, examples/sc21).
"""

from dataclasses import dataclass
from functools import cached_property

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig

SEQUENCE, VOCABULARY = 2048, 51200


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    billions: float
    heads: int
    hidden: int
    blocks: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflops: float
    """Measured, of a GPU, recompute counted."""
    micro_batch: int
    chunks: int

    @property
    def flops(self) -> float:
        """Of a step, as the paper counts them: recompute in the blocks, not in the head."""
        return (96 * self.batch * SEQUENCE * self.blocks * self.hidden**2
                * (1 + SEQUENCE / (6 * self.hidden) + VOCABULARY / (16 * self.blocks * self.hidden)))

    def tflops_at(self, step_s: float) -> float:
        return self.flops / step_s / self.gpus / 1e12

    @cached_property
    def job(self) -> JobConfig:
        model = ModelConfig(family="gpt2", vocabulary=VOCABULARY, hidden=self.hidden, blocks=self.blocks, heads=self.heads,
                            feed_forward=4 * self.hidden, positions=SEQUENCE, tied_embeddings=True, dropout=0.1,
                            attention_dropout=0.1)
        data = self.gpus // (self.tensor * self.pipeline)
        pipeline = (PipelineConfig(schedule="interleaved", chunks=self.chunks) if self.chunks > 1
                    else PipelineConfig(schedule="1f1b"))
        return JobConfig(
            run=RunConfig(name="row"), data=DataConfig(path="unused"), model=model, pipeline=pipeline,
            mesh=MeshConfig(data=data, pipeline=self.pipeline, tensor=self.tensor),
            train=TrainConfig(steps=1, global_batch=self.batch, micro_batch=self.micro_batch, sequence=SEQUENCE,
                              dtype="bf16", recompute="full", loss_chunk=None))


def _row(billions: float, heads: int, hidden: int, blocks: int, tensor: int, pipeline: int, gpus: int, batch: int,
         tflops: float, micro_batch: int, chunks: int = 1) -> Row:
    return Row(billions=billions, heads=heads, hidden=hidden, blocks=blocks, tensor=tensor, pipeline=pipeline, gpus=gpus,
               batch=batch, tflops=tflops, micro_batch=micro_batch, chunks=chunks)


ROWS = (
    _row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16),
    _row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16),
    _row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16),
    _row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    _row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4),
    _row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    _row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    _row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    _row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    _row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
)
