"""Files of text to a data set: cut into pieces, tokenized by any number of processes, and made to exist by one rename.

Everything is written into a directory beside the wanted one, which gets its name only when whole. A piece that is done
stays done: a preparation that was killed goes on with the others when it is asked for again. What is written depends on
the input and the settings alone, not on who did which piece when.
"""

import fcntl
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from raytrain3d.config import DataConfig, JobConfig
from raytrain3d.data.bigram import LARGEST_VOCABULARY, bigram_entropy
from raytrain3d.data.documents import Input, assign_splits, find_inputs
from raytrain3d.data.duplicates import hash_piece, hashes_file, mark_duplicates
from raytrain3d.data.folder import LocalFolder
from raytrain3d.data.manifest import SPLITS, DatasetManifest, write_manifest
from raytrain3d.data.pieces import Piece, cut
from raytrain3d.data.records import BadRecord, Reading
from raytrain3d.data.tokenize import PieceResult, Work, duplicates_file, read_result, record_file, tokenize_piece
from raytrain3d.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from raytrain3d.data.tokens import Dataset
from raytrain3d.data.workers import LocalProcesses, Workers, available_cores
from raytrain3d.errors import DataError
from raytrain3d.files import write_whole

PIECE_BYTES = 32 << 20
SHARD_TOKENS = 1 << 24
IN_THIS_PROCESS = LocalProcesses(1)
BAD_RECORDS = "bad_records.jsonl"
"""In a data set: file, row and reason of each record that was left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareProgress:
    """How far a preparation is."""

    phase: str
    """What is being done with the pieces."""
    pieces: int
    num_pieces: int
    documents: int = 0
    tokens: int = 0
    done_before: int = 0
    """Pieces that an earlier run had done."""


Progress = Callable[[PrepareProgress], None]


def prepare(text: Sequence[str], path: str, tokenizer: str = BYTES, validation_fraction: float = 0.05, *,
            column: str = "text", fail: bool = False, drop_duplicates: bool = False, longest: int = 64 << 20,
            shard_tokens: int = SHARD_TOKENS, piece_bytes: int = PIECE_BYTES, workers: Workers = IN_THIS_PROCESS,
            progress: Progress | None = None) -> DatasetManifest:
    """Makes the data set `path` (absent, or an empty directory) from the files that the patterns `text` match.

    `tokenizer` is `bytes` or the path of a `tokenizer.json`; `column` has the text in files of records, of which none may
    have more than `longest` bytes; `fail` makes the first bad record an error; `shard_tokens` is the most tokens in a shard;
    `progress` is called after each piece. Raises DataError when there is nothing to read, something in the way, or the disk
    refuses.
    """
    target = Path(path).absolute()
    _check_target(target)
    made = open_tokenizer(tokenizer)
    pieces = cut(_with_splits(find_inputs(text), validation_fraction), piece_bytes)
    staging = staging_of(path)
    work = Work(directory=str(staging), tokenizer=tokenizer, validation_fraction=validation_fraction,
                reading=Reading(column=column, longest=longest, any_bytes=tokenizer == BYTES), shard_tokens=shard_tokens,
                fail=fail, drop_duplicates=drop_duplicates)
    try:
        with _staged(staging, _description(work, pieces, made)):
            results = _Preparation(work, pieces, workers, progress).run()
            manifest = _finish(staging, made, pieces, results)
            staging.rename(target)
    except OSError as error:
        raise DataError(f"data.path is '{path}': cannot be written ({error.strerror})") from None
    return manifest


def prepare_data(data: DataConfig, *, workers: Workers | None = None, progress: Progress | None = None) -> DatasetManifest:
    """Makes the data set `data.path` as the configuration says; by default with a process for each core."""
    if data.path is None:
        raise DataError("data.path is not given: a preparation makes one data set, so name its directory")
    return prepare(data.text, data.path, data.tokenizer, data.validation_fraction, column=data.column,
                   fail=data.bad_records == "fail", drop_duplicates=data.drop_duplicates, longest=data.max_record_bytes,
                   workers=workers or LocalProcesses(available_cores()), progress=progress)


def prepare_if_missing(config: JobConfig, progress: Progress | None = None) -> DatasetManifest | None:
    """Prepares `data.path` from `data.text` when there is a text and no such path; None when nothing was to do."""
    data = config.data
    if data.path is None or not data.text or "://" in data.path or Path(data.path).exists():
        return None
    return prepare_data(data, progress=progress)


def staging_of(path: str) -> Path:
    """Where a data set is while it is being prepared."""
    target = Path(path).absolute()
    return target.with_name(f".{target.name}.preparing")


def _check_target(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"data.path is '{target}': already exists, so it is not prepared again; remove it or name "
                        "another directory")


def _with_splits(inputs: Sequence[Input], validation_fraction: float) -> list[Input]:
    """Text files get theirs here; an empty one is no document, so it stands for neither split."""
    names = [each.name for each in inputs if each.format == "text" and each.size]
    splits = dict(zip(names, assign_splits(names, validation_fraction), strict=True))
    return [replace(each, split=splits.get(each.name)) for each in inputs]


def _description(work: Work, pieces: Sequence[Piece], tokenizer: Tokenizer) -> str:
    """Equal for preparations that may go on with each other's pieces."""
    settings = asdict(replace(work, directory="")) | {"tokenizer": tokenizer.record.fingerprint}
    text = json.dumps([settings, [asdict(piece) for piece in pieces]])
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=32).hexdigest()


