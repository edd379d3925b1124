"""State copied to host memory, so that it can be written while training goes on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from raytrain3d.checkpoint.layout import Piece

ALIGNMENT = 64
"""Bytes between the beginnings of pieces are a multiple of this."""


class HostMemory:
    """One block of host memory, which every snapshot of a rank uses again: pages are mapped, and locked for copies from a
    GPU, only once. It grows when a snapshot needs more."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces with their values of now, in this memory. The next call overwrites them."""
        starts, size = [], 0
        for piece in pieces:
            starts.append(size)
            size += -(-piece.tensor.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = any(piece.tensor.is_cuda for piece in pieces)
        if size > self._block.numel():
            self._grow(size, lock=on_gpu)
        copies = [replace(piece, tensor=self._copied(piece.tensor, start))
                  for piece, start in zip(pieces, starts, strict=True)]
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def close(self) -> None:
        """Give the memory back, once nothing looks into it any more."""
        self._unlock()
        self._block = torch.empty(0, dtype=torch.uint8)

    def _copied(self, source: torch.Tensor, start: int) -> torch.Tensor:
        target = self._block[start : start + source.nbytes].view(source.dtype).view(source.shape)
        return target.copy_(source, non_blocking=True)

    def _grow(self, size: int, *, lock: bool) -> None:
        self.close()
        self._block = torch.empty(size, dtype=torch.uint8)
        if lock:  # by hand: torch's own allocator of locked memory would round up to a power of two
            _check(_runtime().cudaHostRegister(self._block.data_ptr(), size, 0))
            self._is_locked = True

    def _unlock(self) -> None:
        if self._is_locked:
            _check(_runtime().cudaHostUnregister(self._block.data_ptr()))
            self._is_locked = False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(result: Any) -> None:
    torch.cuda.check_error(int(result))
