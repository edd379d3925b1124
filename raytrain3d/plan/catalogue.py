"""Devices and nodes that a plan can be made for: data-sheet figures, each with its source.

What a device reaches of them is another matter: `calibration.py`. A JSON file of the same fields adds nodes or replaces
them (`read_nodes`).
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from raytrain3d.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of equal devices."""

    name: str
    devices: int
    """Devices of a node; for `cpu`, ranks."""
    peak_tflops: float
    """Of one device, dense matrix products in bf16, in 10^12 FLOPs a second."""
    peak_tflops_fp32: float
    """The same in fp32."""
    memory_gib: float
    """Memory of a device, in GiB."""
    memory_gb_s: float
    """Bandwidth of that memory, in 10^9 bytes a second."""
    inside_gb_s: float
    """Link to the other devices of the node: 10^9 bytes a second and device, one direction."""
    network_gb_s: float
    """Network: 10^9 bytes a second and device, one direction."""
    source: str
    """Where the figures are from."""
    host_gb_s: float = 32
    """Link to the host's memory: 10^9 bytes a second and device, one direction. What is offloaded crosses it."""
    host_memory_gb_s: float = 50
    """Bandwidth of the host's memory, a device's part of it. An optimizer on the host is bound by it."""

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if not isinstance(value, str) and value <= 0:
                raise PlanError(f"node {self.name}: {name} is {value}: must be above 0")

    def peak_flops(self, dtype: str) -> float:
        """FLOPs a second of a device. fp64 counts as half of fp32."""
        return {"bf16": self.peak_tflops, "fp32": self.peak_tflops_fp32, "fp64": self.peak_tflops_fp32 / 2}[dtype] * 1e12

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return round(self.memory_gib * 2**30)


NODES = {node.name: node for node in (
    Node(name="a100", devices=8, peak_tflops=312, peak_tflops_fp32=156, memory_gib=80, memory_gb_s=2039, inside_gb_s=300,
         network_gb_s=25, source="NVIDIA A100 80GB SXM data sheet (fp32 as TF32; NVLink 600 GB/s counts both directions); "
         "a 200 Gbit/s HDR port for each GPU as in arXiv 2104.04473; host of DGX A100 (PCIe 4.0 x16, 16 channels DDR4-3200)",
         host_gb_s=32, host_memory_gb_s=51),
    Node(name="h100", devices=8, peak_tflops=989, peak_tflops_fp32=494, memory_gib=80, memory_gb_s=3350, inside_gb_s=450,
         network_gb_s=50, source="NVIDIA H100 SXM data sheet (dense; NVLink 900 GB/s counts both directions); a 400 Gbit/s "
         "port for each GPU as in DGX H100, and its host (PCIe 5.0 x16, 16 channels DDR5-4800)", host_gb_s=64,
         host_memory_gb_s=76),
    Node(name="h200", devices=8, peak_tflops=989, peak_tflops_fp32=494, memory_gib=141e9 / 2**30, memory_gb_s=4800,
         inside_gb_s=450, network_gb_s=50, source="NVIDIA H200 SXM data sheet (dense); ports and host as in DGX H200",
         host_gb_s=64, host_memory_gb_s=76),
    Node(name="b200", devices=8, peak_tflops=2250, peak_tflops_fp32=1125, memory_gib=180e9 / 2**30, memory_gb_s=8000,
         inside_gb_s=900, network_gb_s=50, source="NVIDIA HGX B200 data sheet (dense; NVLink 1.8 TB/s counts both "
         "directions); 400 Gbit/s ports and host as in DGX B200 (PCIe 5.0 x16, 16 channels DDR5-4400)", host_gb_s=64,
         host_memory_gb_s=70),
    Node(name="l40s", devices=8, peak_tflops=362, peak_tflops_fp32=183, memory_gib=48e9 / 2**30, memory_gb_s=864,
         inside_gb_s=32, network_gb_s=12.5, source="NVIDIA L40S data sheet (dense; PCIe 4.0 x16); four 200 Gbit/s ports for "
         "eight GPUs as in NVIDIA's L40S reference node"),
    Node(name="cpu", devices=2, peak_tflops=0.1, peak_tflops_fp32=0.1, memory_gib=4, memory_gb_s=10, inside_gb_s=2,
         network_gb_s=1.25, source="an ordinary two-core machine, a core for each rank, 10 Gbit/s Ethernet; a profile of "
         "your own says more", host_gb_s=10, host_memory_gb_s=10),
)}
"""By name."""


def node_named(name: str, nodes: dict[str, Node] | None = None) -> Node:
    """PlanError if there is none."""
    known = NODES if nodes is None else nodes
    if name not in known:
        raise PlanError(f"no node type {name!r}: there are {', '.join(known)}")
    return known[name]


def read_nodes(path: str) -> dict[str, Node]:
    """The catalogue with the nodes of a JSON file: a list of objects with the fields of `Node`. PlanError if it is none."""
    try:
        found: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))
        return NODES | {node.name: node for node in (Node(**entry) for entry in found)}
    except OSError as error:
        raise PlanError(f"node file {path!r} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError) as error:
        wanted = ", ".join(field.name for field in fields(Node))
        raise PlanError(f"node file {path!r}: {error}; it must be a JSON list of objects with {wanted}") from None
