"""Every format gives the same documents, in any number of pieces and processes, killed or not; what is no document is named.
"""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from raytrain3d.data import duplicates, records
from raytrain3d.data.manifest import SPLITS, DatasetManifest
from raytrain3d.data.prepare import prepare
from raytrain3d.data.tokens import Dataset
from raytrain3d.data.workers import LocalProcesses
from raytrain3d.errors import DataError

TEXTS = [f"document {number} " * (number % 7 + 1) + "\u00e4\n" for number in range(300)]


def _write_jsonl(path: Path, values: list[Any]) -> bytes:
    return "\n".join(json.dumps({"id": 1, "text": value}) for value in values).encode()  # no final newline


def _table(values: list[Any]) -> Any:
    return pa.table({"id": list(range(len(values))), "text": pa.array(values, pa.string())})


def write_plain(file: Path, values: list[Any]) -> None:
    file.with_suffix(".jsonl").write_bytes(_write_jsonl(file, values))


def write_gzip(file: Path, values: list[Any]) -> None:
    file.with_suffix(".jsonl.gz").write_bytes(gzip.compress(_write_jsonl(file, values) + b"\r\n"))


def write_zstd(file: Path, values: list[Any]) -> None:
    content = _write_jsonl(file, values).replace(b"\n", b"\r\n")
    with pa.CompressedOutputStream(str(file.with_suffix(".jsonl.zst")), "zstd") as stream:
        stream.write(content)


def write_parquet(file: Path, values: list[Any]) -> None:
    pyarrow.parquet.write_table(_table(values), file.with_suffix(".parquet"), row_group_size=37)


def write_arrow(file: Path, values: list[Any]) -> None:
    table = _table(values)
    with pa.OSFile(str(file.with_suffix(".arrow")), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=41)


def write_stream(file: Path, values: list[Any]) -> None:
    table = _table(values)
    with pa.OSFile(str(file.with_suffix(".arrow")), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=41)


WRITERS = {"plain": write_plain, "gzip": write_gzip, "zstd": write_zstd, "parquet": write_parquet, "arrow": write_arrow,
           "stream": write_stream}
Writer = Callable[[Path, list[Any]], None]


