"""Which text files a list of patterns means, what each is called, and which are held out for validation.

A document's name is its path below the fixed part of the pattern that found it, so that the same text gives the same
split wherever it lies.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raytrain3d.data.manifest import Split
from raytrain3d.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Document:
    """One text file."""

    name: str
    file: Path


def find_documents(patterns: Sequence[str]) -> list[Document]:
    """Files that match the patterns, by name, each once. A pattern is a path with `*`, `?`, `[...]` and `**`;
    `{stdlib}` in it stands for the Python standard library's directory; one that begins with `!` takes away what it
    matches. DataError for a pattern without a file."""
    if not any(not pattern.startswith("!") for pattern in patterns):
        raise DataError(f"data.text is {list(patterns)}: give at least one pattern of text files")
    names: dict[Path, str] = {}
    left_out: set[Path] = set()
    for pattern in patterns:
        found = _match(pattern.removeprefix("!"))
        if pattern.startswith("!"):
            left_out.update(found)
        elif not found:
            raise DataError(f"data.text has '{pattern}': no file matches {_expand(pattern)}")
        else:
            base = _fixed_part(pattern)
            names = {file: file.relative_to(base).as_posix() for file in found} | names
    documents = sorted(Document(name=name, file=file) for file, name in names.items() if file not in left_out)
    if not documents:
        raise DataError(f"data.text is {list(patterns)}: the patterns with '!' take away every file")
    return documents


def assign_splits(documents: Sequence[Document], validation_fraction: float) -> list[Split]:
    """The split of each document, by a hash of its name. With two documents or more both splits get one."""
    places = [_place(document.name) for document in documents]
    splits: list[Split] = ["validation" if place < validation_fraction else "train" for place in places]
    if validation_fraction > 0 and len(splits) > 1:
        if "validation" not in splits:
            splits[places.index(min(places))] = "validation"
        if "train" not in splits:
            splits[places.index(max(places))] = "train"
    return splits


def _place(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=6).digest()) / 2**48


def _expand(pattern: str) -> str:
    return pattern.replace("{stdlib}", glob.escape(sysconfig.get_path("stdlib")))


def _match(pattern: str) -> list[Path]:
    return [file for file in map(Path, glob.iglob(_expand(pattern), recursive=True)) if file.is_file()]


def _fixed_part(pattern: str) -> Path:
    """The directory in front of the first wildcard. Wildcards in the library's own path are plain letters."""
    parts = Path(pattern).parts
    plain = next((i for i, part in enumerate(parts) if glob.escape(part) != part), len(parts) - 1)
    return Path(str(Path(*parts[:plain])).replace("{stdlib}", sysconfig.get_path("stdlib")))
