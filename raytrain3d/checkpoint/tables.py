"""What is in checkpoints, as text. Reads manifests alone."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from raytrain3d.checkpoint.layout import KINDS
from raytrain3d.checkpoint.manifest import Entry, Manifest
from raytrain3d.checkpoint.storage import Folder
from raytrain3d.checkpoint.store import read_manifest, step_directory, steps
from raytrain3d.errors import CheckpointError
from raytrain3d.plan.table import aligned, amount, counted, size

_WORDS = {"weight": "weights", "master": "FP32 master weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}


def run_table(run_directory: str) -> str:
    """A row for each checkpoint of a run, oldest first. CheckpointError when there is none."""
    found = steps(run_directory)
    if not found:
        raise CheckpointError(f"{run_directory} holds no checkpoints: name the directory of a run, such as runs/quickstart")
    rows = [["step", "holds", "parameters", "files", "size", "validation loss"]]
    for step in found:
        try:
            rows.append([str(step), *_summary(read_manifest(step_directory(run_directory, step)))])
        except CheckpointError as error:
            rows.append([str(step), f"unreadable: {error}", "", "", "", ""])
    return "\n".join(aligned(rows))


def _summary(manifest: Manifest) -> list[str]:
    return [_contents(manifest.entries), amount(_num_parameters(manifest)), str(len(manifest.files)),
            size(_num_bytes(manifest)), "" if manifest.validation_loss is None else f"{manifest.validation_loss:.4f}"]


def checkpoint_table(folder: Folder, *, parameters: bool = False) -> str:
    """Summary lines of one checkpoint and a row for each file, or for each parameter."""
    manifest = read_manifest(folder)
    lines = [f"{name:<12}{text}" for name, text in _facts(folder, manifest)]
    return "\n".join([*lines, "", *aligned(_parameter_rows(manifest) if parameters else _file_rows(manifest))])


def _facts(folder: Folder, manifest: Manifest) -> Iterable[tuple[str, str]]:
    model, train = manifest.config.get("model", {}), manifest.config.get("train", {})
    yield "checkpoint", folder.path
    yield "run", f"{manifest.run}, step {manifest.step}" + (f" of {train['steps']}" if "steps" in train else "")
    yield "model", ", ".join([*_model(model), f"{amount(_num_parameters(manifest))} parameters"])
    yield "holds", f"{_contents(manifest.entries)}: {counted(len(manifest.files), 'file')}, {size(_num_bytes(manifest))}"
    if manifest.validation_loss is not None:
        yield "loss", f"{manifest.validation_loss:.4f} nats a token on the validation split"
    if manifest.skipped_steps:
        yield "skipped", f"steps {', '.join(map(str, manifest.skipped_steps))} (not finite, or left out after a loss spike)"
    if manifest.data is not None:
        yield "data", f"{manifest.config.get('data', {}).get('path', '')} (fingerprint {manifest.data[:12]})"


def _model(model: dict[str, Any]) -> Sequence[str]:
    names = ("blocks", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary")
    return [str(model.get("family", "")), *(f"{name} {model[name]}" for name in names if model.get(name) is not None)]


def _file_rows(manifest: Manifest) -> list[list[str]]:
    by_file: dict[str, list[Entry]] = {record.name: [] for record in manifest.files}
    for entry in manifest.entries:
        by_file[entry.file].append(entry)
    rows = [["file", "holds", "boxes", "size"]]
    return rows + [[record.name, _contents(by_file[record.name]), str(len(by_file[record.name])), size(record.size)]
                   for record in manifest.files]


def _parameter_rows(manifest: Manifest) -> list[list[str]]:
    found = manifest.by_parameter()
    rows = [["shape", "parameter", "holds"]]
    for name, shape in manifest.parameters.items():
        kinds = [entry for kind in KINDS for entry in found.get((name, kind), [])]
        rows.append([" x ".join(map(str, shape)), name, _contents(kinds)])
    return rows


def _contents(entries: Iterable[Entry]) -> str:
    """`weights (bfloat16), first moments (float32)`."""
    types: dict[str, set[str]] = {}
    for entry in entries:
        types.setdefault(entry.kind, set()).add(entry.dtype)
    return ", ".join(f"{_WORDS[kind]} ({', '.join(sorted(types[kind]))})" for kind in KINDS if kind in types)


def _num_parameters(manifest: Manifest) -> int:
    return sum(math.prod(shape) for shape in manifest.parameters.values())


def _num_bytes(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.files)
