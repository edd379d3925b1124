"""Whether a checkpoint belongs to a run: name, model, data and what decides which samples a step sees.

Layout, schedule, sharding, dtype and learning rate may change between a save and a load; these may not. Needs nothing
installed.
"""

import json
from dataclasses import asdict
from typing import Any

from raytrain3d.checkpoint.manifest import Manifest
from raytrain3d.config import JobConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.masking import masked_environment
from raytrain3d.plan.params import model_spec

_FREE_MODEL_KEYS = frozenset({"dropout", "attention_dropout", "initial_std", "freeze", "vocabulary_multiple",
                              "from_huggingface"})
"""Keys of `model` that change neither shapes nor what the weights compute."""
_FIXED_TRAIN_KEYS = ("seed", "global_batch", "sequence")


def plain_config(config: JobConfig) -> dict[str, Any]:
    """`config` as JSON values, without the secrets of its environment."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(masked_environment(config))))
    return plain


def global_shapes(config: JobConfig) -> dict[str, tuple[int, ...]]:
    """Global, unpadded shape of every parameter by its global name (`<layer>.<parameter>`)."""
    spec = model_spec(config.model, config.train, tensor=1)
    return {f"{state.name}.{param.name}": param.shape for state in spec.states for param in state.params}


def check_same_run(manifest: Manifest, where: str, config: JobConfig, data: str | None = None) -> None:
    """Raises CheckpointError naming `where` and the first thing that differs, with both values.

    `data` is the fingerprint of the data directory; compared when both sides have one.
    """
    theirs, ours = _identity(manifest.config), _identity(plain_config(config))
    theirs["run.name"] = manifest.run
    if manifest.data is not None and data is not None:
        theirs["the data's fingerprint"], ours["the data's fingerprint"] = manifest.data, data
    # A key that one side does not have yet is a newer feature, off by default.
    for key in (key for key in ours if key in theirs and theirs[key] != ours[key]):
        raise CheckpointError(f"{where} belongs to another run: {key} is {theirs[key]!r} there and {ours[key]!r} in "
                              "this configuration. Give this run another run.name or run.directory")
    shapes = global_shapes(config)
    if manifest.parameters != shapes:
        name = next(n for n in manifest.parameters | shapes if manifest.parameters.get(n) != shapes.get(n))
        raise CheckpointError(f"{where} holds another model: {name} has shape {manifest.parameters.get(name)} there "
                              f"and {shapes.get(name)} in this configuration")


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    run, model, train = config.get("run", {}), config.get("model", {}), config.get("train", {})
    identity = {"run.name": run.get("name")}
    identity |= {f"model.{key}": value for key, value in model.items() if key not in _FREE_MODEL_KEYS}
    return identity | {f"train.{key}": train[key] for key in _FIXED_TRAIN_KEYS if key in train}
