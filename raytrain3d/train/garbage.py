"""Python's garbage collector at planned steps: all ranks collect at the same time, so none holds the others up."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def planned_collections(interval: int | None) -> Iterator[Callable[[int], None]]:
    """Inside, garbage is collected only by what is yielded, which is called after each step with its number: every
    `interval` steps. None: whenever Python likes."""
    if interval is None or not gc.isenabled():
        yield lambda step: None
        return

    def after(step: int) -> None:
        if step % interval == 0:
            gc.collect()

    gc.disable()
    try:
        yield after
    finally:
        gc.enable()
