"""What the driver costs with thousands of ranks: the real controller, fleet and Ray calls; ranks are simulated, many in a
process, without torch. A simulated rank is asked as a real one is and answers what one would after steps of `--step-s`.

Per mesh: processor time of the driver for a rank and step, over leases of 20 steps that begin and end within the window;
what that is of a step of 10 s; memory; processor time of starting, for a rank; operations on the rendezvous store, for a
rank, counted on real gloo groups of up to 16 members and drawn on by size. Prints a table and one line of JSON:
`driver_us_per_rank_step`, `driver_share_4096`, `driver_memory_bytes`, `start_us_per_rank`, `store_operations_per_rank`.

    python benchmarks/scale.py [--quick]
"""

import argparse
import io
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RebalanceConfig, RunConfig, TrainConfig
from raytrain3d.gang.actor import Request
from raytrain3d.gang.controller import Controller, Job
from raytrain3d.gang.fleet import Fleet, Limits
from raytrain3d.gang.handle import FixedGangs, Leader
from raytrain3d.gang.ray_cluster import OWN_ENVIRONMENT
from raytrain3d.gang.ray_rank import RayRank
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import LeaseEnd, LeaseRequest, NodeFacts
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.progress import make_progress
from raytrain3d.metrics.records import Records
from raytrain3d.metrics.summary import StepSummary
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.placement import RankPlace
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.rank_program import channels_of
from raytrain3d.train.report import StepReport, merge_reports

LEASE = 20
STEP_S = 10.0
"""Of the step whose share is told."""
HOSTS = 4
"""Processes of simulated ranks."""


def job(mesh: Mesh, directory: str, leases: int) -> JobConfig:
    """A 32-block model, 2 micro-batches for each stage."""
    return JobConfig(
        run=RunConfig(name="scale", directory=directory), data=DataConfig(path=directory),
        model=ModelConfig(vocabulary=512, hidden=64, blocks=4 * mesh.pipeline, heads=mesh.tensor,
                          feed_forward=64 * mesh.tensor),
        mesh=MeshConfig(data=mesh.data, pipeline=mesh.pipeline, tensor=mesh.tensor),
        rebalance=RebalanceConfig(mode="advise"),  # decisions are the driver's work; ranks that sleep have nothing to move
        train=TrainConfig(steps=LEASE * leases, global_batch=2 * mesh.pipeline * mesh.data, sequence=16, lease=LEASE))


@ray.remote(num_cpus=0, max_concurrency=100_000)
class Host:
    """Ranks of some gangs. What is asked of a rank comes as for a real one, with its number; they train by sleeping."""

    def __init__(self, plan: Plan, step_s: float) -> None:
        self._plan, self._step_s = plan, step_s
        self._begun: dict[int, tuple[int, int, float]] = {}
        """By replica: first and last step of its lease, and when it began."""

    async def call(self, request: Request, rank: int) -> Any:
        method, *_ = request
        if method.__name__ == "facts":
            return NodeFacts(rank=rank, host="host", address="127.0.0.1", device="cpu", cpu_model="", process=os.getpid())
        return None

    async def device_index(self) -> None:
        """They have no GPU."""

    async def train_gang(self, lease: LeaseRequest, replica: int) -> LeaseEnd:
        """As the first rank of a gang does it."""
        import asyncio
        self._begun[replica] = (lease.first, lease.last, time.monotonic())
        await asyncio.sleep((lease.last - lease.first + 1) * self._step_s)
        return LeaseEnd(step=lease.last, stopped=False)

    async def gather(self, after: int, replica: int) -> list[StepReport]:
        """As the first rank of a gang does it."""
        ranks = self._plan.mesh.gang(replica)
        reports = [report for rank in ranks for report in self._reports(rank, after, *self._begun.get(replica, (1, 0, 0.0)))]
        return merge_reports(reports, len(ranks), self._plan.mesh.tensor)

    def _reports(self, rank: int, after: int, first: int, last: int, begun: float) -> list[StepReport]:
        done = min(last, first - 1 + int((time.monotonic() - begun) / self._step_s))
        layers = dict.fromkeys(self._plan.layers_of(self._plan.mesh.coordinate(rank).pipeline), 0.01)
        return [StepReport(step=step, rank=rank, loss=5.0, tokens=1000, gradient_norm=1.0, learning_rate=1e-3,
                           seconds=self._step_s, compute_s=0.8 * self._step_s, data_wait_s=0.0, receive_wait_s=0.1,
                           reduce_wait_s=0.0, commit_wait_s=0.0, optimizer_s=0.01, layer_forward_s=layers,
                           layer_backward_s=layers) for step in range(max(first, after + 1), done + 1)]


