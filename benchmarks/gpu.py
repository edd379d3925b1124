"""Speed on one GPU, without Ray: our trainer with compiled blocks beside plain loops over a module written by hand.

| shape      | what                                                                              |
|------------|-----------------------------------------------------------------------------------|
| `1b`       | Llama-3.2-1B, tied embeddings                                                     |
| `8b`       | Llama-3.1-8B with as many of its blocks as fit                                    |

Sequence 4096, bf16 with FP32 master weights. The plain loops compile the same blocks with torch.compile and update with
torch's fused AdamW: `plain` keeps FP32 weights under autocast, as ours are in effect; `plain_bf16` has bf16 weights and
moments, which is less to read and another training. `--small` runs every line on any machine at toy size.

Prints tables and one line of JSON: tokens/s, MFU, peak memory, milliseconds by part, `ratio_vs_plain` (our tokens/s over
those of the faster of the two).

    python benchmarks/gpu.py [--small] [--only SHAPE]
"""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import run_on_gpu
from language_model import Workload
from parts import step_parts, table
from pipeline_mesh import OneBatch
from plain_llama import PlainStage
from torch import Tensor
from torch.nn.functional import cross_entropy

from raytrain3d.config import JobConfig, LearningRateConfig, MetricsConfig, ModelConfig, OptimizerConfig
from raytrain3d.parallel.clock import clock_for
from raytrain3d.parallel.groups import serve_store
from raytrain3d.plan.cost import model_flops_per_token, model_flops_utilization
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.plan import make_plan
from raytrain3d.train.memory import memory_in_use
from raytrain3d.train.peak import peak_flops
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

LLAMA_1B = ModelConfig(vocabulary=128256, hidden=2048, blocks=16, heads=32, kv_heads=8, feed_forward=8192,
                       rotary_theta=500000.0, tied_embeddings=True)
LLAMA_8B = ModelConfig(vocabulary=128256, hidden=4096, blocks=32, heads=32, kv_heads=8, feed_forward=14336,
                       rotary_theta=500000.0)
SHAPES = {"1b": Workload(model=LLAMA_1B, sequence=4096, micro_batch=4),
          "8b": Workload(model=LLAMA_8B, sequence=4096, micro_batch=1)}
USABLE = 0.75
"""Share of the free memory that the plan's tensors may take; libraries, temporaries and fragments take the rest."""
NUM_MICRO_BATCHES = 4
WARMUP, STEPS = 3, 12
PART_REPEATS = 10
STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Of one contestant."""

    seconds: float
    """Of a step, median."""
    peak_bytes: int
    losses: list[float]
    first_s: float
    """Of the first step, in which compiling falls."""


def small(workload: Workload) -> Workload:
    """The same in kind at toy size."""
    model = replace(workload.model, vocabulary=512, hidden=64, blocks=2, heads=4, kv_heads=2, feed_forward=128)
    return replace(workload, model=model, sequence=64, micro_batch=1)


def job_of(workload: Workload) -> JobConfig:
    """AdamW as torch's: one rate, decay on everything, no clipping."""
    config = workload.job("bf16", num_micro_batches=NUM_MICRO_BATCHES)
    return replace(config, optimizer=OptimizerConfig(clip_norm=None, decay_all=True),
                   learning_rate=LearningRateConfig(peak=3e-4, schedule="constant"),
                   metrics=MetricsConfig(peak_tflops=1.0),  # MFU is taken here, the trainer need not measure
                   train=replace(config.train, compile="inductor"))


def that_fits(workload: Workload, free_bytes: float) -> Workload:
    """With as many blocks as the plan's estimate lets be, at least one."""
    def fits(blocks: int) -> bool:
        found = replace(workload, model=replace(workload.model, blocks=blocks))
        return make_plan(job_of(found)).estimates[0].memory.total <= USABLE * free_bytes

    most = max((blocks for blocks in range(1, workload.model.blocks + 1) if fits(blocks)), default=1)
    return replace(workload, model=replace(workload.model, blocks=most))


@torch.no_grad()
def fill(parameters: dict[str, Tensor]) -> None:
    """The same values for the same names, drawn on the device: billions are slow to draw on the host."""
    for number, (_, parameter) in enumerate(sorted(parameters.items())):
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device=parameter.device) * STD)


