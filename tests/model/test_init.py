"""Initial weights and dropout masks do not depend on who asks."""

import torch

from raytrain3d.config import ModelConfig
from raytrain3d.model.dropout import DropoutKeys, drop_mask
from raytrain3d.model.init import initial_values
from raytrain3d.plan.params import ParamSpec, Rectangle

MODEL = ModelConfig(vocabulary=300, hidden=16, blocks=2, heads=2, feed_forward=8)
PARAM = ParamSpec(name="tokens.weight", shape=(300, 16), split=0)


def part(offset: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return initial_values(MODEL, 7, "embedding.tokens.weight", PARAM, Rectangle(offset=offset, shape=shape))


def test_any_rectangle_is_a_slice_of_the_whole() -> None:
    whole = part((0, 0), (300, 16))
    for offset, shape in (((0, 0), (1, 16)), ((63, 3), (2, 5)), ((120, 0), (180, 16)), ((64, 8), (64, 8))):
        rows, columns = (slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        assert torch.equal(part(offset, shape), whole[rows, columns])


def test_seed_and_name_matter_and_the_spread_is_right() -> None:
    whole = part((0, 0), (300, 16))
    full = Rectangle(offset=(0, 0), shape=(300, 16))
    assert not torch.equal(whole, initial_values(MODEL, 8, "embedding.tokens.weight", PARAM, full))
    assert not torch.equal(whole, initial_values(MODEL, 7, "head.output.weight", PARAM, full))
    assert abs(whole.std().item() / MODEL.initial_std - 1) < 0.05
    residual = ParamSpec(name="mlp.down.weight", shape=(300, 16), initial="residual")
    assert abs(initial_values(MODEL, 7, "x", residual, full).std().item() / (MODEL.initial_std / 2) - 1) < 0.05


def test_masks_depend_on_the_sample_not_on_the_micro_batch() -> None:
    def draw(*samples: int, layer: int = 1, site: str = "a", step: int = 3) -> torch.Tensor:
        keys = DropoutKeys(seed=1, step=step, samples=samples)
        return drop_mask(keys, layer, site, 0.1, (50, 40), slice(None), torch.device("cpu"))

    assert torch.equal(draw(4, 5), torch.cat((draw(4), draw(5))))
    for other in (draw(6), draw(4, layer=2), draw(4, site="b"), draw(4, step=4)):
        assert not torch.equal(draw(4), other)
    assert abs(draw(*range(20)).float().mean().item() - 0.1) < 0.01
