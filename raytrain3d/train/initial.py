"""What a run starts from: fresh weights or those of a Hugging Face model, any part of any parameter by itself."""

from collections.abc import Callable

from torch import Tensor

from raytrain3d.checkpoint.huggingface import HuggingFaceWeights
from raytrain3d.config import JobConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.model.huggingface_config import decided
from raytrain3d.model.init import initial_values
from raytrain3d.plan.params import ParamSpec, Rectangle


def initial_weights(config: JobConfig) -> Callable[[str, ParamSpec, Rectangle], Tensor]:
    """Values of (global name, parameter, part) of shape part.shape."""
    model, seed = config.model, config.train.seed
    if model.from_huggingface is None:
        return lambda name, param, part: initial_values(model, seed, name, param, part)
    weights = HuggingFaceWeights(model.from_huggingface)
    if decided(weights.model) != decided(model):
        raise CheckpointError(f"{model.from_huggingface} does not hold the model of this job any more: its config.json has "
                              "changed")
    return lambda name, param, part: weights.read(name, part)
