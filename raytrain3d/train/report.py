"""What a rank reports of a step, and how reports of all ranks become one line of metrics."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step as one rank saw it. Times in seconds."""

    step: int
    rank: int
    loss: float
    """Mean loss of the step's loss tokens over all replicas, in nats; the same on every rank."""
    tokens: int
    """Loss tokens of the step over all replicas."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    skipped: bool = False
    """The gradient was not finite: parameters stayed as they were."""
    stop: bool = False
    """Some rank was asked to stop: every rank leaves its lease after this step."""
    seconds: float
    compute_s: float
    """Time in forward and backward ops."""
    data_wait_s: float
    receive_wait_s: float
    """Waiting for activations and gradients of other stages."""
    reduce_wait_s: float
    """Waiting for gradient reductions after the last backward."""
    commit_wait_s: float
    optimizer_s: float
    layer_forward_s: dict[int, float] = field(default_factory=dict)
    """By layer index, summed over micro-batches."""
    layer_backward_s: dict[int, float] = field(default_factory=dict)

    @property
    def idle_share(self) -> float:
        """Share of the step in which this rank did not compute."""
        return max(0.0, 1.0 - (self.compute_s + self.optimizer_s) / self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Validation loss; the same on every rank."""

    loss: float
    """Mean over all validation loss tokens, in nats."""
    tokens: int
    seconds: float
