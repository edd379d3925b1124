"""Most memory in use during some work, as torch's CPU allocator sees it, which keeps no statistics of its own."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Of what is allocated within `work`, temporaries included. What was there before does not count."""
    work()  # so that what is made once, and kept, is there before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    results: Any = profiled.profiler
    events = [(event.start_ns(), event.nbytes()) for event in results.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(num_bytes for _, num_bytes in sorted(events)))
