"""Where checkpoints lie: an absolute path, or a pyarrow filesystem URI (`s3://`, `gs://`, `hdfs://`).

A `Folder` is all the store needs of either. A file appears in it whole or not at all: locally by rename, remotely by
upload from a local spool. The only file that imports pyarrow, and only when a URI asks for it.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from raytrain3d.errors import CheckpointError

PARTIAL = ".partial"
"""End of the name of a file that is still being written."""


class Folder(Protocol):
    """One directory of checkpoint files. Methods raise CheckpointError naming the file."""

    @property
    def path(self) -> str:
        """What a person would call it."""

    def child(self, name: str) -> "Folder":
        """A directory in this one, which need not exist."""

    def names(self) -> list[str]:
        """Files and directories in it, sorted; none if it does not exist."""

    def writing(self, name: str) -> AbstractContextManager[str]:
        """Local path to write to; on leaving without an error the file appears under `name`, durable."""

    def reading(self, name: str) -> AbstractContextManager[str]:
        """Local path of the file, valid inside the context."""

    def remove(self, name: str) -> None:
        """Deletes one file; no error if it is gone."""

    def remove_if_empty(self) -> None:
        """Deletes the directory unless something is in it."""


@contextmanager
def _errors(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {action} {path}: {error.strerror or error}") from error


class LocalFolder:
    """A directory of a local or mounted file system."""

    def __init__(self, path: str) -> None:
        self.path = path

    def child(self, name: str) -> "LocalFolder":
        return LocalFolder(os.path.join(self.path, name))

    def names(self) -> list[str]:
        with _errors("list", self.path), suppress(FileNotFoundError):
            return sorted(os.listdir(self.path))
        return []

    @contextmanager
    def writing(self, name: str) -> Iterator[str]:
        path = os.path.join(self.path, name)
        temporary = os.path.join(self.path, f".{name}{PARTIAL}")
        with _errors("write", path):
            _make_directories(self.path)
            try:
                yield temporary
                _sync(temporary)
                os.replace(temporary, path)
                _sync(self.path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)

    @contextmanager
    def reading(self, name: str) -> Iterator[str]:
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} is missing")
        with _errors("read", path):
            yield path

    def remove(self, name: str) -> None:
        path = os.path.join(self.path, name)
        with _errors("delete", path), suppress(FileNotFoundError):
            os.unlink(path)
            _sync(self.path)

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            os.rmdir(self.path)


def _make_directories(path: str) -> None:
    """Like `os.makedirs`, and each new name is durable in its parent."""
    if not os.path.isdir(path):
        _make_directories(os.path.dirname(os.path.abspath(path)))
        with suppress(FileExistsError):
            os.mkdir(path)
        _sync(os.path.dirname(os.path.abspath(path)))


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class RemoteFolder:
    """A directory of a pyarrow filesystem; whole files go up and down through a local spool directory."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    @property
    def path(self) -> str:
        return f"{self._filesystem.type_name}:{self._root}"

    def child(self, name: str) -> "RemoteFolder":
        return RemoteFolder(self._filesystem, f"{self._root}/{name}")

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector
        with _errors("list", self.path):
            found = self._filesystem.get_file_info(FileSelector(self._root, allow_not_found=True))
            return sorted(info.base_name for info in found)

    @contextmanager
    def writing(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="raytrain3d-") as spool, _errors("write", f"{self.path}/{name}"):
            local = os.path.join(spool, name)
            yield local
            self._filesystem.create_dir(self._root, recursive=True)
            # An object store shows an object only when its upload is complete; others need a rename.
            atomic = self._filesystem.type_name in ("s3", "gcs")
            target = f"{self._root}/{name}" if atomic else f"{self._root}/.{name}{PARTIAL}"
            with open(local, "rb") as source, self._filesystem.open_output_stream(target) as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
            if not atomic:
                self._filesystem.move(target, f"{self._root}/{name}")

    @contextmanager
    def reading(self, name: str) -> Iterator[str]:
        from pyarrow.fs import FileType
        where = f"{self.path}/{name}"
        with tempfile.TemporaryDirectory(prefix="raytrain3d-") as spool, _errors("read", where):
            if self._filesystem.get_file_info(f"{self._root}/{name}").type != FileType.File:
                raise CheckpointError(f"{where} is missing")
            local = os.path.join(spool, name)
            with self._filesystem.open_input_stream(f"{self._root}/{name}") as source, open(local, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
            yield local

    def remove(self, name: str) -> None:
        with _errors("delete", f"{self.path}/{name}"), suppress(FileNotFoundError):
            self._filesystem.delete_file(f"{self._root}/{name}")

    def remove_if_empty(self) -> None:
        if not self.names():
            with suppress(OSError):
                self._filesystem.delete_dir(self._root)


def open_folder(location: str | Folder) -> Folder:
    """The folder of a path or URI; raises CheckpointError naming a URI that pyarrow cannot open."""
    if not isinstance(location, str):
        return location
    if "://" not in location:
        return LocalFolder(location)
    parts = urlsplit(location)
    if parts.scheme == "file":
        return LocalFolder(unquote(parts.path))
    from pyarrow.fs import FileSystem
    try:
        filesystem, root = FileSystem.from_uri(location)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"cannot open storage {location}: {error}") from error
    return RemoteFolder(filesystem, root)


def is_absolute(location: str) -> bool:
    """Whether the location means the same on every node and from every working directory."""
    return "://" in location or os.path.isabs(location)


def join(location: str, *names: str) -> str:
    """A path or URI below `location`."""
    return "/".join((location.rstrip("/"), *names))


def probe_directory(location: str | Folder) -> None:
    """Writes, lists and deletes a probe file in `location`, making the directory when there is none.

    Raises CheckpointError naming the path; the caller adds the node.
    """
    folder = open_folder(location)
    name = f"probe-{uuid.uuid4().hex}"
    try:
        with folder.writing(name) as path, open(path, "wb") as file:
            file.write(b"raytrain3d")
        listed = name in folder.names()
        folder.remove(name)
    except CheckpointError as error:
        raise CheckpointError(f"directory {folder.path} is not usable: {error}. "
                              "Choose another run.directory") from error
    if not listed:
        raise CheckpointError(f"directory {folder.path} is not usable: a file just written is not listed there. "
                              "Choose another run.directory")
