"""Which checkpoints of a run are kept. Pure."""

from collections.abc import Mapping, Sequence


def superfluous(steps: Sequence[int], losses: Mapping[int, float], *, keep: int | None, keep_every: int | None,
                keep_best: int | None) -> list[int]:
    """Steps of the checkpoints to delete, ascending: all but the newest `keep` (None: all are kept), those of every
    `keep_every`-th step and the `keep_best` of lowest validation loss (among `losses`, by step)."""
    if keep is None:
        return []
    kept = set(sorted(steps)[-keep:])
    if keep_every is not None:
        kept.update(step for step in steps if step % keep_every == 0)
    # Of equal losses the earlier one: it has trained less for the same.
    best = sorted((losses[step], step) for step in steps if step in losses)
    kept.update(step for _, step in best[: keep_best or 0])
    return sorted(set(steps) - kept)
