"""What saving and loading cost, on 2 ranks of a pipeline whose weights and moments are saved in FP32.

| figure                | what                                                                                        |
|-----------------------|---------------------------------------------------------------------------------------------|
| `stall_ratio`         | pause of an asynchronous save over the time of a synchronous one                            |
| `stall_vs_dcp`        | that pause over the one of torch.distributed.checkpoint.async_save (`_reused`: with a stager |
|                       | that is kept between saves)                                                                 |
| `save_drag`           | mean step while a save is being written over mean step without                              |
| `write_vs_torch_save` | rate of a synchronous save, checksums included, over torch.save of the same tensors; both end |
|                       | with fsync                                                                                  |
| `reshard_vs_dcp`      | loading at tensor 2 what pipeline 2 has saved, checksums verified, over DCP doing the same  |

Everything takes turns within a round. Prints a table and one line of JSON.

    python benchmarks/checkpoint.py [--quick]
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Place, figure, ratios, spawn, timed
from language_model import Workload
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from raytrain3d.checkpoint.layout import Piece
from raytrain3d.checkpoint.store import commit, read_into
from raytrain3d.config import JobConfig, MeshConfig, ModelConfig
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.model.transformer import build_layers
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.plan import make_plan
from raytrain3d.train.holding import Holding
from raytrain3d.train.trainer import Trainer

GIB = 2**30
FULL = Workload(model=ModelConfig(vocabulary=32768, hidden=1024, blocks=20, heads=16, feed_forward=2816), sequence=64,
                micro_batch=1)
"""324M parameters: 3.6 GiB with both moments."""
QUICK = Workload(model=replace(FULL.model, vocabulary=8192, hidden=256, blocks=4, heads=4, feed_forward=704), sequence=64,
                 micro_batch=1)
"""7M parameters; its figures mean little."""
STEPS = 3
"""Without a save, before and after each save behind the training."""


class FixedBatch:
    """The same two micro-batches every step."""

    def __init__(self, workload: Workload) -> None:
        tokens, targets = workload.batch(2)
        self._batches = [MicroBatch(tokens=tokens[i : i + 1], targets=targets[i : i + 1], samples=(i,)) for i in range(2)]

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return self._batches

    def close(self) -> None:
        pass


@dataclass
class Times:
    """Seconds of one rank, by what was done; a value for each round."""

    pause: list[float]
    dcp_pause: list[float]
    dcp_reused_pause: list[float]
    synchronous: list[float]
    torch_save: list[float]
    steps: list[float]
    steps_while_saving: list[float]
    load: list[float]
    dcp_load: list[float]
    num_bytes: int = 0
    peak_bytes: int = 0
    """Most memory the process had, before DCP did anything."""


class Rank:
    """One rank that trains and saves; every method is called by all ranks together."""

    def __init__(self, place: Place, workload: Workload, directory: Path) -> None:
        self._place, self._directory, self._workload = place, directory, workload
        self._config = workload.job(num_micro_batches=2, mesh=MeshConfig(pipeline=2))
        self._trainer = Trainer(self._config, make_plan(self._config), place.rank, loader=FixedBatch(workload))  # type: ignore[arg-type]
        self._trainer.connect("127.0.0.1", place.port, 0)
        self._trainer.initialize()
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._step = 0
        self.times = Times(*([] for _ in range(9)))

    def save_round(self) -> None:
        """One value more for everything but loading. Leaves the checkpoints `ours` and `dcp`."""
        times, tensors = self.times, self._tensors()
        times.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        steps = [self._timed_step() for _ in range(STEPS)]
        times.pause.append(self._trainer.save(self._fresh("ours"), self._step, behind=True).pause_s)
        times.steps_while_saving.append(statistics.mean(self._steps_until_written()))
        times.steps.append(statistics.mean(steps + [self._timed_step() for _ in range(STEPS)]))
        times.synchronous.append(_seconds(lambda: self._save_and_wait("ours")))
        times.peak_bytes = times.peak_bytes or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        times.torch_save.append(_seconds(lambda: _torch_save(tensors, self._fresh("torch") + f"-{self._place.rank}")))
        times.dcp_reused_pause.append(self._dcp_pause(tensors, self._stager))
        times.dcp_pause.append(self._dcp_pause(tensors, None))

    def stop_training(self) -> None:
        """Frees what training held, and the store's connections."""
        self._trainer.close()
        del self._trainer

    def load_round(self) -> None:
        config = self._workload.job(num_micro_batches=2, mesh=MeshConfig(tensor=2))
        holding = _holding(config, self._place.rank)
        pieces = [piece for state in holding.states.values() for piece in state.pieces()]
        sharded = _as_dtensors(config, pieces)
        for seconds, load in ((self.times.load, lambda: read_into(str(self._directory / "ours"), pieces)),
                              (self.times.dcp_load, lambda: dcp.load(sharded, checkpoint_id=self._directory / "dcp"))):
            self._read_through()
            seconds.append(_seconds(load))

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{piece.name}/{piece.kind}": piece.tensor for state in self._trainer.states.values()
                for piece in state.saved_pieces()}

    def _timed_step(self) -> float:
        self._step += 1
        start, end = timed(lambda: self._trainer.step(self._step))  # type: ignore[arg-type,return-value]
        return end - start

    def _steps_until_written(self) -> list[float]:
        found = []
        while True:
            found.append(self._timed_step())
            written = torch.tensor(int(self._trainer.save_progress().receipt is not None))
            dist.all_reduce(written, dist.ReduceOp.MIN)
            if written:
                return found

    def _save_and_wait(self, name: str) -> None:
        self._trainer.save(self._fresh(name), self._step, behind=False)
        while (receipt := self._trainer.save_progress().receipt) is None:
            time.sleep(0.005)
        receipts: list[Any] = [None] * self._place.num_ranks
        dist.all_gather_object(receipts, receipt)
        if self._place.rank == 0:
            commit(str(self._directory / name), self._step, receipts, config=self._config)
        dist.barrier()

    def _dcp_pause(self, tensors: dict[str, Tensor], stager: DefaultStager | None) -> float:
        place = self._fresh("dcp")
        dist.barrier()
        start = time.perf_counter()
        future: Any = dcp.async_save(tensors, checkpoint_id=place, async_stager=stager)
        pause = time.perf_counter() - start
        future.result()
        return pause

    def _fresh(self, name: str) -> str:
        """Path of a checkpoint that is not there; what is written to the disk of earlier ones is over."""
        dist.barrier()
        if self._place.rank == 0:
            for path in self._directory.glob(f"{name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()
        return str(self._directory / name)

    def _read_through(self) -> None:
        """So that both checkpoints come from memory."""
        for path in sorted(self._directory.rglob("*"))[self._place.rank :: self._place.num_ranks]:
            with path.open("rb") if path.is_file() else open(os.devnull, "rb") as file:
                while file.read(1 << 24):
                    pass


def _seconds(act: Callable[[], object]) -> float:
    """Until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - start


def _torch_save(tensors: dict[str, Tensor], path: str) -> None:
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _holding(config: JobConfig, rank: int) -> Holding:
    plan = make_plan(config)
    spec = model_spec(config.model, config.train, plan.mesh.tensor)
    return Holding(config, spec, plan, plan.mesh.coordinate(rank), torch.device("cpu"), build_layers)


def _as_dtensors(config: JobConfig, pieces: Sequence[Piece]) -> dict[str, DTensor]:
    """The same memory as DCP wants it, to load the parts of one rank."""
    mesh = init_device_mesh("cpu", (config.mesh.tensor,))
    spec = model_spec(config.model, config.train, config.mesh.tensor)
    params = {f"{state.name}.{param.name}": param for state in spec.states for param in state.params}
    found = {}
    for piece in pieces:
        split = params[piece.name].split
        placement = Replicate() if split is None else Shard(split)
        found[f"{piece.name}/{piece.kind}"] = DTensor.from_local(piece.tensor, mesh, [placement], run_check=False)
    return found


def measure(place: Place, workload: Workload, rounds: int, directory: str) -> Times:
    """What one rank does; the first round is not counted."""
    rank = Rank(place, workload, Path(directory))
    for _ in range(1 + rounds):
        rank.save_round()
    rank.stop_training()
    for _ in range(1 + rounds):
        rank.load_round()
    return rank.times


def figures(ranks: Sequence[Times]) -> dict[str, Any]:
    def slowest(name: str) -> list[float]:
        return [max(values) for values in zip(*(getattr(rank, name)[1:] for rank in ranks), strict=True)]

    times = {name: slowest(name) for name in ("pause", "dcp_pause", "dcp_reused_pause", "synchronous", "torch_save", "steps",
                                              "steps_while_saving", "load", "dcp_load")}
    for name, values in times.items():
        print(f"{name.replace('_', ' '):20s} {statistics.median(values):9.3f} s")
    size, peak = sum(rank.num_bytes for rank in ranks), sum(rank.peak_bytes for rank in ranks)
    print(f"{'saved':20s} {size / GIB:9.3f} GiB\n{'peak host memory':20s} {peak / GIB:9.3f} GiB on all ranks")
    return {
        **figure("stall_ratio", ratios(times["pause"], times["synchronous"])),
        **figure("stall_vs_dcp", ratios(times["pause"], times["dcp_pause"])),
        **figure("stall_vs_dcp_reused", ratios(times["pause"], times["dcp_reused_pause"])),
        **figure("save_drag", ratios(times["steps_while_saving"], times["steps"])),
        **figure("write_vs_torch_save", ratios(times["torch_save"], times["synchronous"])),
        **figure("reshard_vs_dcp", ratios(times["load"], times["dcp_load"])),
        "saved_gib": round(size / GIB, 3), "peak_host_gib": round(peak / GIB, 3), "rounds": len(times["pause"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute; the figures then mean little")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", help="where to save (default: the directory for temporary files)")
    arguments = parser.parse_args()
    workload, rounds = (QUICK, 2) if arguments.quick else (FULL, arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        ranks = spawn(measure, 2, workload, rounds, directory)
    print(json.dumps(figures(ranks)))


if __name__ == "__main__":
    main()
