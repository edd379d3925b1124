"""Scalars of a run as TensorBoard reads them, written without TensorBoard: a row of records in the framing of
https://www.tensorflow.org/tutorials/load_data/tfrecord, each an `Event` message of tensorboard/compat/proto/event.proto."""

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raytrain3d.metrics.catalogue import CATALOGUE
from raytrain3d.metrics.records import Record

POLYNOMIAL = 0x82F63B78
"""Of CRC-32C, bits reversed."""
LENGTH_DELIMITED, FIXED_64, FIXED_32, VARINT = 2, 1, 5, 0


def _table() -> Iterator[int]:
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (POLYNOMIAL if value & 1 else 0)
        yield value


TABLE = tuple(_table())


class TensorBoardFile:
    """Gets the lines of metrics.jsonl and events.jsonl, and writes every figure that is one number, named as in the
    catalogue.

    A step that is done again is written again: TensorBoard shows what came last.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._file = (directory / f"events.out.tfevents.{int(now)}.{socket.gethostname()}").open("ab", buffering=0)
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def step(self, record: Record) -> None:
        self._scalars(record, {metric.name: value for metric in CATALOGUE if metric.file == "metrics.jsonl"
                               and metric.type == "gauge" and not metric.labels for _, value in metric.read(record)})

    def event(self, record: Record) -> None:
        self._scalars(record, {metric.name: value for metric in CATALOGUE if metric.event == record["event"] and metric.path
                               and metric.type == "gauge" for _, value in metric.read(record)})

    def close(self) -> None:
        self._file.close()

    def _scalars(self, record: Mapping[str, Any], values: Mapping[str, float]) -> None:
        if values:
            summary = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in values.items())
            self._write(_double(1, record["time"]) + _whole(2, record["step"]) + _bytes(5, summary))

    def _write(self, event: bytes) -> None:
        """One record, at once, so that a reader sees no half of it for long."""
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_checksum(length) + event + _masked_checksum(event))


def crc32c(data: bytes) -> int:
    """RFC 3720, appendix B.4."""
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked_checksum(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, LENGTH_DELIMITED) + _varint(len(value)) + value


def _whole(number: int, value: int) -> bytes:
    return _key(number, VARINT) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _key(number, FIXED_64) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _key(number, FIXED_32) + struct.pack("<f", value)
