"""Where the files of a data set are: a directory, or a URI whose files are kept in a local cache of bounded size."""

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from pyarrow.fs import FileSystem

from raytrain3d.config import DataConfig
from raytrain3d.errors import DataError
from raytrain3d.files import ANSWER_S, Answering, in_time, retried

GIB = 1 << 30
BLOCK_BYTES = 1 << 22
MOST_MAPPED = 1 << 14
"""Files that one process maps at a time; Linux allows some 65,000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Local copies of remote shards, shared by all processes of a node."""

    directory: str = os.path.join(tempfile.gettempdir(), "raytrain3d-data")
    limit_bytes: int = 100 * GIB

    @staticmethod
    def of(data: DataConfig) -> "Cache":
        limit = int(data.cache_gib * GIB)
        return Cache(limit_bytes=limit) if data.cache_directory is None else Cache(directory=data.cache_directory,
                                                                                   limit_bytes=limit)


class Folder(Protocol):
    """The files of one data set."""

    def local(self, name: str) -> Path:
        """A local file with this content. DataError when it cannot be had."""

    def most_mapped(self, largest: int) -> int:
        """How many files of at most `largest` bytes may be mapped at a time."""


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A directory."""

    directory: Path

    def local(self, name: str) -> Path:
        return self.directory / name

    def most_mapped(self, largest: int) -> int:
        return MOST_MAPPED


class CachedFolder:
    """A URI. Copies that were not used for longest make room for new ones; a file that is mapped keeps its content."""

    def __init__(self, uri: str, cache: Cache) -> None:
        self._uri, self._cache = uri.rstrip("/"), cache
        try:
            filesystem, self._root = in_time(lambda: FileSystem.from_uri(self._uri), ANSWER_S)
        except (OSError, ValueError) as error:
            raise DataError(f"{uri} cannot be opened ({error})") from None
        self._filesystem = Answering(filesystem)
        self._directory = Path(cache.directory) / hashlib.blake2b(self._uri.encode(), digest_size=8).hexdigest()

    def local(self, name: str) -> Path:
        file = self._directory / name
        try:
            os.utime(file)  # used just now
        except FileNotFoundError:
            self._fetch(name, file)
        return file

    def most_mapped(self, largest: int) -> int:
        return max(1, min(MOST_MAPPED, self._cache.limit_bytes // max(1, largest)))

    def _fetch(self, name: str, file: Path) -> None:
        partial = file.with_name(f".{name}.{uuid4().hex[:8]}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            retried(lambda: self._copy(name, partial))
            partial.rename(file)
        except OSError as error:
            raise DataError(f"{self._uri}/{name} cannot be copied to the cache {self._cache.directory} "
                            f"({error.strerror or error})") from None
        finally:
            partial.unlink(missing_ok=True)

    def _copy(self, name: str, partial: Path) -> None:
        with self._filesystem.open_input_file(f"{self._root}/{name}") as source, partial.open("wb") as sink:
            self._make_room(name, source.size())
            while block := source.read(BLOCK_BYTES):
                sink.write(block)

    def _make_room(self, name: str, wanted: int) -> None:
        limit = self._cache.limit_bytes
        if wanted > limit:
            raise DataError(f"data.cache_gib is {limit / GIB:g}: {self._uri}/{name} alone has {wanted / GIB:.3g} GiB")
        files = []
        for file in Path(self._cache.directory).glob("*/*.arrow"):
            with suppress(FileNotFoundError):  # another process has removed it
                found = file.stat()
                files.append((found.st_mtime_ns, found.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total + wanted <= limit:
                return
            file.unlink(missing_ok=True)
            total -= size


def open_folder(path: str, cache: Cache) -> Folder:
    """Of a path or URI."""
    return CachedFolder(path, cache) if "://" in path else LocalFolder(Path(path))


def read_remote(uri: str) -> bytes:
    """All of a small remote file. OSError when it cannot be read."""
    filesystem, path = in_time(lambda: FileSystem.from_uri(uri), ANSWER_S)

    def read() -> Any:
        with Answering(filesystem).open_input_file(path) as file:
            return file.read()

    content: bytes = retried(read)
    return content
