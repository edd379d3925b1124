"""What ranks on GPUs do to communicate, as far as one GPU shows it, without Ray.

`alone`: a communicator of NCCL with one member does every collective, is aborted and made again; then every schedule runs on
the GPU and on the CPU. `shared`: four ranks (2 replicas x 2 stages) share the GPU by `network.transport: gloo`: losses
against the CPU, the wait for the commit, and a rank that leaves in the middle of a step: how long until the others wake, and
until all have groups again.

`--small` runs every line on any machine at toy size: the device is then the CPU, and gloo takes NCCL's place.

    python benchmarks/nccl.py [--small] [--only PART]
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from common import Place, run_on_gpu, spawn
from language_model import FULL, QUICK, Workload
from pipeline_mesh import OneBatch, mesh_job

from raytrain3d.config import JobConfig, MeshConfig
from raytrain3d.parallel.groups import Link, join_store, serve_store
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.schedule import SCHEDULES
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

LIMIT_S = 60.0
STEPS = 4
CHUNKED = ("interleaved", "breadth_first", "zb_v")
MESH = MeshConfig(data=2, pipeline=2)
LEAVES = 3
"""The rank that leaves."""


def alone(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Collectives are checked against what they must give for one member."""
    store, transport = serve_store("127.0.0.1"), "auto" if device.type == "cuda" else "gloo"
    made_s, aborted_s = [], []
    for generation in range(3):
        start = time.perf_counter()
        backend = Link(join_store("127.0.0.1", store.port, LIMIT_S), generation, LIMIT_S, transport).backend(
            "alone", 0, 1, "gpu")
        try_collectives(backend, device)
        made_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        backend.abort()
        del backend
        aborted_s.append(time.perf_counter() - start)
    off = max(schedule_difference(workload, schedule, device) for schedule in SCHEDULES)
    print(f"alone: a communicator with its first collectives took {min(made_s):.3f} s, its abort {min(aborted_s):.3f} s; "
          f"losses of {len(SCHEDULES)} schedules differ from the CPU's by {off:.1e}", flush=True)
    return {"communicator_s": round(min(made_s), 4), "abort_s": round(min(aborted_s), 4), "schedule_difference": off}


def try_collectives(backend: Any, device: torch.device) -> None:
    """AssertionError when one gives anything but its input."""
    values = torch.arange(8.0, device=device)
    for kind in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        options, tensor = dist.AllreduceOptions(), values.clone()
        options.reduceOp = dist.ReduceOp(kind)
        backend.allreduce([tensor], options).wait()
        assert torch.equal(tensor, values), kind
    for collective in (backend._reduce_scatter_base, backend._allgather_base):
        tensor = torch.empty_like(values)
        collective(tensor, values).wait()
        assert torch.equal(tensor, values), collective


def schedule_difference(workload: Workload, schedule: str, device: torch.device) -> float:
    """Relative, of losses on the device from those on the CPU."""
    config = mesh_job(workload, MeshConfig())
    chunks = 2 if schedule in CHUNKED else 1
    config = replace(config, pipeline=replace(config.pipeline, schedule=schedule, chunks=chunks))  # type: ignore[arg-type]
    found, expected = (losses_alone(config, workload, each) for each in (device, torch.device("cpu")))
    return furthest(found, expected)


def losses_alone(config: JobConfig, workload: Workload, device: torch.device) -> list[float]:
    store = serve_store("127.0.0.1")
    trainer = new_trainer(config, workload, 0, device)
    trainer.connect("127.0.0.1", store.port, 0)
    trainer.initialize()
    losses = [trainer.step(n).loss for n in range(1, STEPS + 1)]
    trainer.close()
    return losses


def new_trainer(config: JobConfig, workload: Workload, rank: int, device: torch.device, plan_for: str = "cpu") -> Trainer:
    """plan_for: `gpu` gives groups of devices, whatever the device is."""
    plan = make_plan(config, device="gpu" if device.type == "cuda" else plan_for)
    loader: Any = OneBatch(plan, workload, plan.mesh.coordinate(rank).data)
    return Trainer(config, plan, rank, loader=loader, device=device)


