"""What is saved stays: processes killed while they save, disks that are full, files that are cut, changed or lost."""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain3d.checkpoint import writer
from raytrain3d.checkpoint.layout import Piece
from raytrain3d.checkpoint.shard import WRITTEN_BYTES
from raytrain3d.checkpoint.snapshot import HostMemory
from raytrain3d.checkpoint.store import clean, commit, damage, prune, read_into, read_manifest, step_directory, steps
from raytrain3d.checkpoint.writer import ShardWriter
from raytrain3d.errors import CheckpointError
from raytrain3d.plan.params import Rectangle

KILLS = 20


def save_behind(writers: list[ShardWriter], memories: list[HostMemory], ranks: list[Any], directory: str, step: int,
                config: Any) -> None:
    """What ranks and driver do together to save."""
    for shard_writer, memory, rank in zip(writers, memories, ranks, strict=True):
        shard_writer.start(directory, step, memory.copy(rank.pieces), behind=True)
    while any(each.progress.receipt is None for each in writers):
        time.sleep(0.0005)
    commit(directory, step, [each.progress.receipt for each in writers if each.progress.receipt], config=config)


def save_forever(run: str, checkpoints: Any, first: int) -> None:
    """Checkpoints of steps `first` and on; the values of step n are drawn from n. Keeps two."""
    torch.set_num_threads(1)
    config = checkpoints.config()
    ranks = checkpoints.ranks(config, checkpoints.truth(config), tensor=1, data=2, stages=[range(4)], sharded=True)
    writers, memories = [ShardWriter(rank) for rank in range(2)], [HostMemory(), HostMemory()]
    for step in range(first, first + 1000):
        truth = checkpoints.truth(config, step)
        for rank in ranks:
            checkpoints.fill(rank, truth)
        save_behind(writers, memories, ranks, step_directory(run, step), step, config)
        prune(run, 2)


