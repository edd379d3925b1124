"""A Hugging Face model to a checkpoint of ours, one layer at a time.

The checkpoint is of step 0 and holds weights alone, in the type they had; the optimizer starts from nothing. config.json
and the tokenizer's files lie beside the shards.
"""

import json
import os
import shutil
from dataclasses import asdict

from raytrain3d.checkpoint.huggingface import HuggingFaceWeights
from raytrain3d.checkpoint.huggingface_files import CARRIED
from raytrain3d.checkpoint.layout import Piece, full_rectangle
from raytrain3d.checkpoint.manifest import SHARD_NAME, Manifest, Receipt
from raytrain3d.checkpoint.storage import PARTIAL, Folder, open_folder
from raytrain3d.checkpoint.store import commit_manifest, write_shard
from raytrain3d.errors import CheckpointError


def import_huggingface(directory: str, output: str | Folder, *, run: str) -> Manifest:
    """Makes `output` (absent, empty, or left over from an interrupted import) a checkpoint of the model in `directory`,
    under the name of a run. Memory holds one layer. CheckpointError naming what is missing, wrong or not supported."""
    weights = HuggingFaceWeights(directory)
    folder = open_folder(output)
    _check_target(folder)
    layers: dict[str, list[str]] = {}
    for name in weights.parameters:
        layers.setdefault(_layer_of(name), []).append(name)
    receipts = [_write_layer(weights, folder, number, names) for number, names in enumerate(layers.values())]
    _carry(directory, folder)
    model = json.loads(json.dumps(asdict(weights.model)))
    manifest = Manifest(
        step=0, run=run, data=None, config={"run": {"name": run}, "model": model}, skipped_steps=(),
        parameters=weights.parameters, files=tuple(receipt.file for receipt in receipts if receipt.file is not None),
        entries=tuple(entry for receipt in receipts for entry in receipt.entries))
    commit_manifest(folder, manifest)
    return manifest


def run_of(output: str) -> str:
    """Run that a checkpoint at this place belongs to: NAME of `.../NAME/checkpoints/step-0`, else the last part."""
    parts = output.rstrip("/").split("/")
    return parts[-3] if len(parts) > 2 and parts[-2] == "checkpoints" else parts[-1]


def _layer_of(name: str) -> str:
    """`blocks.3` of `blocks.3.attention.query.weight`, `head` of `head.norm.weight`."""
    first, second = name.split(".")[:2]
    return f"{first}.{second}" if first == "blocks" else first


def _check_target(folder: Folder) -> None:
    others = [name for name in folder.names()
              if name not in CARRIED and not SHARD_NAME.fullmatch(name) and not name.endswith(PARTIAL)]
    if others:
        raise CheckpointError(f"{folder.path} already holds {others[0]}: name a new directory")


def _write_layer(weights: HuggingFaceWeights, folder: Folder, number: int, names: list[str]) -> Receipt:
    boxes = {name: full_rectangle(weights.parameters[name]) for name in names}
    pieces = [Piece(name=name, kind="weight", rectangle=box, tensor=weights.read(name, box)) for name, box in boxes.items()]
    return write_shard(folder, number, pieces, step=0)


def _carry(directory: str, folder: Folder) -> None:
    for name in CARRIED:
        source = os.path.join(directory, name)
        if os.path.isfile(source):
            with folder.writing(name) as path:
                shutil.copyfile(source, path)
