"""Where log records go: one file per rank, each line with rank and pipeline rank."""

import logging
from pathlib import Path

PACKAGE = logging.getLogger("raytrain3d")


def log_to_file(directory: Path, rank: int, pipeline: int, level: str) -> logging.Handler:
    """Send this process's records to `rank-NNNN.log` in `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(directory / f"rank-{rank:04d}.log")
    handler.setFormatter(logging.Formatter(
        f"%(asctime)s rank {rank} pipeline {pipeline} %(levelname)s %(name)s: %(message)s"))
    PACKAGE.setLevel(level.upper())
    PACKAGE.addHandler(handler)
    PACKAGE.propagate = False
    return handler


def close_log(handler: logging.Handler | None) -> None:
    """Undo `log_to_file`."""
    if handler is not None:
        PACKAGE.removeHandler(handler)
        PACKAGE.propagate = True
        handler.close()
