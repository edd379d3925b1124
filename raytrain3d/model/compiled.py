"""Layers compiled with torch.compile (`train.compile`): blocks, and the loss of a head that has the whole vocabulary.

What differs between blocks stays outside of what is compiled: where a block is in the model, which micro-batch it works on,
and the tables that are made once. So one function, compiled once, serves all blocks of a kind; those that are frozen,
recompute their attention or are evaluated are other kinds. A layer stays a module of its own: nothing is compiled across
the border of a layer, where it is timed, recomputed and moved.
"""

import importlib.util
import os
import shutil
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from raytrain3d.config import CompileBackend
from raytrain3d.errors import ConfigError
from raytrain3d.model.functional import remember_seams
from raytrain3d.model.loss import loss_and_gradient
from raytrain3d.model.transformer import Block, BlockCompute, Head, Layer, block_compute

KINDS = 64
"""Most kinds of blocks in a process. A job has a handful; torch's limit of 8 is for functions that should have one."""


def check_backend(backend: CompileBackend, device: torch.device) -> None:
    """ConfigError when what `backend` needs is not there."""
    if backend != "inductor":
        return
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise ConfigError("train.compile is 'inductor', which needs a C++ compiler on CPUs, and there is no "
                              f"{compiler!r}: install one, name one by network.environment.CXX, or set it to 'none'")
    elif importlib.util.find_spec("triton") is None:
        raise ConfigError("train.compile is 'inductor', which needs Triton on GPUs, and it is not installed: install it, "
                          "or set it to 'none'")


def compile_layer(layer: Layer, backend: CompileBackend) -> None:
    """From now on `layer`, whose seams are filled, computes by a compiled function, which is made at its first use."""
    if isinstance(layer, Block):
        remember_seams([layer.attention.enter, layer.attention.output.reduce, layer.mlp.enter, layer.mlp.down.reduce])
        layer.compute = partial(_compute, _compiled(block_compute, backend))
    elif isinstance(layer, Head):
        layer.loss_gradient = _compiled(loss_and_gradient, backend)


def _compute(function: BlockCompute, block: Block, *arguments: Any) -> Tensor:
    """function(block, *arguments). A compiler that meets a parameter looks at its gradient too, and refuses one of another
    type (FP32 under bf16). So there is none to be seen meanwhile; graphs have their gradients added in the backward."""
    hidden = [(parameter, parameter.grad) for parameter in block.parameters() if parameter.dtype == torch.bfloat16]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        return function(block, *arguments)
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient


@cache
def _compiled(function: Any, backend: CompileBackend) -> Any:
    """One for all layers. Anything that would cut its graph in two is an error."""
    torch._dynamo.config.recompile_limit = KINDS
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
