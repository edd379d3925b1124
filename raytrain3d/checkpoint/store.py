"""Checkpoints of a run directory: ranks write shards, the driver commits them by a manifest, any layout loads them.

A directory `checkpoints/step-N` without a manifest is not a checkpoint. A shard appears by rename, the manifest last,
so a crash at any point leaves earlier checkpoints whole. Nothing read here can run code: safetensors and JSON only.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from raytrain3d.checkpoint.huggingface_files import CARRIED
from raytrain3d.checkpoint.identity import global_shapes, plain_config
from raytrain3d.checkpoint.layout import KINDS, Piece, cover
from raytrain3d.checkpoint.manifest import MANIFEST, SHARD_NAME, Entry, FileRecord, Manifest, Receipt
from raytrain3d.checkpoint.retention import superfluous
from raytrain3d.checkpoint.shard import ShardReader, dtype_name, write_file
from raytrain3d.checkpoint.storage import PARTIAL, Folder, join, open_folder
from raytrain3d.config import JobConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.plan.params import Rectangle

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def step_directory(run_directory: str, step: int) -> str:
    """Where the checkpoint of `step` lies."""
    return join(run_directory, "checkpoints", f"step-{step}")


def write_shard(directory: str | Folder, rank: int, pieces: Sequence[Piece], *, step: int,
                before_block: Callable[[], None] = lambda: None) -> Receipt:
    """Rank side: writes `pieces` (empty ones left out) durably and returns what the driver needs to commit.

    Pieces of one rank must not overlap. Raises CheckpointError naming the file when it cannot be written, or when
    `directory` already is a checkpoint. What `before_block` raises ends the writing and passes through.
    """
    folder = open_folder(directory)
    if MANIFEST in folder.names():
        raise CheckpointError(f"{folder.path} already holds a checkpoint")
    unknown = {piece.kind for piece in pieces} - set(KINDS)
    if unknown:
        raise ValueError(f"unknown kinds {sorted(unknown)}")
    pieces = [piece for piece in pieces if piece.rectangle.size]
    if not pieces:
        return Receipt(rank=rank, step=step, file=None, entries=())
    name = f"rank-{rank:04d}.safetensors"
    with folder.writing(name) as path:
        file, entries = write_file(path, name, pieces, before_block)
    return Receipt(rank=rank, step=step, file=file, entries=entries)


def commit(directory: str | Folder, step: int, receipts: Sequence[Receipt], *, config: JobConfig,
           data: str | None = None, validation_loss: float | None = None, skipped_steps: Sequence[int] = ()) -> None:
    """Driver side: makes the shards of all ranks a checkpoint. `data` is the fingerprint of the token data.

    Raises CheckpointError when receipts are of different steps or some parameter was not written in full.
    """
    folder = open_folder(directory)
    for receipt in receipts:
        if receipt.step != step:
            raise CheckpointError(f"{folder.path}: rank {receipt.rank} saved step {receipt.step}, and the checkpoint is of "
                                  f"step {step}")
    commit_manifest(folder, Manifest(
        step=step, run=config.run.name, data=data, config=plain_config(config), parameters=global_shapes(config),
        skipped_steps=tuple(skipped_steps),
        files=tuple(receipt.file for receipt in receipts if receipt.file is not None),
        entries=tuple(entry for receipt in receipts for entry in receipt.entries),
        validation_loss=_finite(validation_loss)))


def commit_manifest(directory: str | Folder, manifest: Manifest) -> None:
    """Writes the manifest, which makes the directory a checkpoint. Raises CheckpointError unless it is complete."""
    folder = open_folder(directory)
    text = manifest.to_json()
    # Read back as a loader would: what cannot be loaded is not committed.
    Manifest.from_json(text, folder.path).check_complete(folder.path)
    with folder.writing(MANIFEST) as path, open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read_manifest(directory: str | Folder) -> Manifest:
    """The manifest of a checkpoint directory; raises CheckpointError when it is missing or not valid."""
    folder = open_folder(directory)
    with folder.reading(MANIFEST) as path:
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{folder.path}/{MANIFEST} is not a valid manifest: {error}") from error
    return Manifest.from_json(text, f"{folder.path}/{MANIFEST}")


def read_into(directory: str | Folder, pieces: Sequence[Piece]) -> None:
    """Rank side: fills every piece's tensor from a checkpoint of any layout, bit for bit, and of any `train.dtype`: where
    that differs, from the most exact weights that are stored.

    Only boxes that overlap a piece are read, and each is verified. Raises CheckpointError naming the file or parameter
    when something is missing, damaged or of another shape; tensors may then be partly filled. Pass all pieces of a rank in
    one call.
    """
    folder = open_folder(directory)
    manifest = read_manifest(folder)
    work = _work_by_file(manifest, pieces, folder.path)
    present = folder.names()
    for name in work:
        if name not in present:
            raise CheckpointError(f"{folder.path}/{name} is missing, though the manifest lists it")
    records = {record.name: record for record in manifest.files}
    for name, entries in work.items():
        with open_shard(folder, records[name]) as shard:
            for entry, boxes in sorted(entries.items(), key=lambda item: item[0].start):
                shard.copy(entry, boxes)


@contextmanager
def open_shard(folder: Folder, record: FileRecord) -> Iterator[ShardReader]:
    """A file of a checkpoint, to read boxes of it. Raises CheckpointError when it is missing, cut or damaged."""
    with folder.opened(record.name) as file:
        yield ShardReader(file, f"{folder.path}/{record.name}", record)


def damage(directory: str | Folder) -> list[str]:
    """What is wrong with a checkpoint, one line for each damaged or missing file; reads all of it."""
    folder = open_folder(directory)
    try:
        manifest = read_manifest(folder)
        manifest.check_complete(folder.path)
    except CheckpointError as error:
        return [str(error)]
    found = []
    for record in manifest.files:
        try:
            with open_shard(folder, record) as shard:
                for entry in manifest.entries:
                    if entry.file == record.name:
                        shard.verify(entry)
        except CheckpointError as error:
            found.append(str(error))
    return found


def _work_by_file(manifest: Manifest, pieces: Sequence[Piece],
                  where: str) -> dict[str, dict[Entry, list[tuple[Piece, Rectangle]]]]:
    """What to copy from each entry of each file; disjoint boxes that are exactly all pieces."""
    found = manifest.by_parameter()
    work: dict[str, dict[Entry, list[tuple[Piece, Rectangle]]]] = {}
    for piece in pieces:
        _check_fits(piece, manifest, where)
        entries = _source(piece, found)
        taken, missing = cover(piece.rectangle, (entry.rectangle for entry in entries))
        if missing:
            raise CheckpointError(f"{where} does not hold {piece.kind} of {piece.name} at {missing[0].offset}, shape "
                                  f"{missing[0].shape}")
        for index, box in taken:
            work.setdefault(entries[index].file, {}).setdefault(entries[index], []).append((piece, box))
    return work


def _source(piece: Piece, found: dict[tuple[str, str], list[Entry]]) -> list[Entry]:
    """What the piece is filled from: its own kind; weights of another type from master weights, and these from weights, if
    the run that saved them had them."""
    own, weight, master = (found.get((piece.name, kind), []) for kind in (piece.kind, "weight", "master"))
    if piece.kind == "master":
        return own or weight
    if piece.kind == "weight" and own and own[0].dtype != dtype_name(piece.tensor):
        return master or own
    return own


def _check_fits(piece: Piece, manifest: Manifest, where: str) -> None:
    shape = manifest.parameters.get(piece.name)
    if shape is None:
        raise CheckpointError(f"{where} holds another model: it has no parameter {piece.name}")
    ends = tuple(at + n for at, n in zip(piece.rectangle.offset, piece.rectangle.shape, strict=True))
    if len(ends) != len(shape) or any(end > n for end, n in zip(ends, shape, strict=True)):
        raise CheckpointError(f"{where} holds another model: {piece.name} has shape {shape} there, this model's "
                              f"reaches to {ends}")


def steps(run_directory: str | Folder) -> list[int]:
    """Steps of all checkpoints of a run, ascending; directories without a manifest do not count."""
    found = open_folder(run_directory).child("checkpoints")
    numbers = sorted(int(match[1]) for name in found.names() if (match := _STEP.fullmatch(name)))
    return [n for n in numbers if MANIFEST in found.child(f"step-{n}").names()]


def newest(run_directory: str | Folder) -> int | None:
    """Step of the newest checkpoint of a run; None when there is none."""
    found = steps(run_directory)
    return found[-1] if found else None


def _step_folder(run_directory: str | Folder, step: int) -> Folder:
    return open_folder(run_directory).child("checkpoints").child(f"step-{step}")


def remove(run_directory: str | Folder, step: int) -> None:
    """Deletes a checkpoint or what is left of one, manifest first; files that are not ours stay."""
    folder = _step_folder(run_directory, step)
    folder.remove(MANIFEST)
    for name in folder.names():
        if SHARD_NAME.fullmatch(name) or name.endswith(PARTIAL) or name in CARRIED:
            folder.remove(name)
    folder.remove_if_empty()


def prune(run_directory: str | Folder, keep: int | None, *, keep_every: int | None = None,
          keep_best: int | None = None, ignore: Collection[int] = ()) -> list[int]:
    """Deletes all checkpoints but the newest `keep` (None keeps all), those of every `keep_every`-th step and the
    `keep_best` of lowest validation loss; returns the deleted steps. Those of the steps `ignore` stay and do not count."""
    found = [step for step in steps(run_directory) if step not in ignore]
    losses = {step: loss for step in found if keep_best is not None
              and (loss := read_manifest(_step_folder(run_directory, step)).validation_loss) is not None}
    old = superfluous(found, losses, keep=keep, keep_every=keep_every, keep_best=keep_best)
    for step in old:
        remove(run_directory, step)
    return old


def record_loss(directory: str | Folder, loss: float) -> None:
    """Adds a validation loss to the manifest of a checkpoint."""
    folder = open_folder(directory)
    commit_manifest(folder, replace(read_manifest(folder), validation_loss=_finite(loss)))


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def clean(run_directory: str | Folder) -> list[int]:
    """Deletes leftovers of unfinished saves and returns their steps. Only for the driver, while no rank saves."""
    names = open_folder(run_directory).child("checkpoints").names()
    whole = set(steps(run_directory))
    unfinished = sorted(n for name in names if (m := _STEP.fullmatch(name)) and (n := int(m[1])) not in whole)
    for step in unfinished:
        remove(run_directory, step)
    return unfinished
