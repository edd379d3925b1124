"""Paths and URIs as folders, and the probe that finds an unusable one before any step."""

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain3d import files
from raytrain3d.checkpoint.remote import RemoteFolder
from raytrain3d.checkpoint.storage import (
    Folder,
    LocalFolder,
    is_absolute,
    join,
    open_folder,
    probe_directory,
)
from raytrain3d.errors import CheckpointError


@pytest.fixture(params=["local", "remote"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return LocalFolder(str(tmp_path / "a" / "b"))
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
    return RemoteFolder(SubTreeFileSystem(str(tmp_path), LocalFileSystem()), "a/b")


def _write(folder: Folder, name: str, data: bytes) -> None:
    with folder.writing(name) as path:
        Path(path).write_bytes(data)


def test_a_file_appears_whole(folder: Folder, tmp_path: Path) -> None:
    assert folder.names() == []
    with folder.writing("x") as path:
        Path(path).write_bytes(b"half")
        assert "x" not in folder.names()
    _write(folder, "x", b"new")
    with folder.reading("x") as path:
        assert Path(path).read_bytes() == b"new"
    with folder.opened("x") as file:
        part = memoryview(bytearray(9))
        assert (file.seek(0, 2), file.seek(1), file.readinto(part)) == (3, 1, 2)
        assert bytes(part[:2]) == b"ew"
    assert folder.names() == ["x"] == os.listdir(tmp_path / "a" / "b")


def test_a_failed_write_leaves_what_was_there(folder: Folder) -> None:
    _write(folder, "x", b"old")
    with pytest.raises(RuntimeError), folder.writing("x") as path:
        Path(path).write_bytes(b"half")
        raise RuntimeError
    with folder.reading("x") as path:
        assert Path(path).read_bytes() == b"old"
    assert folder.names() == ["x"]


def test_removal(folder: Folder, tmp_path: Path) -> None:
    _write(folder.child("c"), "x", b"1")
    folder.child("c").remove_if_empty()
    assert folder.names() == ["c"]
    folder.child("c").remove("x")
    folder.child("c").remove("x")
    folder.child("c").remove_if_empty()
    assert folder.names() == []


def test_a_missing_file_is_named(folder: Folder) -> None:
    with pytest.raises(CheckpointError, match=r"a/b/x is missing"), folder.reading("x"):
        pass


def test_probe_leaves_nothing(folder: Folder) -> None:
    probe_directory(folder)
    assert folder.names() == []


def test_probe_names_an_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=rf"directory {tmp_path}/file/run is not usable: cannot write .*"
                                              r"Not a directory. Choose another run.directory"):
        probe_directory(str(tmp_path / "file" / "run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_probe_names_a_directory_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        probe_directory(str(tmp_path))
    tmp_path.chmod(0o700)


def test_probe_notices_a_file_that_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFolder, "names", lambda _: [])
    with pytest.raises(CheckpointError, match="is not listed there"):
        probe_directory(str(tmp_path))


def test_uris(tmp_path: Path) -> None:
    assert open_folder(f"file://{tmp_path}/x%20y").path == f"{tmp_path}/x y"
    with pytest.raises(CheckpointError, match="cannot open storage nowhere://bucket/x"):
        open_folder("nowhere://bucket/x")
    assert join("s3://bucket/runs/", "one", "checkpoints") == "s3://bucket/runs/one/checkpoints"
    assert join("s3://bucket/runs/?scheme=http", "one") == "s3://bucket/runs/one?scheme=http"
    assert join("/runs/a?b", "one") == "/runs/a?b/one"
    assert [is_absolute(x) for x in ("/a", "s3://b", "runs")] == [True, True, False]


class Flaky:
    """A filesystem whose methods fail as often as the test says, each time before they do anything."""

    def __init__(self, root: Path) -> None:
        from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
        self._real = SubTreeFileSystem(str(root), LocalFileSystem())
        self.failures: Counter[str] = Counter()
        self.hangs: set[str] = set()
        """Methods that do not come back before `released`."""
        self.released = threading.Event()
        self.type_name = "flaky"

    def __getattr__(self, name: str) -> Any:
        def method(*arguments: Any, **keywords: Any) -> Any:
            if name in self.hangs:
                self.released.wait()
            if self.failures[name] > 0:
                self.failures[name] -= 1
                raise OSError("connection reset")
            return getattr(self._real, name)(*arguments, **keywords)
        return method


def test_a_request_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAITS_S", (0.001, 0.001))
    flaky = Flaky(tmp_path)
    folder = RemoteFolder(flaky, "a")
    flaky.failures.update(create_dir=1, open_output_stream=1, get_file_info=2, open_input_file=2)
    _write(folder, "x", b"whole")
    with folder.reading("x") as path:
        assert Path(path).read_bytes() == b"whole"
    flaky.failures.update(get_file_info=1, delete_file=2)
    folder.remove("x")
    assert folder.names() == [] and not flaky.failures.total()
    flaky.failures.update(move=3)
    with pytest.raises(CheckpointError, match=r"cannot write flaky:a/x: connection reset"):
        _write(folder, "x", b"whole")


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flaky]:
    """A filesystem whose calls may take 50 ms."""
    monkeypatch.setattr(files, "ANSWER_S", 0.05)
    flaky = Flaky(tmp_path)
    yield flaky
    flaky.released.set()


@pytest.mark.parametrize("call", ["create_dir", "open_output_stream", "move", "get_file_info", "open_input_file",
                                  "delete_file"])
def test_a_store_that_hangs_is_an_error(call: str, hanging: Flaky) -> None:
    folder = RemoteFolder(hanging, "a")
    _write(folder, "x", b"whole")
    hanging.hangs = {call}
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"cannot (write|list|read|delete) .*: the store gave no answer in 0.05 s"):
        match call:
            case "get_file_info":
                folder.names()
            case "open_input_file":
                with folder.reading("x"):
                    pass
            case "delete_file":
                folder.remove("x")
            case _:
                _write(folder, "x", b"other")
    assert time.monotonic() - start < 1, "and is not asked again at once"
    hanging.hangs.clear()
    with folder.reading("x") as path:
        assert Path(path).read_bytes() == b"whole"


def test_a_file_that_hangs_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where closing it would hang: what is read late goes nowhere."""
    class Stuck:
        closing, released = threading.Event(), threading.Event()

        def read(self, size: int) -> bytes:
            self.released.wait()
            return b"late" * size

        def close(self) -> None:
            self.closing.set()
            self.released.wait()

    monkeypatch.setattr(files, "ANSWER_S", 0.05)
    start = time.monotonic()
    with pytest.raises(files.NoAnswer, match=r"no answer in 0\.05 s"), files.Answering(Stuck()) as file:
        file.read(1)
    assert time.monotonic() - start < 1 and Stuck.closing.wait(10)
    Stuck.released.set()


def test_what_a_call_raises_or_has_is_passed_on(tmp_path: Path) -> None:
    flaky = Flaky(tmp_path)
    answering = files.Answering(flaky)
    assert answering.type_name == "flaky"
    flaky.failures.update(create_dir=1)
    with pytest.raises(OSError, match="connection reset"):
        answering.create_dir("a")


def test_a_spool_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while it is there, so a killed process leaves nothing either."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    folder = RemoteFolder(Flaky(tmp_path), "a")
    with folder.writing("x") as path:
        Path(path).write_bytes(b"1" * 1000)
        assert os.listdir(tmp_path / "spool") == []
    with folder.reading("x") as path:
        assert Path(path).read_bytes() == b"1" * 1000 and os.listdir(tmp_path / "spool") == []
