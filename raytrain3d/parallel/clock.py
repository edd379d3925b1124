"""When things happened on the device, without making anyone wait for it."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks that are compared later."""

    def mark(self) -> Any:
        """Now, as the device will get to it."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another. The device must have passed both: after the commit of a step it has."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has got to it. From any thread."""

    def wait(self) -> None:
        """Until the device has passed every mark."""


class HostClock:
    """For CPUs, where an op is over when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def passed(self, mark: float) -> bool:
        return True

    def wait(self) -> None:
        pass


class DeviceClock:
    """For GPUs: events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()


def clock_for(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else HostClock()
