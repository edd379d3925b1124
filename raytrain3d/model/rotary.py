"""Rotary position embedding (https://arxiv.org/abs/2104.09864) with the frequency scaling of Llama 3.1 and later.

Angles are made in FP32, as the published models were trained with, and pairs are (i, i + size / 2).
"""

import math

import torch
from torch import Tensor

from raytrain3d.config import ModelConfig, RotaryScalingConfig


def inverse_frequencies(size: int, theta: float, scaling: RotaryScalingConfig | None) -> Tensor:
    """(size / 2,) radians per position in FP32."""
    frequencies = 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = (scaling.original_sequence / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > scaling.original_sequence / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= scaling.original_sequence / low) & (wavelengths >= scaling.original_sequence / high)
    return torch.where(between, blended, scaled)


Angles = tuple[Tensor, Tensor]
"""cos, sin: (seq, size), or (batch, seq, size)."""


class RotaryTables:
    """cos and sin for every position, made once for each (length, dtype, device) and shared by all blocks."""

    def __init__(self, model: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(model.size_of_head, model.rotary_theta, model.rotary_scaling)
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, dtype: torch.dtype, device: torch.device, positions: Tensor | None = None) -> Angles:
        """(length, size) each, or (batch, seq, size) at `positions`, (batch, seq)."""
        key = (length, dtype, device)
        if key not in self._tables:
            angles = torch.outer(torch.arange(length).float(), self._frequencies).repeat(1, 2)
            self._tables[key] = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        cos, sin = self._tables[key]
        return (cos, sin) if positions is None else (cos[positions], sin[positions])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (batch, seq, heads, size), cos, sin: (seq, size) or (batch, seq, size) -> rotated x."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(-2) + torch.cat((-right, left), dim=-1) * sin.unsqueeze(-2)