def documents(path: Path) -> dict[str, list[bytes]]:
    """By split, in order."""
    found = {}
    for split in SPLITS:
        stream = np.concatenate([np.empty(0, np.uint16), *Dataset.open(str(path), split).shards()])
        ends = np.flatnonzero(stream == 256)
        found[split] = [part[part < 256].astype(np.uint8).tobytes() for part in np.split(stream, ends + 1)[:-1]]
    return found


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("piece_bytes", [500, 1 << 20])
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_every_format_gives_the_documents_in_order(writer: Writer, piece_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    writer(tmp_path / "in" / "a", TEXTS[:200])
    writer(tmp_path / "in" / "b", TEXTS[200:])
    manifest = prepare([f"{tmp_path}/in/*"], str(tmp_path / "out"), "bytes", 0.2, piece_bytes=piece_bytes)
    found = documents(tmp_path / "out")
    assert manifest.skipped == 0
    assert sorted(found["train"] + found["validation"]) == sorted(text.encode() for text in TEXTS)
    order = {text.encode(): number for number, text in enumerate(TEXTS)}
    for split in SPLITS:
        numbers = [order[document] for document in found[split]]
        assert numbers == sorted(numbers)
        shards = manifest.shards(split)
        assert sum(shard.text_bytes or 0 for shard in shards) == sum(map(len, found[split]))
    assert 20 < len(found["validation"]) < 100


def test_uri_and_path_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_plain(tmp_path / "in" / "a", TEXTS)
    write_parquet(tmp_path / "in" / "deep" / "b", TEXTS)
    for name, pattern in (("path", f"{tmp_path}/in/**/*"), ("uri", f"file://{tmp_path}/in/**/*")):
        prepare([pattern], str(tmp_path / name), piece_bytes=3000)
    assert files(tmp_path / "path") == files(tmp_path / "uri")
    prepare([f"file://{tmp_path}/in/*"], str(tmp_path / "flat"))
    assert read(tmp_path / "flat").documents("train") < read(tmp_path / "uri").documents("train")
    with pytest.raises(DataError, match="no file matches"):
        prepare([f"file://{tmp_path}/nothing/*"], str(tmp_path / "none"))


def read(path: Path) -> DatasetManifest:
    from raytrain3d.data.manifest import read_manifest

    return read_manifest(path)


def test_two_processes_give_the_bytes_of_one(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        write_plain(tmp_path / "in" / str(number), TEXTS)
    for workers in (1, 2):
        prepare([f"{tmp_path}/in/*"], str(tmp_path / f"out{workers}"), piece_bytes=4000, shard_tokens=3000,
                drop_duplicates=True, workers=LocalProcesses(workers))
    assert files(tmp_path / "out1") == files(tmp_path / "out2")
    assert read(tmp_path / "out1").duplicates == 900


KINDS: dict[str, tuple[bytes, str]] = {
    "invalid UTF-8": (b'{"text": "a\xff"}', "not UTF-8"), "surrogate": (b'{"text": "\\ud800"}', "not UTF-8"),
    "missing column": (b'{"txt": "a"}', "no column 'text'"), "null": (b'{"text": null}', "null"),
    "empty": (b'{"text": ""}', "empty"), "long": (b'{"text": "' + b"x" * 5000 + b'"}', "longer than 4,000 bytes"),
    "no JSON": (b'{"text": "a', "not JSON"), "number": (b'{"text": 3}', "column 'text' is no string"),
    "no object": (b'["text"]', "no column 'text'")}


@pytest.mark.parametrize("piece_bytes", [200, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_line_is_named_with_file_and_row(kind: str, piece_bytes: int, tmp_path: Path) -> None:
    line, reason = KINDS[kind]
    good = [json.dumps({"text": text}).encode() for text in TEXTS[:60]]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([*good[:25], b"", line, *good[25:]]))
    manifest = prepare([f"{tmp_path}/in.jsonl"], str(tmp_path / "out"), validation_fraction=0.0, piece_bytes=piece_bytes,
                       longest=4000)
    assert (manifest.skipped, manifest.bad, manifest.documents("train")) == (1, {reason: 1}, 60)
    listed = [json.loads(text) for text in (tmp_path / "out" / "bad_records.jsonl").read_text().splitlines()]
    assert listed == [{"file": f"{tmp_path}/in.jsonl", "row": 27, "reason": reason}]
    with pytest.raises(DataError, match=rf"in\.jsonl row 27: {reason}; repair it"):
        prepare([f"{tmp_path}/in.jsonl"], str(tmp_path / "fails"), piece_bytes=piece_bytes, longest=4000, fail=True)


def test_bad_rows_of_parquet_and_text(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(_table([*TEXTS[:50], None, "", "x" * 5000, *TEXTS[50:]]), tmp_path / "a.parquet",
                                row_group_size=20)
    (tmp_path / "b.txt").write_bytes(b"")
    manifest = prepare([f"{tmp_path}/a.parquet", f"{tmp_path}/b.txt"], str(tmp_path / "out"), longest=4000, piece_bytes=1)
    assert manifest.bad == {"empty": 2, "longer than 4,000 bytes": 1, "null": 1}
    listed = [json.loads(text) for text in (tmp_path / "out" / "bad_records.jsonl").read_text().splitlines()]
    assert [(Path(each["file"]).name, each["row"]) for each in listed] == [
        ("a.parquet", 51), ("a.parquet", 52), ("a.parquet", 53), ("b.txt", 1)]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PAR1 nonsense ARROW1" * 10)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        prepare([f"{tmp_path}/{name}"], str(tmp_path / "out"))


def test_a_column_of_numbers_is_an_error(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(_table(TEXTS), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column 'id' is of type int64, it must hold strings"):
        prepare([f"{tmp_path}/a.parquet"], str(tmp_path / "out"), column="id")


@pytest.mark.parametrize("drop", [False, True])
def test_a_document_longer_than_everything(drop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a part, a batch and a shard; read from a file in one go or part by part alike."""
    monkeypatch.setattr(records, "CUT_BYTES", 1000)
    text = "".join(random.Random(1).choices("ab \u00e4\n", k=30_000)).encode()
    (tmp_path / "long.txt").write_bytes(text)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text.decode()}))
    (tmp_path / "short.txt").write_text("short")
    prepare([f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl"], str(tmp_path / "out"), validation_fraction=0.0, shard_tokens=7000,
            drop_duplicates=drop)
    assert documents(tmp_path / "out")["train"] == ([text, b"short"] if drop else [text, text, b"short"])


def test_parts_of_a_long_document_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CUT_BYTES", 100)
    for alphabet in ("ab \n", "\u20ac", "a"):
        text = "".join(random.Random(2).choices(alphabet, k=3000)).encode()
        whole = list(records.split_long([text]))
        assert b"".join(whole) == text
        assert max(map(len, whole)) <= 200
        for part in whole:
            part.decode()
        for size in (1, 7, 150, 1000):
            assert list(records.split_long(text[i:i + size] for i in range(0, len(text), size))) == whole


def test_duplicates_over_ranges_of_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "RANGE_DOCUMENTS", 50)
    draw = random.Random(3)
    texts = [f"text {draw.randrange(150)}" for _ in range(400)]
    write_plain(tmp_path / "a", texts)
    prepare([f"{tmp_path}/a.jsonl"], str(tmp_path / "out"), validation_fraction=0.0, piece_bytes=700, drop_duplicates=True)
    assert documents(tmp_path / "out")["train"] == [text.encode() for text in dict.fromkeys(texts)]


SCRIPT = """
import sys
from raytrain3d.data import prepare as module
from raytrain3d.data.workers import LocalProcesses
if __name__ == "__main__":
    module.prepare([sys.argv[1]], sys.argv[2], piece_bytes=3000, drop_duplicates=True, workers=LocalProcesses(1))
"""


@pytest.mark.dist
def test_killed_again_and_again_it_is_finished_in_the_end_with_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(8):
        write_plain(tmp_path / "in" / str(number), TEXTS[number:])
    pattern = f"{tmp_path}/in/*"
    prepare([pattern], str(tmp_path / "calm"), piece_bytes=3000, drop_duplicates=True)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), pattern, str(tmp_path / "killed")]
    staging, draw, kills, seen = tmp_path / ".killed.preparing", random.Random(4), 0, 0
    while kills < 10 and not (tmp_path / "killed").exists():
        with subprocess.Popen(command, env=os.environ) as process:
            limit = time.monotonic() + 60  # past loading: until it has done something more, then at random
            while _done(staging) <= seen and process.poll() is None and time.monotonic() < limit:
                time.sleep(0.001)
            time.sleep(draw.random() * 0.02)
            process.send_signal(signal.SIGKILL)
        kills, seen = kills + 1, _done(staging)
    assert kills >= 3
    assert subprocess.run(command, timeout=120, env=os.environ).returncode == 0 or (tmp_path / "killed").exists()
    assert files(tmp_path / "killed") == files(tmp_path / "calm")
    assert not staging.exists()


def _done(staging: Path) -> int:
    return sum(1 for file in staging.glob("[ph]*-*.*")) if staging.exists() else 0


def test_finished_pieces_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raytrain3d.data import prepare as module

    write_plain(tmp_path / "a", TEXTS)
    real, done = module.tokenize_piece, []

    def dies(work: Any, piece: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(piece.number)
        return real(work, piece)

    monkeypatch.setattr(module, "tokenize_piece", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare([f"{tmp_path}/a.jsonl"], str(tmp_path / "out"), piece_bytes=2000)
    monkeypatch.setattr(module, "tokenize_piece", lambda work, piece: (done.append(piece.number), real(work, piece))[1])
    prepare([f"{tmp_path}/a.jsonl"], str(tmp_path / "out"), piece_bytes=2000)
    assert done == sorted(set(done))
    assert len(done) > 4


def test_only_one_preparation_at_a_time(tmp_path: Path) -> None:
    import fcntl

    write_plain(tmp_path / "a", TEXTS)
    (tmp_path / ".out.preparing").mkdir()
    with (tmp_path / ".out.preparing" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another preparation of the same data set is under way"):
            prepare([f"{tmp_path}/a.jsonl"], str(tmp_path / "out"))
