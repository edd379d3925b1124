"""The runner by itself: when weight gradients are added, what is kept and for how long, who may reuse a buffer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job
from rank_pool import RankPool
from torch import Tensor, nn

from raytrain3d.config import JobConfig
from raytrain3d.model.functional import linear, put_off
from raytrain3d.parallel.channels import Buffers
from raytrain3d.parallel.clock import HostClock
from raytrain3d.parallel.pipeline import Feed, PipelineRun, Stage
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.rank_program import RankProgram
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.train.trainer import Trainer


class LinearLayer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        self.weight.grad = torch.zeros_like(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class PassOn(nn.Module):
    """Hands on the very tensor it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Post:
    """Stands in for Mail: messages that were prepared, sends that are kept, buffers that are overwritten when freed."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.released: list[Tensor] = []

    def receive(self, op: Op) -> Tensor:
        return torch.ones(1, 2, 3)

    def send(self, op: Op, tensor: Tensor) -> None:
        self.sent.append(tensor)

    def release(self, tensor: Tensor) -> None:
        self.released.append(tensor.fill_(torch.nan))

    def finish(self) -> None:
        pass


class Watch:
    """Calls layer_done(layer) when the gradient of a layer is complete."""

    def __init__(self, layer_done: Callable[[int], None]) -> None:
        self._layer_done = layer_done

    def before(self, kind: Kind, layer: int) -> None:
        pass

    def after(self, kind: Kind, layer: int, *, last: bool) -> None:
        if last:
            self._layer_done(layer)


def run(layers: dict[int, nn.Module], *kinds: Kind, around: Watch | None = None) -> tuple[PipelineRun, Post]:
    """Ops of micro-batch 0 at stage 1 of 3."""
    post = Post()
    feed = Feed(tokens=lambda i: torch.ones(1, 2, 3), arguments=lambda i, layer: ())
    pipeline = PipelineRun({1: Stage(layers, is_first=False, is_last=False)}, post, feed,  # type: ignore[arg-type]
                           put_off=put_off, clock=HostClock(), around=[around] if around else [])
    pipeline.execute(RankProgram(ops=tuple(Op(kind, 1, 0) for kind in kinds), channels={}, arrivals={}, delivered={}))
    return pipeline, post


FORWARD = (Kind.RECEIVE_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)


def test_a_split_backward_adds_the_weight_gradient_in_its_second_part() -> None:
    whole = {0: LinearLayer(0), 1: LinearLayer(1)}
    run(whole, *FORWARD, Kind.BACKWARD, Kind.SEND_BACKWARD)
    first = {0: LinearLayer(0), 1: LinearLayer(1)}
    _, post = run(first, *FORWARD, Kind.BACKWARD_INPUT, Kind.SEND_BACKWARD)
    assert len(post.sent) == 2
    assert all(not layer.weight.grad.any() for layer in first.values())
    both = {0: LinearLayer(0), 1: LinearLayer(1)}
    run(both, *FORWARD, Kind.BACKWARD_INPUT, Kind.SEND_BACKWARD, Kind.BACKWARD_WEIGHT)
    for index in whole:
        assert torch.equal(both[index].weight.grad, whole[index].weight.grad)


@pytest.mark.parametrize("kinds", [(Kind.BACKWARD,), (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)])
def test_layers_are_done_from_last_to_first_after_their_last_weight_gradient(kinds: tuple[Kind, ...]) -> None:
    layers = {0: LinearLayer(0), 1: LinearLayer(1)}
    seen: list[tuple[int, bool]] = []
    run(layers, *FORWARD, *kinds, around=Watch(lambda layer: seen.append((layer, bool(layers[layer].weight.grad.any())))))
    assert seen == [(1, True), (0, True)]


def test_messages_are_released_with_the_last_part_of_the_backward() -> None:
    assert not run({0: LinearLayer(0)}, *FORWARD, Kind.BACKWARD_INPUT)[1].released
    assert len(run({0: LinearLayer(0)}, *FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)[1].released) == 2
    assert len(run({0: LinearLayer(0)}, *FORWARD, Kind.BACKWARD)[1].released) == 2


def test_what_is_sent_is_never_a_buffer_that_is_used_again() -> None:
    _, post = run({0: PassOn()}, *FORWARD, Kind.BACKWARD, Kind.SEND_BACKWARD)
    assert all(torch.equal(tensor, torch.ones(1, 2, 3)) for tensor in post.sent)


def test_times_are_kept_by_layer_and_part() -> None:
    pipeline, _ = run({4: LinearLayer(0)}, *FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    times = pipeline.times()
    assert [list(part) for part in (times.forward, times.backward, times.weight)] == [[4], [4], [4]]
    assert times.compute == pytest.approx(times.forward[4] + times.backward[4] + times.weight[4])


def test_buffers_are_made_only_when_none_is_free() -> None:
    buffers = Buffers((2, 3), torch.float32, torch.device("cpu"))
    first, second = buffers.take(), buffers.take()
    assert first.data_ptr() != second.data_ptr()
    buffers.give_back(first)
    assert buffers.take() is first
    assert buffers.made == 2


def buffers_made(config: JobConfig, plan: Any, rank: int, port: int, generation: int) -> int:
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, 0))  # type: ignore[arg-type]
    try:
        trainer.connect("127.0.0.1", port, generation)
        trainer.initialize()
        for n in range(1, 4):
            trainer.step(n)
        return trainer._buffers.made
    finally:
        trainer.close()


@pytest.mark.dist
def test_a_run_makes_as_many_buffers_as_the_schedule_holds(pool: RankPool) -> None:
    """Activations in flight, the gradient at work, and two messages posted ahead on each channel."""
    config = small_job(mesh={"pipeline": 3}, train={"global_batch": 12, "steps": 6})
    in_flight = [estimate.peak_in_flight for estimate in make_plan(config).estimates]
    made = JobRunner(pool).call(buffers_made, config)
    for rank, (number, held) in enumerate(zip(made, in_flight, strict=True)):
        channels = (rank > 0) + (rank < 2)
        assert number <= (held if rank > 0 else 0) + 1 + 2 * channels
