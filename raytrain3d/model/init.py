"""Initial weights as a pure function of (seed, parameter name), whatever part of the parameter is asked for.

Numbers are drawn for blocks of rows of the global, unpadded shape and then sliced, so every layout starts from the same
model and no rank draws much more than it holds. They are drawn in FP32 and cast.
"""

import hashlib
import math

import torch
from torch import Tensor

from raytrain3d.config import ModelConfig
from raytrain3d.plan.params import ParamSpec, Rectangle

ROWS = 64
"""Rows drawn from one generator."""


def initial_values(model: ModelConfig, seed: int, name: str, param: ParamSpec, part: Rectangle) -> Tensor:
    """FP32 tensor of shape `part.shape`. `name` is the global name, `blocks.3.attention.query.weight`."""
    if param.initial in ("ones", "zeros"):
        return torch.full(part.shape, 1.0 if param.initial == "ones" else 0.0)
    std = model.initial_std / math.sqrt(2 * model.blocks) if param.initial == "residual" else model.initial_std
    first, rows = part.offset[0], part.shape[0]
    if part.size == 0:
        return torch.empty(part.shape)
    blocks = range(first // ROWS, (first + rows - 1) // ROWS + 1)
    drawn = torch.cat([_draw(seed, name, param.shape, block) for block in blocks])
    start = first - blocks[0] * ROWS
    inner = (slice(start, start + rows), *(slice(o, o + n) for o, n in zip(part.offset[1:], part.shape[1:], strict=True)))
    return drawn[inner] * std


def _draw(seed: int, name: str, shape: tuple[int, ...], block: int) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    rows = min(ROWS, shape[0] - block * ROWS)
    return torch.randn((rows, *shape[1:]), generator=generator)
