"""Pipeline runtimes side by side: ours, torch.distributed.pipelining, DeepSpeed. Two cores are enough.

| part    | what runs                                                                          |
|---------|------------------------------------------------------------------------------------|
| `sleep` | stages that sleep on 4 and 8 ranks: what the runtime adds to the ideal step        |
| `real`  | a 30M model on 2 ranks, FP32 and bf16: the same layers under our 1F1B, our ZB-H1, torch 1F1B |

Prints tables and one line of JSON.

    python benchmarks/pipeline.py [--quick] [--only PART]
"""

import argparse
import json

import pipeline_best
import pipeline_mesh
import pipeline_real
import pipeline_sleep

PARTS = {"sleep": pipeline_sleep.run, "real": pipeline_real.run, "3d": pipeline_mesh.run,
         "best": pipeline_best.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, under a minute; the figures then mean little")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    arguments = parser.parse_args()
    figures = {}
    for name in [arguments.only] if arguments.only else PARTS:
        figures |= PARTS[name](quick=arguments.quick)
        print(flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
