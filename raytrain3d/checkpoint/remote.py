"""Checkpoints at a URI (`s3://`, `gs://`, `hdfs://`), through pyarrow filesystems.

Files are written to a local spool and go up from there, and what fails is tried again: a request to a remote store fails
now and then. One that hangs fails after a while. Besides the token data, the only file that imports pyarrow, and only a URI
imports it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, RawIOBase
from typing import Any
from uuid import uuid4

from pyarrow.fs import FileSelector, FileSystem, FileType

from raytrain3d.checkpoint.storage import PARTIAL, OpenFile, errors_named
from raytrain3d.errors import CheckpointError
from raytrain3d.files import ANSWER_S, Answering, in_time, retried

BLOCK_BYTES = 1 << 22


def open_remote(location: str) -> "RemoteFolder":
    """The folder of a URI; raises CheckpointError naming a URI that pyarrow cannot open."""
    try:
        filesystem, root = in_time(lambda: FileSystem.from_uri(location), ANSWER_S)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"cannot open storage {location}: {error}") from error
    return RemoteFolder(filesystem, root)


class RemoteFolder:
    """A directory of a pyarrow filesystem."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._real, self._filesystem = filesystem, Answering(filesystem)
        self._root = root.rstrip("/")

    @property
    def path(self) -> str:
        return f"{self._filesystem.type_name}:{self._root}"

    def child(self, name: str) -> "RemoteFolder":
        return RemoteFolder(self._real, f"{self._root}/{name}")

    def names(self) -> list[str]:
        selector = FileSelector(self._root, allow_not_found=True)
        with errors_named("list", self.path):
            return sorted(info.base_name for info in retried(lambda: self._filesystem.get_file_info(selector)))

    @contextmanager
    def writing(self, name: str) -> Iterator[str]:
        with errors_named("write", f"{self.path}/{name}"), _spool() as spool:
            yield spool
            retried(lambda: self._upload(spool, name))

    @contextmanager
    def reading(self, name: str) -> Iterator[str]:
        with self.opened(name) as source, errors_named("read", f"{self.path}/{name}"), _spool() as spool:
            with open(spool, "wb") as sink:
                block = memoryview(bytearray(BLOCK_BYTES))
                while count := source.readinto(block):
                    sink.write(block[:count])
            yield spool

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        path, where = f"{self._root}/{name}", f"{self.path}/{name}"
        with errors_named("read", where):
            if retried(lambda: self._filesystem.get_file_info(path)).type != FileType.File:
                raise CheckpointError(f"{where} is missing")
            with retried(lambda: self._filesystem.open_input_file(path)) as file:
                # Small boxes lie side by side: one request for many.
                yield BufferedReader(_RetryingFile(file), BLOCK_BYTES)

    def remove(self, name: str) -> None:
        with errors_named("delete", f"{self.path}/{name}"), suppress(FileNotFoundError):
            retried(lambda: self._filesystem.delete_file(f"{self._root}/{name}"))

    def remove_if_empty(self) -> None:
        if not self.names():
            with suppress(OSError):
                self._filesystem.delete_dir(self._root)

    def _upload(self, local: str, name: str) -> None:
        # An object store has no directories, and shows an object only when its upload is complete; others need a rename.
        if self._filesystem.type_name in ("s3", "gcs"):
            self._copy(local, f"{self._root}/{name}")
            return
        partial = f"{self._root}/.{name}.{uuid4().hex[:8]}{PARTIAL}"  # one that hung may still be written to
        self._filesystem.create_dir(self._root, recursive=True)
        self._copy(local, partial)
        self._filesystem.move(partial, f"{self._root}/{name}")

    def _copy(self, local: str, target: str) -> None:
        with open(local, "rb") as source, self._filesystem.open_output_stream(target) as sink:
            shutil.copyfileobj(source, sink, BLOCK_BYTES)


class _RetryingFile(RawIOBase):
    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any, /) -> int:
        """Not by the file's own: one that hangs might write into the buffer later on."""
        start = self._file.tell()

        def read() -> bytes:
            self._file.seek(start)
            block: bytes = self._file.read(len(buffer))
            return block

        block = retried(read)
        buffer[:len(block)] = block
        return len(block)


@contextmanager
def _spool() -> Iterator[str]:
    """Path of an empty local file without a name in any directory: it is gone with the process, however that ends."""
    with tempfile.TemporaryFile(prefix="raytrain3d-") as file:
        yield f"/proc/self/fd/{file.fileno()}"
