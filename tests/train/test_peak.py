"""What a CPU is measured to reach."""

import pytest
import torch

from raytrain3d.train import peak
from raytrain3d.train.peak import measured_flops, peak_flops


def test_a_cpu_reaches_what_its_best_product_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which the products take 3, 1 and 2 s."""
    ticks = iter([0.0, 0.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(peak, "SIZE", 8)
    assert measured_flops(torch.float32) == 2 * 8**3 / 1.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_every_type_of_training_has_a_peak(dtype: str) -> None:
    reached = peak_flops(torch.device("cpu"), dtype)
    assert reached is not None and 1e6 < reached < 1e16


def test_a_gpu_is_looked_up_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops.__wrapped__(torch.device("cuda:0"), "bf16") == 989e12