def furthest(found: list[float], expected: list[float]) -> float:
    return max(abs(own / other - 1) for own, other in zip(found, expected, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What one rank saw."""

    difference: float
    commit_share: float
    """Share of a step that was spent waiting for the commit, median."""
    left_at: float
    """When the rank that leaves did so, by the clock of all processes of the machine; 0 for others."""
    woke_at: float
    rebuilt_s: float


def share(place: Place, workload: Workload, device_name: str) -> Shared:
    config = mesh_job(workload, MESH)
    config = replace(config, network=replace(config.network, transport="gloo", timeout_s=300.0))
    expected = [report.loss for report in reports_of(config, workload, place, torch.device("cpu"), 0, close=True)[1]]
    trainer, reports = reports_of(config, workload, place, torch.device(device_name), 1, close=False)
    left_at = woke_at = 0.0
    dist.barrier()
    if place.rank == LEAVES:
        left_at = time.perf_counter()
    else:
        assert fails(lambda: trainer.step(STEPS + 1)), "a step without one of the ranks cannot end"
        woke_at = time.perf_counter()
    trainer.abort()
    trainer.disconnect()
    dist.barrier()
    start = time.perf_counter()
    trainer.connect("127.0.0.1", place.port, 2)
    trainer.stand_at(STEPS)
    rebuilt_s = time.perf_counter() - start
    losses = [*(report.loss for report in reports), trainer.step(STEPS + 1).loss]
    trainer.close()
    waits = [report.commit_wait_s / report.seconds for report in reports[1:]]
    return Shared(difference=furthest(losses, expected), commit_share=statistics.median(waits), left_at=left_at,
                  woke_at=woke_at, rebuilt_s=rebuilt_s)


def reports_of(config: JobConfig, workload: Workload, place: Place, device: torch.device, generation: int, *,
               close: bool) -> tuple[Trainer, list[StepReport]]:
    """Steps of this rank among the others; one step more if the trainer is closed after them."""
    trainer = new_trainer(config, workload, place.rank, device, "cpu" if close else "gpu")
    trainer.connect("127.0.0.1", place.port, generation)
    trainer.initialize()
    reports = [trainer.step(n) for n in range(1, STEPS + 1 + close)]
    if close:
        trainer.close()
    return trainer, reports


def fails(step: Callable[[], object]) -> bool:
    """Whether it ended by an error. No reference to the error, and so to what was under way, stays."""
    try:
        step()
    except (RuntimeError, ConnectionError):
        return True
    return False


def shared(workload: Workload, device: torch.device) -> dict[str, Any]:
    ranks = spawn(share, MESH.replicas * MESH.pipeline, workload, str(device))
    left_at = ranks[LEAVES].left_at
    woke_s = max(rank.woke_at - left_at for rank in ranks if rank.woke_at)
    off, commit = max(rank.difference for rank in ranks), max(rank.commit_share for rank in ranks)
    rebuilt_s = max(rank.rebuilt_s for rank in ranks)
    print(f"shared: losses of {len(ranks)} ranks differ from the CPU's by {off:.1e}; the commit took up to {commit:.1%} of "
          f"a step; all woke {woke_s:.3f} s after one had left and had groups again in {rebuilt_s:.3f} s", flush=True)
    return {"shared_difference": off, "commit_wait_share": round(commit, 4), "wake_s": round(woke_s, 4),
            "rebuild_s": round(rebuilt_s, 4)}


PARTS = {"alone": alone, "shared": shared}


def run(part: str, is_small: bool, device: torch.device) -> dict[str, Any]:
    return PARTS[part](QUICK if is_small else FULL, device)


def main() -> None:
    run_on_gpu(__doc__, "part", list(PARTS), run)


if __name__ == "__main__":
    main()
