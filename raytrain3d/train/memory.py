"""How much memory a rank has in use."""

import os
from pathlib import Path

import torch

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_in_use(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU so far, or what of this process is resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