class SimulatedRank(RayRank):
    """Asked as a real one; several share a process."""

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._future(self.actor.call.remote((method, args, kwargs), self.rank))

    ask = call


class SimulatedGang:
    """One replica on a host."""

    def __init__(self, plan: Plan, replica: int, host: Any) -> None:
        leader = Leader(tuple(plan.mesh.gang(replica)),
                        train=lambda lease: self.ranks[0]._future(host.train_gang.remote(lease, replica)),
                        reports=lambda after: self.ranks[0]._future(host.gather.remote(after, replica)))
        self.ranks = tuple(SimulatedRank(host, RankPlace(rank=rank, bundle=0, node=f"node-{replica}"), leader)
                           for rank in leader.ranks)

    def replace(self, rank: int, plan: Plan) -> None:
        raise AssertionError(f"simulated rank {rank} was lost")

    def kill(self) -> None:
        pass


class Done(Exception):
    """The last step was told. Ends a job before it saves: simulated ranks have nothing to save."""


class MarkedJournal(Journal):
    """Notes the driver's processor time at every step that it has been told."""

    def __init__(self, progress: Any, records: Records, last: int) -> None:
        super().__init__(progress, records)
        self.marks: dict[int, float] = {}
        self._last = last

    def step(self, summary: StepSummary, **values: Any) -> None:
        super().step(summary, **values)
        self.marks[summary.step] = time.process_time()
        if summary.step == self._last:
            raise Done


class NoStore:
    port = 1


