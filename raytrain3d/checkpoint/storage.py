"""Where checkpoints lie: an absolute path, or a pyarrow filesystem URI (`s3://`, `gs://`, `hdfs://`).

A `Folder` is all the store needs of either. A file appears in it whole or not at all: locally by rename, remotely
(remote.py) by upload from a local spool.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol
from urllib.parse import unquote, urlsplit

from raytrain3d.errors import CheckpointError

PARTIAL = ".partial"
"""End of the name of a file that is still being written."""


class OpenFile(Protocol):
    """A file that is read from any place."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Reads at most len(buffer) bytes; how many it were, 0 at the end of the file."""


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

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """The file, of which only what is read is fetched."""

    def remove(self, name: str) -> None:
        """Deletes one file; no error if it is gone."""

    def remove_if_empty(self) -> None:
        """Deletes the directory unless something is in it."""


@contextmanager
def errors_named(action: str, path: str) -> Iterator[None]:
    """Turns an OSError into a CheckpointError that says what could not be done with which path."""
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
        with errors_named("list", self.path), suppress(FileNotFoundError):
            return sorted(os.listdir(self.path))
        return []

    @contextmanager
    def writing(self, name: str) -> Iterator[str]:
        path = os.path.join(self.path, name)
        temporary = os.path.join(self.path, f".{name}{PARTIAL}")
        with errors_named("write", path):
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
        with errors_named("read", path):
            yield path

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        with self.reading(name) as path, open(path, "rb", buffering=0) as file:
            yield file

    def remove(self, name: str) -> None:
        path = os.path.join(self.path, name)
        with errors_named("delete", path), suppress(FileNotFoundError):
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


def open_folder(location: str | Folder) -> Folder:
    """The folder of a path or URI; raises CheckpointError naming a URI that pyarrow cannot open."""
    if not isinstance(location, str):
        return location
    if "://" not in location:
        return LocalFolder(location)
    parts = urlsplit(location)
    if parts.scheme == "file":
        return LocalFolder(unquote(parts.path))
    from raytrain3d.checkpoint.remote import open_remote
    return open_remote(location)


def is_absolute(location: str) -> bool:
    """Whether the location means the same on every node and from every working directory."""
    return "://" in location or os.path.isabs(location)


def join(location: str, *names: str) -> str:
    """A path or URI below `location`. What follows `?` in a URI are options of its filesystem and stay at the end."""
    place, mark, options = location.partition("?") if "://" in location else (location, "", "")
    return "/".join((place.rstrip("/"), *names)) + mark + options


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
