"""What a rank's device reaches at most, for model FLOPs utilization: of a GPU by data sheet, of a CPU as it is measured."""

import time
from functools import lru_cache

import torch

from raytrain3d.parallel.layer_state import DTYPES
from raytrain3d.plan.device_peak import data_sheet_flops

SIZE = 512
LEAST_TRIES, MEASURED_S = 3, 0.05


@lru_cache
def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOPs a second in `dtype` (`train.dtype`). None for a GPU that the catalogue does not know."""
    if device.type == "cuda":
        return data_sheet_flops(torch.cuda.get_device_name(device), dtype)
    return measured_flops(DTYPES[dtype])


def measured_flops(dtype: torch.dtype) -> float:
    """Of the fastest of several matrix products, by the threads that torch has here."""
    a, out = torch.ones(SIZE, SIZE, dtype=dtype), torch.empty(SIZE, SIZE, dtype=dtype)
    torch.mm(a, a, out=out)
    best, tries, start = float("inf"), 0, time.perf_counter()
    while tries < LEAST_TRIES or time.perf_counter() - start < MEASURED_S:
        begin = time.perf_counter()
        torch.mm(a, a, out=out)
        best, tries = min(best, time.perf_counter() - begin), tries + 1
    return 2 * SIZE**3 / best