def drive(mesh: Mesh, leases: int, step_s: float) -> dict[str, float]:
    """One job. The window begins after the first lease, and holds whole ones."""
    with tempfile.TemporaryDirectory(prefix="rt3d-") as directory:
        config = job(mesh, directory, leases)
        plan = make_plan(config)
        hosts = [Host.remote(plan, step_s) for _ in range(HOSTS)]
        gangs = [SimulatedGang(plan, replica, hosts[replica % HOSTS]) for replica in range(mesh.data)]
        stop, records = StopFlag(), Records(Path(directory, "records"))
        journal = MarkedJournal(make_progress(io.StringIO(), config.train.steps), records, config.train.steps)
        task = Job(config=config, plan=plan, directory=directory, data=None, store_host="127.0.0.1",
                   serve_store=lambda host, port: NoStore(), check_nodes=lambda nodes: None, keep_plan=lambda plan: None)
        before = time.process_time()
        fleet = Fleet(FixedGangs(gangs), stop, replace(Limits(), hang_s=600))
        with suppress(Done):
            Controller(task, fleet, stop=stop, mailboxes=(), journal=journal).run()
        records.close()
        for host in hosts:
            ray.kill(host)
    steps = LEASE * (leases - 1)
    used = (journal.marks[LEASE * leases] - journal.marks[LEASE]) / steps
    return {"us_per_rank_step": used / mesh.size * 1e6, "share": used / STEP_S,
            "start_us_per_rank": (journal.marks[1] - before) / mesh.size * 1e6,
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


# The rendezvous store


def group_sizes(mesh: Mesh, rank: int) -> list[int]:
    """Members of each process group that a rank makes (parallel/groups.py), 1F1B, nothing sharded."""
    at = mesh.coordinate(rank)
    is_end = at.pipeline in (0, mesh.pipeline - 1) and mesh.pipeline > 1
    channels = [2 for channel in channels_of(range(mesh.pipeline)) if at.pipeline in (channel.sender, channel.receiver)]
    sizes = [mesh.tensor, mesh.data, mesh.pipeline * mesh.tensor, *([2] if is_end else []), *channels]
    return [size for size in [*sizes, *([mesh.data] if at.pipeline == at.tensor == 0 else [])] if size > 1]


def counted_operations(size: int) -> float:
    """Operations on the store for a member of a gloo group of `size`: each makes its part in a thread of its own."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore, Store

    inner, counts, lock = HashStore(), Counter[str](), threading.Lock()

    class Counting(Store):
        """Every operation goes to one store and is counted."""

    def counting(name: str) -> Callable[..., Any]:
        def operation(self: Any, *arguments: Any) -> Any:
            with lock:
                counts[name] += 1
            return getattr(inner, name)(*arguments)
        return operation

    for name in ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "append", "multi_get", "multi_set"):
        setattr(Counting, name, counting(name))
    Counting.has_extended_api = lambda self: False
    stores = [Counting() for _ in range(size)]
    with ThreadPoolExecutor(size) as threads:
        made = list(threads.map(lambda index: dist.ProcessGroupGloo(stores[index], index, size, timedelta(seconds=60)),
                                range(size)))
    del made
    return sum(counts.values()) / size


def store_operations(mesh: Mesh) -> float:
    """Mean over all ranks: what a member does grows with its group's size by a straight line, whose ends are counted."""
    small, large = 2, 16
    first, last = counted_operations(small), counted_operations(large)
    slope = (last - first) / (large - small)
    return statistics.mean(sum(first + slope * (size - small) for size in group_sizes(mesh, rank))
                           for rank in range(mesh.size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 ranks, short steps: whether it runs")
    parser.add_argument("--step-s", type=float, default=2.0, help="length of a simulated step (default: 2)")
    parser.add_argument("--leases", type=int, default=3, help="leases of 20 steps, the first of which is not counted")
    arguments = parser.parse_args()
    meshes = [Mesh(data=2, pipeline=4, tensor=2)] if arguments.quick else [
        Mesh(data=16, pipeline=8, tensor=8), Mesh(data=64, pipeline=8, tensor=8)]
    os.environ.update(OWN_ENVIRONMENT, PYTHONPATH=os.pathsep.join(filter(None, [
        str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])))
    figures: dict[str, Any] = {}
    print(f"{'ranks':>6}  {'us/rank/step':>12}  {'share of 10 s':>13}  {'memory MiB':>10}  {'start us/rank':>13}  "
          "store ops/rank")
    with tempfile.TemporaryDirectory(prefix="rt3d-", ignore_cleanup_errors=True) as directory:
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                 object_store_memory=100 * 2**20, _temp_dir=directory)
        for mesh in meshes:
            seen = drive(mesh, 2 if arguments.quick else arguments.leases, 0.1 if arguments.quick else arguments.step_s)
            seen["store_operations"] = store_operations(mesh)
            print(f"{mesh.size:6}  {seen['us_per_rank_step']:12.1f}  {seen['share']:13.2%}  "
                  f"{seen['memory_bytes'] / 2**20:10.0f}  {seen['start_us_per_rank']:13.0f}  "
                  f"{seen['store_operations']:.1f}", flush=True)
            figures |= {f"driver_us_per_rank_step_{mesh.size}": round(seen["us_per_rank_step"], 2),
                        f"driver_share_{mesh.size}": round(seen["share"], 5),
                        "driver_us_per_rank_step": round(seen["us_per_rank_step"], 2),
                        "driver_memory_bytes": int(seen["memory_bytes"]),
                        "start_us_per_rank": round(seen["start_us_per_rank"]),
                        "store_operations_per_rank": round(seen["store_operations"], 1)}
        ray.shutdown()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