class Ours:
    """Steps of our trainer."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        config = job_of(workload)
        plan = make_plan(config, device="gpu" if device.type == "cuda" else "cpu")
        loader: Any = OneBatch(plan, workload, 0)
        if device.type == "cuda":
            loader._share = [micro_batch.pinned() for micro_batch in loader._share]
        self._store = serve_store("127.0.0.1")
        self.trainer = Trainer(config, plan, 0, loader=loader, device=device)
        self.trainer.connect("127.0.0.1", self._store.port, 0)
        fill({f"{state.spec.name}.{name}": parameter.data for state in self.trainer.states.values()
              for name, parameter in state.parameters.items()})
        for state in self.trainer.states.values():
            state.master.copy_(state.own_weights)
        self.reports: list[StepReport] = []

    def step(self) -> float:
        """Mean loss."""
        self.reports.append(self.trainer.step(len(self.reports) + 1))
        return self.reports[-1].loss

    def close(self) -> None:
        self.trainer.close()


class Plain:
    """Steps of a loop that anyone would write."""

    def __init__(self, workload: Workload, device: torch.device, *, dtype: torch.dtype) -> None:
        config = job_of(workload)
        with device:
            module: Any = PlainStage(config, range(config.model.blocks + 2), dtype, filled=False)
        if config.model.tied_embeddings:
            module.layers[str(config.model.blocks + 1)].output.weight = module.layers["0"].tokens.weight
        fill(named_as_ours(module, tied=config.model.tied_embeddings))
        for index in range(1, config.model.blocks + 1):
            module.layers[str(index)].compile(fullgraph=True, dynamic=False)
        self._loss = torch.compile(summed_loss, dynamic=False)
        self._module, self._autocast = module, dtype == torch.float32
        self._device = device
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=config.learning_rate.peak, betas=(0.9, 0.95), eps=1e-8,
                                            weight_decay=config.optimizer.weight_decay, fused=True)
        tokens, targets = (part.to(device).split(workload.micro_batch) for part in workload.batch(NUM_MICRO_BATCHES))
        self._micro_batches, self._num_tokens = list(zip(tokens, targets, strict=True)), tokens[0].numel() * len(tokens)

    def step(self) -> float:
        """Mean loss. Read at the end of the step, as ours is."""
        losses = []
        for tokens, targets in self._micro_batches:
            with self._casting():
                loss = self._loss(self._module(tokens), targets) / self._num_tokens
            loss.backward()
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).sum())

    def _casting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext()

    def close(self) -> None:
        pass


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def named_as_ours(module: PlainStage, *, tied: bool) -> dict[str, Tensor]:
    """Parameters by our names."""
    last = str(len(module.layers) - 1)
    names = {"0": "embedding", last: "head", **{str(i): f"blocks.{i - 1}" for i in range(1, int(last))}}
    found = {f"{names[index]}.{name}": parameter.data for index, layer in module.layers.items()
             for name, parameter in layer.named_parameters()}
    if tied:
        del found["head.output.weight"]
        found["tied.tokens.weight"] = found.pop("embedding.tokens.weight")
    return found


def measure(step: Callable[[], float], device: torch.device, steps: int) -> Speed:
    clock, seconds, losses = clock_for(device), [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARMUP + steps):
        start = time.perf_counter()
        losses.append(step())
        clock.wait()
        seconds.append(time.perf_counter() - start)
    return Speed(seconds=statistics.median(seconds[WARMUP:]), peak_bytes=memory_in_use(device), losses=losses,
                 first_s=seconds[0])


def run(shape: str, is_small: bool, device: torch.device) -> dict[str, Any]:
    """Tables on the way; figures for the line of JSON."""
    workload, steps = SHAPES[shape], 2 if is_small else STEPS
    if is_small:
        workload = small(workload)
    elif shape == "8b" and device.type == "cuda":
        workload = that_fits(workload, torch.cuda.mem_get_info(device)[0])
    contestants: dict[str, Callable[[], Any]] = {
        "plain": lambda: Plain(workload, device, dtype=torch.float32),
        "plain_bf16": lambda: Plain(workload, device, dtype=torch.bfloat16), "ours": lambda: Ours(workload, device)}
    found: dict[str, Speed] = {}
    parts: dict[str, float] = {}
    for name, make in contestants.items():
        torch.compiler.reset()
        contestant = make()
        found[name] = measure(contestant.step, device, steps)
        if name == "ours":
            parts = step_parts(contestant.trainer, contestant.reports[WARMUP:], 2 if is_small else PART_REPEATS)
        contestant.close()
        del contestant
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return figures(shape, workload, found, parts, device)


def figures(shape: str, workload: Workload, found: dict[str, Speed], parts: dict[str, float],
            device: torch.device) -> dict[str, Any]:
    config = job_of(workload)
    spec = model_spec(config.model, config.train, 1)
    tokens, peak = config.train.global_batch * workload.sequence, peak_flops(device, "bf16")
    per_token = model_flops_per_token(spec, workload.sequence)
    print(f"{shape}: {spec.num_parameters / 1e9:.3f}B parameters, {config.model.blocks} blocks, {tokens} tokens a step, "
          f"peak {'not known' if peak is None else f'{peak / 1e12:.3g} TFLOP/s'}")
    figure: dict[str, Any] = {f"blocks_{shape}": config.model.blocks}
    for name, speed in found.items():
        rate = tokens / speed.seconds
        mfu = None if peak is None else model_flops_utilization(per_token, tokens_per_s=rate, num_ranks=1, peak_flops=peak)
        print(f"  {name:12s} {rate:12,.0f} tokens/s  MFU {'not known' if mfu is None else f'{mfu:.1%}'}  peak memory "
              f"{speed.peak_bytes / 2**30:.1f} GiB  first step {speed.first_s:.1f} s  loss {speed.losses[-1]:.4f}")
        figure |= {f"{name}_tokens_per_s_{shape}": round(rate, 1),
                   f"{name}_mfu_{shape}": None if mfu is None else round(mfu, 4),
                   f"{name}_peak_gib_{shape}": round(speed.peak_bytes / 2**30, 2)}
    print("\n" + table({"ours": parts}) + "\n", flush=True)
    fastest = min(found[name].seconds for name in ("plain", "plain_bf16"))
    off = max(abs(own / other - 1) for own, other in zip(found["ours"].losses[:3], found["plain"].losses[:3], strict=True))
    return {**figure, f"ratio_vs_plain_{shape}": round(fastest / found["ours"].seconds, 4), f"loss_difference_{shape}": off,
            f"compile_s_{shape}": round(found["ours"].first_s - found["ours"].seconds, 1),
            f"parts_ms_{shape}": {name: round(seconds * 1e3, 2) for name, seconds in parts.items()}}


def main() -> None:
    run_on_gpu(__doc__, "shape", list(SHAPES), run)


if __name__ == "__main__":
    main()
