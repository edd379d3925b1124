"""Documents packed into one sequence, each treated as if it stood alone: positions count from its first token, and
attention stays inside it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the documents of a micro-batch lie, as its layers use it. Absent (None) where documents are not told apart."""

    positions: Tensor
    """(batch, seq) int64: place of each token in its document."""
    mask: Tensor
    """(batch, 1, seq, seq), added to attention scores [query, key]: 0 for the query's own document up to the query, else
    -inf."""


def packing(starts: Tensor, dtype: torch.dtype) -> Packing:
    """starts: (batch, seq) int64, the place in the row where each token's document begins; dtype: that of activations."""
    places = torch.arange(starts.shape[1], device=starts.device)
    elsewhere = (places[:, None] < places) | (starts[:, :, None] != starts[:, None, :])
    mask = torch.zeros(elsewhere.shape, dtype=dtype, device=starts.device).masked_fill_(elsewhere, -torch.inf)
    return Packing(positions=places - starts, mask=mask[:, None])
