"""Every named schedule with the numbers of chunks to try it with."""

from raytrain3d.plan.schedule import SCHEDULES

CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (1, 2, 3), "breadth_first": (1, 2, 3), "zb_h1": (1,), "zb_v": (2,)}
assert CHUNKS.keys() == SCHEDULES.keys()

NAMED = [(name, chunks) for name, numbers in CHUNKS.items() for chunks in numbers]
