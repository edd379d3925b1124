"""A checkpoint that is read weight by weight: each file is opened once, and each box is verified as it is read."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from raytrain3d.checkpoint.layout import Piece, cover, full_rectangle
from raytrain3d.checkpoint.manifest import MANIFEST, Entry
from raytrain3d.checkpoint.shard import ShardReader
from raytrain3d.checkpoint.storage import Folder, open_folder
from raytrain3d.checkpoint.store import newest, open_shard, read_manifest, step_directory
from raytrain3d.config import ModelConfig
from raytrain3d.convert import to_section
from raytrain3d.errors import CheckpointError, ConfigError
from raytrain3d.plan.params import Rectangle


class Reader:
    """Weights of one checkpoint. A context manager, since files stay open until it ends.

    CheckpointError naming the file when something is missing or damaged.
    """

    def __init__(self, directory: str | Folder) -> None:
        self.folder = open_folder(directory)
        self.manifest = read_manifest(self.folder)
        self._records = {record.name: record for record in self.manifest.files}
        self._entries = self.manifest.by_parameter()
        self._shards: dict[str, ShardReader] = {}
        self._open = ExitStack()

    @property
    def model(self) -> ModelConfig:
        """The model whose weights these are."""
        try:
            return to_section(ModelConfig, self.manifest.config.get("model"), "model")
        except ConfigError as error:
            raise CheckpointError(f"{self.folder.path} holds a model that this raytrain3d does not know: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def dtype(self, name: str) -> str:
        """Type in which the weight of this global name is stored, by torch's name."""
        return self._entries_of(name)[0].dtype

    @property
    def holds_weights_alone(self) -> bool:
        """No optimizer state: it was imported."""
        return all(entry.kind == "weight" for entry in self.manifest.entries)

    def weight(self, name: str, part: Rectangle | None = None) -> torch.Tensor:
        """The weight of this global name, all or a part of it, in the type it is stored in."""
        entries, box = self._entries_of(name), part or full_rectangle(self.manifest.parameters[name])
        piece = Piece(name=name, kind="weight", rectangle=box,
                      tensor=torch.empty(box.shape, dtype=getattr(torch, entries[0].dtype)))
        taken, missing = cover(box, (entry.rectangle for entry in entries))
        if missing:
            raise CheckpointError(f"{self.folder.path} does not hold all of the weight of {name}")
        for index, common in taken:
            self._shard(entries[index].file).copy(entries[index], [(piece, common)])
        return piece.tensor

    def _entries_of(self, name: str) -> list[Entry]:
        entries = self._entries.get((name, "weight"))
        if entries is None:
            raise CheckpointError(f"{self.folder.path} does not hold the weight of {name}")
        return entries

    def _shard(self, file: str) -> ShardReader:
        if file not in self._shards:
            self._shards[file] = self._open.enter_context(open_shard(self.folder, self._records[file]))
        return self._shards[file]


def find_checkpoint(location: str) -> Folder:
    """The folder of a checkpoint, or of the newest one of the run whose directory is given. CheckpointError when it is
    neither."""
    folder = open_folder(location)
    if MANIFEST in folder.names():
        return folder
    step = newest(folder)
    if step is None:
        raise CheckpointError(f"{location} is no checkpoint (it has no {MANIFEST}) and no run directory with checkpoints: "
                              "name one such as runs/quickstart/checkpoints/step-400")
    return open_folder(step_directory(location, step))
