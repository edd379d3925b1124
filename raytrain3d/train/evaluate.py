"""Validation loss of a checkpoint in one process, on the same samples as in the run that wrote it."""

from copy import deepcopy
from typing import Any

import torch

from raytrain3d.checkpoint.reader import Reader
from raytrain3d.config import JobConfig
from raytrain3d.data.loader import Loader
from raytrain3d.errors import ConfigError
from raytrain3d.model.huggingface_config import KEYS, decided
from raytrain3d.parallel.layer_state import DTYPES
from raytrain3d.plan.plan import make_plan
from raytrain3d.train.report import EvaluationReport, SetReport, Stopwatch
from raytrain3d.train.whole_model import WholeModel

_LAYOUT = ("mesh", "pipeline", "rebalance", "debug")


def evaluation_job(stored: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a checkpoint as one of a job on one rank. An imported one lacks the data and its sequence."""
    job = {key: section for key, section in deepcopy(stored).items() if key not in _LAYOUT}
    job["model"].pop("from_huggingface", None)
    job["train"] = {"steps": 1, "global_batch": 1, **job.get("train", {})}
    return job


def evaluate_checkpoint(reader: Reader, config: JobConfig) -> EvaluationReport:
    """Losses on `evaluate.samples` samples of each validation set. ConfigError when `config` is of
    another model."""
    ours, theirs = decided(config.model), decided(reader.model)
    for key in KEYS:
        if ours[key] != theirs[key]:
            raise ConfigError(f"model.{key} is {ours[key]!r}, but {reader.folder.path} holds a model with {theirs[key]!r}")
    watch = Stopwatch()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = Loader(config, make_plan(config), 0)
    try:
        model = WholeModel(reader, dtype=DTYPES[config.train.dtype], device=device,
                           loss_chunk=config.train.loss_chunk)
        sets = tuple(_evaluate(model, loader, number) for number in range(len(loader.validation_sets)))
    finally:
        loader.close()
    return EvaluationReport(sets=sets, seconds=watch.total)


def _evaluate(model: WholeModel, loader: Loader, number: int) -> SetReport:
    """On one validation set."""
    chosen, micro_batches = loader.validation_sets[number], loader.validation(number)
    tokens = sum(each.num_loss_tokens for each in micro_batches)
    loss = sum(float(model.loss(each)) for each in micro_batches) / max(tokens, 1)
    return SetReport(name=chosen.name, loss=loss, tokens=tokens, bytes_per_token=chosen.bytes_per_token)
