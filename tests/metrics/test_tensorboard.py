"""Files for TensorBoard, read back by TensorBoard where it is installed, and by the bytes that the formats prescribe."""

import struct
from pathlib import Path

import pytest

from raytrain3d.metrics.tensorboard import TensorBoardFile, crc32c

RECORDS = [{"time": 100.0 + step, "step": step, "loss": 5.0 / step, "seconds": 0.5, "tokens": 10} for step in (1, 2, 300)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = TensorBoardFile(tmp_path)
    for record in RECORDS:
        file.step(record)
    file.event({"time": 401.0, "step": 300, "event": "validation", "text": "", "loss": 1.25})
    file.event({"time": 402.0, "step": 300, "event": "started", "text": ""})
    file.close()
    (path,) = tmp_path.iterdir()
    return path


def test_checksums_are_those_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_records_are_framed(written: Path) -> None:
    data, events = written.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(data[12:12 + length])
        data = data[16 + length:]
    assert len(events) == 1 + 3 + 1
    assert b"brain.Event:2" in events[0]
    assert events[1] == (b"\x09" + struct.pack("<d", 101.0) + b"\x10\x01" + b"\x2a" + bytes([len(events[1]) - 13])
                         + events[1][13:]) and b"loss\x15" + struct.pack("<f", 5.0) in events[1]
    assert b"\x10\xac\x02" in events[3], "step 300"


def test_tensorboard_reads_them(written: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(written))
    events.Reload()
    assert [(each.step, each.wall_time) for each in events.Scalars("loss")] == [(1, 101.0), (2, 102.0), (300, 400.0)]
    assert [each.value for each in events.Scalars("loss")] == pytest.approx([5.0, 2.5, 5.0 / 300])
    assert [each.value for each in events.Scalars("validation_loss")] == [1.25]
