"""Peak of a GPU by the name that its driver gives it: what model FLOPs utilization is a share of. Pure."""

import re
from dataclasses import dataclass

from raytrain3d.plan.catalogue import NODES, Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A GPU with the name of another and less speed."""

    name: str
    peak_tflops: float
    """Dense matrix products in bf16, in 10^12 FLOPs a second."""
    peak_tflops_fp32: float
    source: str

    def peak_flops(self, dtype: str) -> float:
        """FLOPs a second. fp64 counts as half of fp32."""
        return {"bf16": self.peak_tflops, "fp32": self.peak_tflops_fp32, "fp64": self.peak_tflops_fp32 / 2}[dtype] * 1e12


VARIANTS = (
    Variant(name="h100 pcie", peak_tflops=756, peak_tflops_fp32=378, source="NVIDIA H100 PCIe data sheet (dense)"),
    Variant(name="h100 nvl", peak_tflops=835, peak_tflops_fp32=417, source="NVIDIA H100 NVL data sheet (dense)"),
)


def data_sheet_flops(device_name: str, dtype: str) -> float | None:
    """FLOPs a second of, for example, `NVIDIA H100 80GB HBM3` in `bf16`. None for a GPU that no data sheet here is of."""
    known: tuple[Variant | Node, ...] = (*VARIANTS, *(node for name, node in NODES.items() if name != "cpu"))
    for each in known:  # variants first: they have the name of another in theirs
        if re.search(rf"\b{re.escape(each.name)}\b", device_name.lower()):
            return each.peak_flops(dtype)
    return None
