"""Which files a list of patterns means, what each is called, what format it has, and where a document belongs.

A file's name is its path below the fixed part of the pattern that found it, so that the same input gives the same data set
wherever it lies.
"""

import glob
import hashlib
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyarrow.fs import FileSelector, FileSystem, FileType

from raytrain3d.data.manifest import Split
from raytrain3d.errors import DataError

Format = Literal["text", "jsonl", "parquet", "arrow"]
FORMATS: dict[str, Format] = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
                              ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""By the end of a name, that of a compression left out; all else is text."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Input:
    """One file to read documents from."""

    name: str
    location: str
    """Path or URI."""
    size: int
    """Bytes of the file."""
    split: Split | None = None
    """Where a text file belongs. Of other records the text decides."""

    @property
    def compression(self) -> str | None:
        """As pyarrow calls it."""
        return COMPRESSIONS.get(Path(self.name).suffix)

    @property
    def format(self) -> Format:
        """By the end of the name."""
        name = Path(self.name)
        return FORMATS.get((name.with_suffix("") if self.compression else name).suffix, "text")


def find_inputs(patterns: Sequence[str]) -> list[Input]:
    """Files that match the patterns, by name, each once. A pattern is a path or a URI with `*`, `?`, `[...]` and `**`;
    `{stdlib}` in it stands for the Python standard library's directory; one that begins with `!` takes away what it
    matches. DataError for a pattern without a file."""
    if not any(not pattern.startswith("!") for pattern in patterns):
        raise DataError(f"data.text is {list(patterns)}: give at least one pattern of files")
    found: dict[str, Input] = {}
    left_out: set[str] = set()
    for pattern in patterns:
        inputs = _match(pattern.removeprefix("!"))
        if pattern.startswith("!"):
            left_out.update(each.location for each in inputs)
        elif not inputs:
            raise DataError(f"data.text has '{pattern}': no file matches {_expand(pattern)}")
        else:
            found = {each.location: each for each in inputs} | found
    kept = sorted(each for location, each in found.items() if location not in left_out)
    if not kept:
        raise DataError(f"data.text is {list(patterns)}: the patterns with '!' take away every file")
    return kept


def assign_splits(names: Sequence[str], validation_fraction: float) -> list[Split]:
    """The split of each text file, by a hash of its name. With two files or more both splits get one."""
    places = [place_of(name.encode(errors="surrogateescape")) for name in names]
    splits: list[Split] = [split_of(place, validation_fraction) for place in places]
    if validation_fraction > 0 and len(splits) > 1:
        if "validation" not in splits:
            splits[places.index(min(places))] = "validation"
        if "train" not in splits:
            splits[places.index(max(places))] = "train"
    return splits


def split_of(place: float, validation_fraction: float) -> Split:
    return "validation" if place < validation_fraction else "train"


def place_of(content: bytes) -> float:
    """A number in [0, 1) that depends on the content only."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest()) / 2**48


def _expand(pattern: str) -> str:
    return pattern.replace("{stdlib}", glob.escape(sysconfig.get_path("stdlib")))


def _match(pattern: str) -> list[Input]:
    if "://" in pattern:
        return _match_remote(pattern)
    base = _fixed_part(pattern)
    return [Input(name=file.relative_to(base).as_posix(), location=str(file), size=file.stat().st_size)
            for file in map(Path, glob.iglob(_expand(pattern), recursive=True)) if file.is_file()]


def _match_remote(pattern: str) -> list[Input]:
    """Of a URI. `**` stands for any directories, as it does for paths."""
    scheme, _, path = pattern.partition("://")
    base = f"{scheme}://{_fixed_part(path).as_posix()}"
    try:
        filesystem, root = FileSystem.from_uri(base)
        infos = filesystem.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
    except (OSError, ValueError) as error:
        raise DataError(f"data.text has '{pattern}': {base} cannot be listed ({error})") from None
    wanted = re.compile(_expression(path.removeprefix(_fixed_part(path).as_posix()).lstrip("/")))
    names = [(info.path.removeprefix(root).lstrip("/"), info.size) for info in infos if info.type == FileType.File]
    return [Input(name=name, location=f"{base}/{name}", size=size) for name, size in names if wanted.fullmatch(name)]


def _expression(pattern: str) -> str:
    """A regular expression of a pattern: `**/` is any directories, `*` and `?` stay within a name."""
    parts = re.split(r"(\*\*/|\*|\?|\[[^]]+\])", pattern)
    meaning = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(part, part if part.startswith("[") else re.escape(part)) for part in parts)


def _fixed_part(pattern: str) -> Path:
    """The directory in front of the first wildcard. Wildcards in the library's own path are plain letters."""
    parts = Path(pattern).parts
    plain = next((i for i, part in enumerate(parts) if glob.escape(part) != part), len(parts) - 1)
    return Path(str(Path(*parts[:plain])).replace("{stdlib}", sysconfig.get_path("stdlib")))
