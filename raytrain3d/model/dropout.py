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


def keep_mask(keys: DropoutKeys, layer: int, site: str, rate: float, shape: tuple[int, ...],
              device: torch.device) -> Tensor:
    """(samples, *shape) of bool: True with probability 1 - rate, independent for every sample, layer and site."""
    rows = []
    for sample in keys.samples:
        text = f"{keys.seed}/{keys.step}/{sample}/{layer}/{site}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        generator = torch.Generator(device).manual_seed(number)
        rows.append(torch.rand(shape, generator=generator, device=device) >= rate)
    return torch.stack(rows)


def dropout(x: Tensor, keys: DropoutKeys | None, layer: int, site: str, rate: float) -> Tensor:
    """Inverted dropout of x: (samples, ...) -> the same shape."""
    if keys is None or rate == 0.0:
        return x
    return x * keep_mask(keys, layer, site, rate, tuple(x.shape[1:]), x.device) / (1 - rate)
