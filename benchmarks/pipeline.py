"""Pipeline runtimes side by side: ours, torch.distributed.pipelining, DeepSpeed. Two cores are enough.

| part    | what runs                                                                              |
|---------|----------------------------------------------------------------------------------------|
| `sleep` | stages that sleep, on 4 and 8 ranks: what a runtime adds to the ideal step             |
| `real`  | a 30M model on 2 ranks, FP32 and bf16: our 1F1B and ZB-H1, torch's 1F1B on our layers  |
| `3d`    | 2 x 2 x 2 ranks: our trainer, DTensor + torch pipelining + DDP                         |
| `best`  | every schedule of ours with our layers, every one of torch's with plain ones           |

Prints tables and one line of JSON. DeepSpeed takes part where it is installed (`pip install -e '.[bench]'`).

    python benchmarks/pipeline.py [--quick] [--only PART]
"""

import argparse
import json
from typing import Any

import deepspeed_pipeline
import pipeline_best
import pipeline_mesh
import pipeline_real
import pipeline_sleep

PARTS = {"sleep": pipeline_sleep.run, "real": pipeline_real.run, "3d": pipeline_mesh.run, "best": pipeline_best.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, under a minute; the figures then mean little")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    arguments = parser.parse_args()
    if not deepspeed_pipeline.INSTALLED:
        print("DeepSpeed is not installed, so it takes no part\n")
    figures: dict[str, Any] = {}
    for name in [arguments.only] if arguments.only else PARTS:
        figures |= PARTS[name](quick=arguments.quick)
        print(flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
