"""The manifest: the record that makes a directory of shards a checkpoint, written last.

It lists every file and every stored box, with the box's place in the global parameter, its place in the file and its
checksum, so that a reader verifies exactly what it reads; and it vouches for itself with a checksum. Those of boxes are
CRC-32: they are there against damage, not against forgery, and cost less than reading. Reading is strict: what is not
exactly the expected record is refused, and file names cannot leave the directory. Needs nothing installed.
"""

import hashlib
import json
import re
import zlib
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from raytrain3d.checkpoint.layout import KINDS, cover, full_rectangle
from raytrain3d.errors import CheckpointError
from raytrain3d.plan.params import Rectangle

FORMAT = 2
MANIFEST = "manifest.json"
DTYPES = {"float32": 4, "bfloat16": 2, "float64": 8, "float16": 2}
"""Bytes of an element, by torch's name of the type."""

SHARD_NAME = re.compile(r"rank-[0-9]{4,}\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One shard file."""

    name: str
    size: int
    """In bytes."""
    header_checksum: str
    """CRC-32 of everything before the first box, eight hexadecimal digits. Boxes have their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One stored box of one parameter's state."""

    name: str
    kind: str
    rectangle: Rectangle
    dtype: str
    file: str
    start: int
    """Position of its first byte in the file; its elements follow in row order."""
    checksum: str
    """CRC-32 of its bytes, eight hexadecimal digits."""

    @property
    def num_bytes(self) -> int:
        return self.rectangle.size * DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What one rank has written of a checkpoint; plain data, sent to the driver."""

    rank: int
    step: int
    file: FileRecord | None
    """Absent when the rank had nothing to write."""
    entries: tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A whole checkpoint."""

    step: int
    """Steps finished when it was taken."""
    run: str
    """Name of the run that wrote it."""
    data: str | None
    """Fingerprint of the token data the run reads, if it has one."""
    config: dict[str, Any]
    """The run's configuration as plain JSON values."""
    skipped_steps: tuple[int, ...]
    """Steps that change nothing: their numbers were not finite, or they are left out because of a loss spike. Of the latter
    some may be still to come."""
    parameters: dict[str, tuple[int, ...]]
    """Global, unpadded shape of every parameter of the model."""
    files: tuple[FileRecord, ...]
    entries: tuple[Entry, ...]
    validation_loss: float | None = None
    """At this step, in nats a token, if it was evaluated."""

    def to_json(self) -> str:
        record = asdict(self)
        for entry in record["entries"]:
            entry.update(entry.pop("rectangle"))
        body = json.dumps(record, allow_nan=False)
        return f'{{"format": {FORMAT}, "checksum": "{_seal(body)}", "manifest": {body}}}\n'

    @staticmethod
    def from_json(text: str, where: str) -> "Manifest":
        """Raises CheckpointError, naming `where`, for anything but a whole manifest of a known format."""
        try:
            return _manifest(_checked_body(json.loads(text)))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is not a valid manifest: {error}") from error

    def by_parameter(self) -> dict[tuple[str, str], list[Entry]]:
        """Entries of each (parameter, kind), in the manifest's order."""
        found: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            found.setdefault((entry.name, entry.kind), []).append(entry)
        return found

    def check_complete(self, where: str) -> None:
        """Raises CheckpointError unless every weight is there in full, and every other kind in full or not at all."""
        found = self.by_parameter()
        for name, shape in self.parameters.items():
            for kind in KINDS:
                entries = found.get((name, kind), [])
                _, missing = cover(full_rectangle(shape), (entry.rectangle for entry in entries))
                if missing and (entries or kind == "weight"):
                    raise CheckpointError(f"{where} is incomplete: no rank wrote {kind} of {name} at "
                                          f"{missing[0].offset}, shape {missing[0].shape}")


def checksum(data: bytes | memoryview, before: str = "00000000") -> str:
    """CRC-32 of `data`, which follows bytes of the checksum `before`."""
    return f"{zlib.crc32(data, int(before, 16)):08x}"


def _seal(body: str) -> str:
    return f"sha256:{hashlib.sha256(body.encode()).hexdigest()}"


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


def _checked_body(record: Any) -> Any:
    version = record.get("format") if isinstance(record, dict) else None
    if type(version) is int and version > FORMAT:
        _refuse(f"written by a newer raytrain3d (format {version}, this one reads format {FORMAT})")
    if type(version) is not int or version != FORMAT:
        _refuse(f"its format is {version!r}, this raytrain3d reads format {FORMAT}")
    fields = _fields(record, "the file", format=int, checksum=str, manifest=dict)
    if _seal(json.dumps(fields["manifest"])) != fields["checksum"]:
        _refuse("its checksum does not match, it was changed or damaged")
    return fields["manifest"]


def _fields(value: Any, what: str, **types: type) -> dict[str, Any]:
    """`value` as a record of exactly these fields and types (a bool is no int)."""
    if not isinstance(value, dict) or set(value) != set(types):
        _refuse(f"{what} must have exactly the fields {', '.join(types)}")
    for name, kind in types.items():
        if type(value[name]) is not kind:
            _refuse(f"{name} of {what} is {value[name]!r}, not {kind.__name__}")
    return value


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        _refuse(f"{what} is {value!r}, not a list of numbers from 0")
    return tuple(value)


def _manifest(body: Any) -> Manifest:
    optional = {name: type(None) if body.get(name) is None else kind
                for name, kind in (("data", str), ("validation_loss", float))}
    fields = _fields(body, "the manifest", step=int, run=str, config=dict, skipped_steps=list, parameters=dict, files=list,
                     entries=list, **optional)
    if fields["step"] < 0:
        _refuse(f"step is {fields['step']}")
    parameters = {name: _numbers(shape, f"shape of {name}") for name, shape in fields["parameters"].items()}
    files = {record.name: record for record in map(_file, fields["files"])}
    if len(files) != len(fields["files"]):
        _refuse("a file is listed twice")
    entries = tuple(_entry(entry, parameters, files) for entry in fields["entries"])
    if len({(entry.file, entry.start) for entry in entries}) != len(entries):
        _refuse("an entry is listed twice")
    return Manifest(step=fields["step"], run=fields["run"], data=fields["data"], config=fields["config"],
                    skipped_steps=_numbers(fields["skipped_steps"], "skipped_steps"), parameters=parameters,
                    files=tuple(files.values()), entries=entries, validation_loss=fields["validation_loss"])


def _file(value: Any) -> FileRecord:
    fields = _fields(value, "a file", name=str, size=int, header_checksum=str)
    if not SHARD_NAME.fullmatch(fields["name"]):
        _refuse(f"file name {fields['name']!r} is not of the form rank-NNNN.safetensors")
    if fields["size"] < 0 or not _CHECKSUM.fullmatch(fields["header_checksum"]):
        _refuse(f"size or checksum of {fields['name']} is malformed")
    return FileRecord(**fields)


def _entry(value: Any, parameters: dict[str, tuple[int, ...]], files: dict[str, FileRecord]) -> Entry:
    fields = _fields(value, "an entry", name=str, kind=str, offset=list, shape=list, dtype=str, file=str, start=int,
                     checksum=str)
    name, what = fields["name"], f"{fields['kind']} of {fields['name']} in {fields['file']}"
    for field, valid in (("name", parameters), ("kind", KINDS), ("dtype", DTYPES), ("file", files)):
        if fields[field] not in valid:
            _refuse(f"{what} has the unknown {field} {fields[field]!r}")
    box = Rectangle(offset=_numbers(fields["offset"], what), shape=_numbers(fields["shape"], what))
    whole = parameters[name]
    if len(box.offset) != len(whole) or len(box.shape) != len(whole) or box.intersect(full_rectangle(whole)) != box:
        _refuse(f"{what} at {box.offset}, shape {box.shape} is not inside the parameter's shape {whole}")
    if not _CHECKSUM.fullmatch(fields["checksum"]):
        _refuse(f"the checksum of {what} is malformed")
    entry = Entry(name=name, kind=fields["kind"], rectangle=box, dtype=fields["dtype"], file=fields["file"],
                  start=fields["start"], checksum=fields["checksum"])
    if entry.start < 0 or entry.start + entry.num_bytes > files[entry.file].size:
        _refuse(f"{what} at byte {entry.start}, {entry.num_bytes} bytes long, is not inside its file")
    return entry
