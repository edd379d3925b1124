"""DeepSpeed's PipelineModule on CPU ranks that have their gloo group already. Installed by the extra `bench`."""

import contextlib
import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Place
from torch import Tensor, nn

INSTALLED = importlib.util.find_spec("deepspeed") is not None


class NoUpdate(torch.optim.SGD):
    """`train_batch` ends with an optimizer step, which the others do not take."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class DeepSpeedPipeline:
    """1F1B over `layers`, all of the model's, in equal numbers on the ranks."""

    def __init__(self, place: Place, layers: Sequence[nn.Module], loss: Callable[[Tensor, Tensor], Tensor],
                 micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(place.rank), "RANK": str(place.rank),
                       "WORLD_SIZE": str(place.num_ranks)}
        with contextlib.redirect_stdout(io.StringIO()):
            self._engine = self._build(layers, loss, micro_batches)
        self._micro_batches = micro_batches

    @staticmethod
    def _build(layers: Sequence[nn.Module], loss: Callable[[Tensor, Tensor], Tensor],
               micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Any:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        # Its collectives over shared memory would be compiled first; messages between stages do not use them.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        module = PipelineModule(layers=list(layers), num_stages=torch.distributed.get_world_size(), loss_fn=loss,
                                partition_method="uniform", activation_checkpoint_interval=0)
        settings = {"train_micro_batch_size_per_gpu": len(micro_batches[0][0]),
                    "gradient_accumulation_steps": len(micro_batches), "steps_per_print": 10**9}
        return deepspeed.initialize(model=module, config=settings, optimizer=NoUpdate(module.parameters(), lr=0.0))[0]

    def step(self) -> None:
        self._engine.train_batch(iter(self._micro_batches))
