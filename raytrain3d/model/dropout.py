"""Dropout masks as a pure function of (seed, step, sample, layer, site).

A mask is drawn for each sample at full shape and then sliced, so neither micro-batch size nor any layout changes it, and
a recomputed forward draws the same one again.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutKeys:
    """Identity of the samples of one micro-batch. Absent (None) in evaluation, where nothing is dropped."""

    seed: int
    step: int
    samples: tuple[int, ...]
    """Index of each row inside the global batch of the step."""


def drop_mask(keys: DropoutKeys, layer: int, site: str, rate: float, shape: tuple[int, ...], part: slice,
              device: torch.device) -> Tensor:
    """(samples, *shape) of bool, of the first dimension `part` only: True with probability `rate`, independent for every
    sample, layer and site."""
    rows = []
    for sample in keys.samples:
        text = f"{keys.seed}/{keys.step}/{sample}/{layer}/{site}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        generator = torch.Generator(device).manual_seed(number)
        rows.append(torch.rand(shape, generator=generator, device=device)[part] < rate)
    return torch.stack(rows)


def dropout(x: Tensor, keys: DropoutKeys | None, layer: int, site: str, rate: float, *, part: int = 0,
            parts: int = 1) -> Tensor:
    """Inverted dropout of x: (samples, seq, width), the `part`-th of equal `parts` of the sequence -> the same shape."""
    if keys is None or rate == 0.0:
        return x
    length, width = x.shape[1:]
    own = slice(part * length, (part + 1) * length)
    return drop(x, drop_mask(keys, layer, site, rate, (parts * length, width), own, x.device), rate)


def drop(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    """x / (1 - rate), zero where `mask` holds. Filled, since a product would make a mask as large as x for a while."""
    return x.masked_fill(mask, 0).div_(1 - rate)
