"""Peaks by the names that drivers give GPUs."""

import pytest

from raytrain3d.plan.device_peak import VARIANTS, data_sheet_flops


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835),
    ("NVIDIA H200", 989), ("NVIDIA B200", 2250), ("NVIDIA L40S", 362),
])
def test_peak_by_name(name: str, tflops: float) -> None:
    assert data_sheet_flops(name, "bf16") == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A10G", "AMD Instinct MI300X", "cpu"])
def test_a_gpu_that_only_sounds_like_one_is_not_known(name: str) -> None:
    assert data_sheet_flops(name, "bf16") is None


def test_types_have_their_own_peaks() -> None:
    assert data_sheet_flops("NVIDIA H100 80GB HBM3", "fp32") == 494e12
    assert data_sheet_flops("NVIDIA H100 80GB HBM3", "fp64") == 247e12
    assert all(each.source for each in VARIANTS)
