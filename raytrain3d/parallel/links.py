"""Latency and bandwidth of a rank's links, as `raytrain3d check` shows them.

All ranks measure at once and in one order: the tensor group, the data group, then the channels.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from raytrain3d.parallel.groups import Group, Groups

REPEATS = 20
SMALL, LARGE = 256, 1 << 20
"""Elements of the two messages, in FP32."""


def measure_links(groups: Groups, device: torch.device) -> dict[str, float]:
    """`<link> latency_ms` and `<link> MB/s` for every link of this rank (message bytes over seconds)."""
    found: dict[str, float] = {}
    for name, group in (("tensor all-reduce", groups.tensor), ("data all-reduce", groups.data)):
        if group.size > 1:
            found |= _measure(name, lambda tensor, group=group: group.reduce(tensor), device)  # type: ignore[misc]
    for channel, group in groups.channels.items():
        found |= _measure(f"channel {channel}", lambda tensor, group=group: _hop(group, tensor), device)  # type: ignore[misc]
    return found


def _hop(group: Group, tensor: Tensor) -> None:
    (group.send(tensor, 1) if group.index == 0 else group.receive(tensor, 0)).wait()


def _measure(name: str, action: Callable[[Tensor], None], device: torch.device) -> dict[str, float]:
    seconds = {}
    for size in (SMALL, LARGE):
        tensor = torch.zeros(size, device=device)
        action(tensor)
        start = time.perf_counter()
        for _ in range(REPEATS):
            action(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[size] = (time.perf_counter() - start) / REPEATS
    return {f"{name} latency_ms": seconds[SMALL] * 1e3, f"{name} MB/s": LARGE * 4 / seconds[LARGE] / 1e6}