@contextmanager
def _staged(staging: Path, description: str) -> Iterator[None]:
    """The directory of this preparation, with what an earlier one like it has done. Only one at a time may use it."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{staging} is in use: another preparation of the same data set is under way") from None
        job = staging / "job"
        if not job.is_file() or job.read_text() != description:
            for file in staging.iterdir():
                if file.name != "lock":
                    file.unlink()
            write_whole(job, description.encode())
        yield


class _Preparation:
    """All pieces of one preparation."""

    def __init__(self, work: Work, pieces: Sequence[Piece], workers: Workers, progress: Progress | None) -> None:
        self._work, self._pieces, self._workers, self._progress = work, pieces, workers, progress

    def run(self) -> list[PieceResult]:
        """Results by piece."""
        if self._work.drop_duplicates:
            self._find_duplicates()
        results = {piece.number: read_result(self._work.directory, piece.number) for piece in self._pieces}
        todo = [piece for piece in self._pieces if results[piece.number] is None]
        done = [result for result in results.values() if result is not None]
        before = len(done)
        for number, result in self._workers.run(partial(_numbered, self._work), todo):
            results[number] = result
            done.append(result)
            self._tell(PrepareProgress(phase="tokenized", pieces=len(done), num_pieces=len(self._pieces),
                                       documents=_total(done, "documents"), tokens=_total(done, "tokens"),
                                       done_before=before))
        return [result for result in results.values() if result is not None]

    def _find_duplicates(self) -> None:
        directory = self._work.directory
        if all(duplicates_file(directory, piece.number).is_file() for piece in self._pieces):
            return
        todo = [piece for piece in self._pieces if not hashes_file(directory, piece.number).is_file()]
        for number, _ in enumerate(self._workers.run(partial(hash_piece, self._work), todo), 1):
            self._tell(PrepareProgress(phase="compared", pieces=len(self._pieces) - len(todo) + number,
                                       num_pieces=len(self._pieces)))
        mark_duplicates(directory, len(self._pieces))

    def _tell(self, progress: PrepareProgress) -> None:
        if self._progress is not None:
            self._progress(progress)


def _numbered(work: Work, piece: Piece) -> tuple[int, PieceResult]:
    return piece.number, tokenize_piece(work, piece)


def _total(results: Sequence[PieceResult], what: str) -> int:
    return sum(getattr(shard, what) for result in results for shards in result.shards.values() for shard in shards)


def _finish(staging: Path, tokenizer: Tokenizer, pieces: Sequence[Piece], results: Sequence[PieceResult]) -> DatasetManifest:
    """Writes what belongs to the whole, removes what was needed only meanwhile."""
    bad: Counter[str] = Counter()
    for result in results:
        bad.update(result.bad)
    shards = {split: tuple(shard for result in results for shard in result.shards[split]) for split in SPLITS}
    manifest = DatasetManifest(vocabulary=tokenizer.vocabulary, tokenizer=tokenizer.record, train=shards["train"],
                               validation=shards["validation"], skipped=bad.total(), bad=dict(sorted(bad.items())),
                               duplicates=sum(result.duplicates for result in results))
    manifest = replace(manifest, bigram_entropy=_entropy(staging, manifest))
    tokenizer.save(staging)
    if bad:
        lines = [json.dumps(asdict(record)) + "\n" for record in _numbered_in_files(pieces, results)]
        (staging / BAD_RECORDS).write_text("".join(lines))
    write_manifest(staging, manifest)
    for piece in pieces:
        for file_of in (record_file, hashes_file, duplicates_file):
            file_of(str(staging), piece.number).unlink(missing_ok=True)
    for file in (staging / "job", staging / "lock", *staging.glob(".*")):  # hidden: what a killed process was writing
        file.unlink()
    return manifest


def _numbered_in_files(pieces: Sequence[Piece], results: Sequence[PieceResult]) -> Iterator[BadRecord]:
    """Bad records, their rows counted from the beginning of their files."""
    before: Counter[str] = Counter()
    for piece, result in zip(pieces, results, strict=True):
        source = piece.inputs[0]
        first = before[source.location] if source.format == "jsonl" else 0
        yield from (replace(record, row=record.row + first) for record in result.examples)
        if source.format == "jsonl":
            before[source.location] += result.rows


def _entropy(directory: Path, manifest: DatasetManifest) -> float | None:
    if manifest.vocabulary > LARGEST_VOCABULARY:
        return None
    train, validation = (Dataset(LocalFolder(directory), manifest, split) for split in ("train", "validation"))
    return bigram_entropy(train.shards(), validation.shards(), manifest.vocabulary)