def test_a_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path: Path, checkpoints: Any, forks: Any) -> None:
    run, draw, known = str(tmp_path), random.Random(11), 0
    config = checkpoints.config()
    for _ in range(KILLS):
        process = forks.Process(target=save_forever, args=(run, checkpoints, known + 1))
        process.start()
        wait_for_step(run, known + 1)
        time.sleep(draw.random() * 0.1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = steps(run)
        assert found[-1] > known and len(found) <= 3
        clean(run)
        for step in found:
            truth = checkpoints.truth(config, step)
            rank = checkpoints.one_rank(config, truth)
            read_into(step_directory(run, step), rank.pieces)
            checkpoints.check(rank, truth)
        assert steps(run) == found, "cleaning keeps what is whole"
        left = {path.relative_to(run).parts[1] for path in Path(run).rglob("*") if path.is_file()}
        assert left == {f"step-{step}" for step in found}, "and nothing else"
        known = found[-1]


def wait_for_step(run: str, step: int) -> None:
    end = time.monotonic() + 60
    while not any(n >= step for n in steps(run)):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def forks() -> Iterator[Any]:
    """Processes that are copies of one that has loaded torch; it is gone afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "raytrain3d.checkpoint.writer"])
    yield context
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mount.returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_until_room_is_made(small_disk: Path, checkpoints: Any,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FIRST_WAIT_S", 0.02)
    config = checkpoints.config()
    truth = checkpoints.truth(config)
    rank = checkpoints.one_rank(config, truth)
    checkpoints.fill(rank, truth)
    (small_disk / "ballast").write_bytes(b"0" * 1_000_000)
    shard_writer, directory = ShardWriter(0), step_directory(str(small_disk), 1)
    shard_writer.start(directory, 1, rank.pieces, behind=True)
    while (progress := shard_writer.progress).failures < 2:
        time.sleep(0.005)
    assert progress.error == f"cannot write {directory}/rank-0000.safetensors: No space left on device"
    assert os.listdir(directory) == [] and progress.receipt is None
    (small_disk / "ballast").unlink()
    while (progress := shard_writer.progress).receipt is None:
        assert progress.failures < 20
        time.sleep(0.005)
    commit(directory, 1, [progress.receipt], config=config)
    assert damage(directory) == []


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_disk_that_fails(call: str, tmp_path: Path, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected at every call that may meet it. Earlier checkpoints stay whole, no half file stays."""
    run = str(tmp_path)
    earlier = checkpoints.save(run, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match=r"cannot write .*/step-2/rank-0000.safetensors: No space left on device"):
            checkpoints.save(run, 2)
    assert steps(run) == [1] and damage(earlier) == []
    assert [path for path in Path(run).rglob("*") if path.is_file() and "step-2" in str(path)] == []
    clean(run)
    assert damage(checkpoints.save(run, 2)) == []


def test_a_manifest_that_cannot_be_written_makes_no_checkpoint(tmp_path: Path, checkpoints: Any,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if target.endswith("manifest.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*/step-3/manifest.json: No space left on device"):
        checkpoints.save(str(tmp_path), 3)
    assert steps(str(tmp_path)) == [] and clean(str(tmp_path)) == [3]


class Rests(threading.Event):
    """Instead of resting it notes for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return False


def test_writing_behind_the_training_rests_until_it_is_in_haste(tmp_path: Path) -> None:
    size = 3 * WRITTEN_BYTES // 4
    piece = Piece(name="a", kind="weight", rectangle=Rectangle(offset=(0,), shape=(size,)), tensor=torch.zeros(size))
    shard_writer = ShardWriter(0, share=0.05)
    shard_writer._in_haste = rests = Rests()

    def write(step: int, *, behind: bool) -> None:
        rests.seconds.clear()
        shard_writer.start(str(tmp_path / f"step-{step}"), step, [piece], behind=behind)
        while shard_writer.progress.receipt is None:
            time.sleep(0.002)

    start = time.process_time()
    write(1, behind=True)
    used = time.process_time() - start
    assert len(rests.seconds) == 3 and 0 < sum(rests.seconds) <= 19 * used
    assert min(rests.seconds[1:]) > 19 * 0.0005, "checksum and copy of 8 MiB take more than half a millisecond"
    write(2, behind=False)
    assert rests.seconds == []


def test_a_save_that_is_called_off_ends_at_the_next_piece(tmp_path: Path, checkpoints: Any,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    config = checkpoints.config()
    rank = checkpoints.one_rank(config, checkpoints.truth(config))
    shard_writer = ShardWriter(0)
    reached: list[int] = []

    def slow(self: ShardWriter) -> None:
        reached.append(1)
        time.sleep(0.02)
        give_way(self)
    give_way = ShardWriter._give_way
    monkeypatch.setattr(ShardWriter, "_give_way", slow)
    shard_writer.start(str(tmp_path / "step"), 1, rank.pieces, behind=True)
    while not reached:
        time.sleep(0.001)
    shard_writer.call_off()
    assert len(reached) < len(rank.pieces) and shard_writer.progress.receipt is None
    assert os.listdir(tmp_path / "step") == []


@pytest.mark.parametrize("kind", ["cut", "flipped", "lost", "longer", "emptied"])
def test_damaged_shards_are_found_and_named(kind: str, tmp_path: Path, checkpoints: Any, refusal: Any) -> None:
    """Wherever in the file, by loading and by `damage`."""
    draw, config = random.Random(kind), checkpoints.config()
    rank = checkpoints.one_rank(config, checkpoints.truth(config))
    for step in range(1, 9):
        directory = checkpoints.save(str(tmp_path), step)
        shard = Path(directory, "rank-0000.safetensors")
        content = bytearray(shard.read_bytes())
        match kind:
            case "cut":
                content = content[: draw.randrange(len(content))]
            case "flipped":
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            case "longer":
                content += b"\0" * draw.randint(1, 100)
            case "emptied":
                content = bytearray()
        shard.write_bytes(content)
        if kind == "lost":
            shard.unlink()
        for message in (refusal(lambda place=directory: read_into(place, rank.pieces)), *damage(directory)):
            assert message.startswith(str(shard)), message
        assert read_manifest(directory).step == step
