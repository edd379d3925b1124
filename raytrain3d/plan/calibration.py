"""What devices and links reach of their data sheets: the constants of the cost model. `profile.py` keeps them as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from raytrain3d.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Every constant has one physical cause, so that what is fitted on a few devices holds on many.

    The defaults are round figures of an NVLink and InfiniBand cluster with kernels launched by PyTorch.
    """

    matmul: float = 0.65
    """Share of peak FLOPs that large matrix products reach."""
    matmul_half_flops: float = 1e10
    """FLOPs of a matrix product that reaches half of that: smaller ones fill a device less."""
    attention: float = 0.3
    """Share of peak FLOPs of fused attention; its backward computes the scores again."""
    memory: float = 0.85
    """Share of memory bandwidth that norms, activations, losses and updates reach."""
    launch_s: float = 1e-3
    """Host seconds to launch the forward and backward of one layer: a stage cannot be faster than its launches."""
    contention_s: float = 0.0
    """Host seconds more for each layer and each rank of a tensor group, when stages are on different nodes and a
    runtime's blocking messages delay its launches."""
    inside: float = 0.8
    """Share of the bandwidth of links inside a node."""
    network: float = 0.8
    """Share of the bandwidth of the network."""
    inside_step_s: float = 5e-6
    """One step of a ring inside a node: latency of a hop and its synchronization."""
    network_step_s: float = 15e-6
    """One step of a ring that crosses nodes."""
    exposed_tensor: float = 1.0
    """Share of the bytes of tensor-parallel collectives that computation does not hide."""
    exposed_reduction: float = 0.3
    """Share of reducing gradients over replicas that no backward hides."""
    exposed_all_reduce: float = 0.3
    """The same where replicas hold whole gradients (sharding none)."""
    exposed_handover: float = 0.0
    """Share of a message between stages during which its sender does not compute."""
    handover_s: float = 50e-6
    """Latency of a message between stages."""
    step_s: float = 5e-3
    """Of a step beside all that: data, norms, commit, bookkeeping."""
    embedding_forward: float = 1.0
    """Measured over modelled seconds of a layer that was profiled."""
    embedding_backward: float = 1.0
    block_forward: float = 1.0
    block_backward: float = 1.0
    head_forward: float = 1.0
    head_backward: float = 1.0
    crowd: float = 1.0
    """Seconds of a layer while all devices of its node compute, over those while it alone does."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise PlanError(f"calibration {name} is {value}: must be at least 0")


def calibration_of(values: Mapping[str, float]) -> Calibration:
    """PlanError if a value is no number."""
    try:
        return Calibration(**{name: float(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise PlanError(f"calibration: {error}") from None
