"""Learning rate as a pure function of the step."""

import math

from raytrain3d.config import LearningRateConfig


def learning_rate(config: LearningRateConfig, step: int, steps: int) -> float:
    """Rate of `step` (1..steps): linear warm-up to `peak`, then the schedule, which reaches `final` at the last step."""
    if step <= config.warmup:
        return config.peak * step / config.warmup
    decay = steps - config.warmup
    if config.schedule == "wsd":
        decay = min(decay, config.decay if config.decay is not None else max(1, steps // 5))
    progress = max(0.0, 1.0 - (steps - step) / max(1, decay))
    match config.schedule:
        case "constant":
            return config.peak
        case "cosine":
            return config.final + (config.peak - config.final) * (1 + math.cos(math.pi * progress)) / 2
        case "linear" | "wsd":
            return config.peak + (config.final - config.peak) * progress
