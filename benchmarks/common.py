"""What the benchmarks share: statistics of interleaved runs, ranks as plain processes, and steps timed over all ranks.

Contestants take turns, so that a slow minute of the machine hits all of them; a ratio is taken within a round, and the
median of the ratios is what counts.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from raytrain3d.parallel.groups import join_store, serve_store

TIMEOUT_S = 600.0
"""Longest wait for another rank."""

Step = Callable[[], None]
Span = tuple[float, float]
"""Start and end of a step on one rank, by the clock that all processes of a machine share."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Narrowest interval between two values, equally far from both ends, that holds the median with at least 90 %: how
    many of n values lie below it is binomial. Below 5 values the lowest and the highest, which hold it less often."""
    ordered, n = sorted(values), len(values)
    at_most = accumulate(math.comb(n, below) / 2**n for below in range(n))
    left_out = max(0, sum(2 * tail <= 0.1 for tail in at_most) - 1)
    return ordered[left_out], ordered[n - 1 - left_out]


def figure(key: str, values: Sequence[float]) -> dict[str, Any]:
    """Median and 90 % interval under `key` and `<key>_interval_90`, for the line of JSON."""
    return {key: round(statistics.median(values), 4), f"{key}_interval_90": [round(value, 4) for value in interval(values)]}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours / theirs, round by round."""
    return [own / other for own, other in zip(ours, theirs, strict=True)]


def means(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Of the two runs of a contestant that ran twice a round, round by round."""
    return [statistics.mean(pair) for pair in zip(first, second, strict=True)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among the ranks of a benchmark, and the port of their store."""

    rank: int
    num_ranks: int
    port: int


def spawn(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """function(place, *arguments) in a process of its own for each rank, one torch thread each, in one gloo group.

    Returns the results in rank order; RuntimeError with the rank's traceback when one fails.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context, store = multiprocessing.get_context("spawn"), serve_store("127.0.0.1")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [context.Process(target=_serve, args=(Place(rank, num_ranks, store.port), sender, function, arguments))
                 for rank, (_, sender) in enumerate(pipes)]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()  # so that the end of the process is seen on the pipe
    try:
        return _collect([receiver for receiver, _ in pipes])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: Sequence[Connection]) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        for pipe in multiprocessing.connection.wait(list(waiting)):
            rank = waiting[pipe]  # type: ignore[index]
            fine, value = pipes[rank].recv()
            if not fine:
                raise RuntimeError(f"rank {rank}:\n{value}")
            found[rank] = value
    return [found[rank] for rank in range(len(pipes))]


def _serve(place: Place, answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        store = join_store("127.0.0.1", place.port, TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.num_ranks)
        answer.send((True, function(place, *arguments)))
    except Exception:  # noqa: BLE001  whatever ends a rank is shown where the benchmark was started
        answer.send((False, traceback.format_exc()))


def timed(step: Step) -> Span:
    """One step that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return start, time.perf_counter()


def take_turns(contestants: Mapping[str, Step], rounds: int, *, warmup: int = 1) -> dict[str, list[Span]]:
    """Every contestant once a round, in the given order; the first `warmup` rounds are not counted. Called by every rank
    with the same names."""
    found: dict[str, list[Span]] = {name: [] for name in contestants}
    for number in range(warmup + rounds):
        for name, step in contestants.items():
            span = timed(step)
            if number >= warmup:
                found[name].append(span)
    return found


def two_over_one(place: Place, seconds: float = 1.0) -> float:
    """How much the first two ranks multiply together over what one does alone: 2 on cores of their own, little more than 1
    where they are threads of one core; then time that one rank idles is not lost, and a schedule that fills it gains
    little. Every rank calls it; the value is rank 0's, others return what they saw."""
    a, b = torch.ones(256, 256), torch.ones(256, 1024)

    def rate(turn: Sequence[int]) -> float:
        dist.barrier()
        count, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds and place.rank in turn:
            a @ b
            count += 1
        dist.barrier()
        return count / seconds

    alone, together = rate([0]), rate([0, 1])
    return 2 * together / alone if alone else 1.0


def wall_times(ranks: Sequence[Mapping[str, Sequence[Span]]]) -> dict[str, list[float]]:
    """Seconds of every contestant's steps, from what `take_turns` returned on each rank: first start to last end."""
    return {name: [max(end for _, end in spans) - min(start for start, _ in spans)
                   for spans in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def run_on_gpu(doc: str | None, kind: str, parts: Sequence[str],
               run: Callable[[str, bool, torch.device], dict[str, Any]]) -> None:
    """The command line of a benchmark for one GPU: all of `parts`, or the one that --only names; --small runs them at toy
    size on any machine. kind: what a part is called. run(part, small, device) gives figures for the line of JSON."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy size, on any machine; the figures then mean nothing")
    parser.add_argument("--only", choices=parts, help=f"one {kind} (default: all)")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        parser.error("there is no GPU here: --small runs it at toy size on a CPU")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    for part in [arguments.only] if arguments.only else parts:
        found |= run(part, arguments.small, device)
    print(json.dumps(found))
