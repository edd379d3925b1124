"""What the split of layers over stages is worth, planned without hardware: simulated step time of known models under four
splits.

| split        | how                                                                                        |
|--------------|--------------------------------------------------------------------------------------------|
| `uniform`    | blocks evenly, the embedding on the first stage, the head on the last                      |
| `torchtitan` | embedding and head count as one block each (torchtitan's default)                          |
| `pipedream`  | least time of the slowest stage                                                            |
| `best`       | least simulated step time                                                                  |

Costs are FLOPs of one sample of 4096 tokens, causal attention counted by half, backward twice the forward; 1F1B with four
micro-batches for each stage; messages are free. Prints a table (speed-up over uniform, layers of each stage) and one
line of JSON: the speed-up of `best`, and the seconds that the search takes for 128 layers on 64 stages.

    python benchmarks/partition.py [--pipeline 8]
"""

import argparse
import json
import random
import time

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.plan.balance import best_stages
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.splits import NamedSplit
from raytrain3d.plan.workload import Workload

MODELS = {
    "Llama-3.1-8B": ModelConfig(vocabulary=128256, hidden=4096, blocks=32, heads=32, kv_heads=8, feed_forward=14336),
    "Llama-3.2-1B": ModelConfig(vocabulary=128256, hidden=2048, blocks=16, heads=32, kv_heads=8, feed_forward=8192,
                                tied_embeddings=True),
    "Llama-3.2-3B": ModelConfig(vocabulary=128256, hidden=3072, blocks=28, heads=24, kv_heads=8, feed_forward=8192,
                                tied_embeddings=True),
    "Qwen3-1.7B": ModelConfig(vocabulary=151936, hidden=2048, blocks=28, heads=16, kv_heads=8, head_size=128,
                              feed_forward=6144, qk_norm=True, tied_embeddings=True),
    "Llama-3.1-70B": ModelConfig(vocabulary=128256, hidden=8192, blocks=80, heads=64, kv_heads=8, feed_forward=28672),
}
SEQUENCE = 4096


def splits_of(model: ModelConfig, pipeline: int) -> tuple[NamedSplit, ...]:
    """As `raytrain3d plan` compares them, for 4 micro-batches of each stage."""
    return make_plan(JobConfig(run=RunConfig(name="benchmark"), data=DataConfig(path="unused"), model=model,
                               mesh=MeshConfig(pipeline=pipeline),
                               train=TrainConfig(steps=1, global_batch=4 * pipeline, sequence=SEQUENCE))).splits


def show(name: str, splits: tuple[NamedSplit, ...]) -> None:
    for i, split in enumerate(splits):
        print(f"{'' if i else name:14s} {split.name:11s} {split.gain:5.3f}  {','.join(map(str, split.layers))}")


def search_s() -> float:
    """Seconds of CPU time for 128 layers of various cost on 64 stages, 256 micro-batches."""
    draw = random.Random(1)
    costs = [draw.uniform(0.5, 1.5) for _ in range(128)]
    workload = Workload(schedule="1f1b", num_ranks=64, shares=(256,), slowdowns=((1.0,) * 64,),
                        costs=tuple(LayerCost(forward=cost, backward_input=cost, backward_weight=cost) for cost in costs))
    start = time.process_time()
    best_stages(workload)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=8, help="number of stages (default: 8)")
    pipeline = parser.parse_args().pipeline
    figures = {}
    print(f"{'model':14s} {'split':11s} {'gain':5s}  layers of each of {pipeline} stages")
    for name, model in MODELS.items():
        splits = splits_of(model, pipeline)
        show(name, splits)
        figures[f"gain_{name.lower().replace('-', '_').replace('.', '_')}"] = round(splits[-1].gain, 3)
    print(json.dumps(figures | {"search_128_on_64_s": round(search_s(), 2)}))


if __name__ == "__main__":
    main()
