"""AdamW on flat buffers against torch's."""

from dataclasses import replace

import pytest
import torch
from jobs import small_job

from raytrain3d.config import JobConfig
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.parallel.optimizer import update
from raytrain3d.plan.mesh import Coordinate, Mesh
from raytrain3d.plan.params import model_spec


def block_state(config: JobConfig, mesh: Mesh, data: int = 0, tensor: int = 0) -> LayerState:
    spec = model_spec(config.model, config.train, mesh.tensor).layers[1]
    state = LayerState(spec, config, mesh, Coordinate(data=data, pipeline=0, tensor=tensor), torch.device("cpu"))
    state.fill(lambda name, param, part: torch.linspace(-1, 1, max(1, part.size))[: part.size].view(part.shape))
    return state


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay_all", [False, True])
def test_updates_equal_torch(decay_all: bool, fused: bool) -> None:
    config = small_job()
    config = replace(config, optimizer=replace(config.optimizer, decay_all=decay_all, weight_decay=0.3, fused=fused))
    state = block_state(config, Mesh())
    copies = {name: p.detach().clone().requires_grad_() for name, p in state.parameters.items()}
    groups = [{"params": [p for p in copies.values() if decay_all or p.ndim == 2], "weight_decay": 0.3},
              {"params": [p for p in copies.values() if not decay_all and p.ndim == 1], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    torch.manual_seed(0)
    for step in range(1, 6):
        for name, copy in copies.items():
            copy.grad = torch.randn_like(copy)
            state.parameters[name].grad.copy_(copy.grad * 8)  # type: ignore[union-attr]
        optimizer.step()
        update(state, config.optimizer, step=step, rate=0.01, scale=1 / 8)
        for name, copy in copies.items():
            torch.testing.assert_close(state.parameters[name].detach(), copy.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fused", [False, True])
def test_shards_of_the_optimizer_make_the_same_update(fused: bool) -> None:
    """Three data ranks that each update their part hold together what one rank computes, to the bit."""
    config = small_job(mesh={"data": 3})
    config = replace(config, optimizer=replace(config.optimizer, fused=fused))
    sharded = replace(config, train=replace(config.train, sharding="optimizer"))
    whole = block_state(config, Mesh(data=3))
    parts = [block_state(sharded, Mesh(data=3), data=d) for d in range(3)]
    torch.manual_seed(0)
    whole.gradient.copy_(torch.randn_like(whole.gradient))
    for part in parts:
        part.gradient.copy_(whole.gradient)
        update(part, config.optimizer, step=1, rate=0.01, scale=0.5)
    update(whole, config.optimizer, step=1, rate=0.01, scale=0.5)
    assert torch.equal(torch.cat([part.own_weights for part in parts]), whole.weights)
    assert torch.equal(torch.cat([part.exp_avg_sq for part in parts]), whole.exp_avg_sq)


def test_norm_counts_every_gradient_element_once() -> None:
    config = small_job(model={"kv_heads": 2, "qk_norm": True}, mesh={"data": 3, "tensor": 4})
    mesh = Mesh(data=3, tensor=4)
    total = 0.0
    for data in range(3):
        for tensor in range(4):
            state = block_state(config, mesh, data, tensor)
            for parameter in state.parameters.values():
                parameter.grad.fill_(1.0)  # type: ignore[union-attr]
            total += sum(norm.item() ** 2 for norm in state.norms())
    spec = model_spec(config.model, config.train, 4).layers[1]
    assert total == pytest.approx(spec.num_parameters)


def test_bf16_keeps_exact_master_weights() -> None:
    config = small_job(train={"dtype": "bf16"})
    state = block_state(config, Mesh())
    assert state.weights.dtype == torch.bfloat16
    assert state.master.dtype == state.gradient.dtype == torch.float32
    before = state.weights.clone()
    state.gradient.fill_(1.0)
    for step in range(1, 4):
        state.gradient.fill_(1.0)
        update(state, config.optimizer, step=step, rate=1e-6, scale=1.0)
    assert torch.equal(state.weights, state.master.bfloat16())
    moved = (state.master - before.float()).abs() > 0
    assert moved.any()
