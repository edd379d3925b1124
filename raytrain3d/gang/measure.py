"""Small measurements that `raytrain3d check` takes on a node."""

import os
import time

from raytrain3d.checkpoint.storage import open_folder

BLOCK = 1 << 20
NUM_BLOCKS = 64


def write_rate(directory: str, rank: int) -> float:
    """Bytes a second of writing 64 MiB to `directory`, until they are durable there. The file is deleted."""
    folder, name, block = open_folder(directory), f"speed-{rank:04d}", os.urandom(BLOCK)
    start = time.perf_counter()
    with folder.writing(name) as path, open(path, "wb") as file:
        for _ in range(NUM_BLOCKS):
            file.write(block)
    seconds = time.perf_counter() - start
    folder.remove(name)
    return BLOCK * NUM_BLOCKS / seconds
